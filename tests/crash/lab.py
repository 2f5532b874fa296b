"""Runs that are cut, or have a failing disk, at a chosen call; see ``shim.c`` and ``host.py``. Linux with a C
compiler.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from tests.tiny_models import SHALLOW, write_tiny_sdxl

HERE = Path(__file__).parent
COUNT, EXIT, HALF, FAIL_ONCE, FAIL_FROM, VANISH = range(6)
KILLED, BROKEN = 137, 70
JOB_S = 120.0
UNET, VAE = SHALLOW["unet"], SHALLOW["vae"]
TARGETS = r"mid_block\..*\.(to_q|to_k|net\.0\.proj)"
NOT_COMPARED = (
    "events",
    "heartbeat",
    "stacks",
    "worker.log",
    "environment.json",
    "report.html",
    "recipe.yaml",
    ".parent",
    ".worker",
)
"""Files that record times: their content differs between equal runs. Everything else in a run directory has to be
equal.
"""
PASSING = ("events", "heartbeat", "tensorboard", "worker.log", ".parent", ".worker", "stacks")
"""Files that no later start reads for more than a count."""

VARIANTS: dict[str, list[str]] = {
    "accumulation, two buckets, cosine": [],
    "caches from nothing, average": ["train.ema_decay=0.9", "data.flip_aug=true", "cache.dir={root}/cache"],
    "average, validation, shuffled and dropped captions": [
        "train.ema_decay=0.9",
        "train.gradient_accumulation_steps=1",
        "data.shuffle_caption=true",
        "data.caption_variants=2",
        "data.caption_dropout_rate=0.3",
        "data.validation_split=0.2",
        "train.validation_every_n_steps=2",
    ],
    "text encoders, linear": [
        "lora.train_text_encoder=true",
        "optim.text_encoder_learning_rate=1e-4",
        "optim.lr_scheduler=linear",
    ],
    "dropout, DoRA, all formats": ["lora.dropout=0.2", "lora.use_dora=true", "output.formats=[kohya, diffusers, peft]"],
    "fp16 with loss scale, constant": ["train.mixed_precision=fp16", "optim.lr_scheduler=constant"],
    "previews, average": [
        "train.ema_decay=0.9",
        "sample.prompts=[a zibu]",
        "sample.control_prompts=[a dog]",
        "sample.every_n_steps=2",
        "sample.steps=1",
        "sample.width=32",
        "sample.height=32",
    ],
}
RECIPE = """\
model: {{name_or_path: '{folder}/model'}}
data: {{path: '{folder}/images', resolution: 32, bucket_step: 8}}
lora: {{rank: 2, targets: ['{targets}']}}
optim: {{learning_rate: 1.0e-2, lr_scheduler: cosine, lr_warmup_steps: 1}}
train: {{max_train_steps: 4, batch_size: 2, gradient_accumulation_steps: 2, mixed_precision: "no"}}
runtime: {{device: cpu, threads: 1}}
cache: {{dir: '{folder}/cache'}}
output: {{save_every_n_steps: 2, keep_last: 1}}
"""


def why_not() -> str:
    """Why there can be no lab here; empty where there can."""
    if not sys.platform.startswith("linux"):
        return "LD_PRELOAD is for Linux"
    return "" if shutil.which("cc") else "no C compiler (cc)"


@dataclass(frozen=True)
class Ended:
    """The end of a command. code: of the command, or KILLED. hit: the call that was struck, where one was."""

    code: int
    text: str
    points: int
    hit: str
    seconds: float


@dataclass
class Lab:
    """A folder with a tiny model, images and caches, and the warmed process."""

    folder: Path
    host: subprocess.Popen[str] = field(init=False)
    rounds: int = field(init=False, default=0)

    def started(self) -> Lab:
        self.folder.mkdir(parents=True, exist_ok=True)
        shim = self.folder / "shim.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(shim), str(HERE / "shim.c"), "-ldl"], check=True)
        write_tiny_sdxl(self.folder / "model", unet=UNET, vae=VAE)
        self._images()
        self.recipe = self.folder / "recipe.yaml"
        self.recipe.write_text(RECIPE.format(folder=self.folder, targets=TARGETS), encoding="utf-8")
        environment = {
            **os.environ,
            "LD_PRELOAD": f"./{shim.name}",  # a space in the path would divide it
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "XDG_CONFIG_HOME": str(self.folder / "home"),
            "PYTHONPATH": str(HERE.parents[1]),
        }
        self.stderr = (self.folder / "host.log").open("w", encoding="utf-8")
        self.host = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.host"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            text=True,
            env=environment,
            cwd=self.folder,
        )
        warm = {"arguments": self._arguments(self.folder / "warm", ["output.formats=[kohya, diffusers, peft]"])}
        assert self._ask(warm) == "ready", (self.folder / "host.log").read_text(encoding="utf-8")[-3000:]
        return self

    def close(self) -> None:
        self.host.communicate(timeout=JOB_S)
        self.stderr.close()

    def train(
        self,
        root: Path,
        variant: str,
        at: int = 0,
        mode: int = COUNT,
        error: int = 0,
        faults: tuple[str, ...] = (),
        sets: tuple[str, ...] = (),
    ) -> Ended:
        """``lora-rocm train --resume latest`` in ``root``, struck at call ``at``."""
        sets_of_variant = [word.format(root=root) for word in VARIANTS[variant]]
        said, log = self.folder / "said.json", self.folder / "calls.tsv"
        said.unlink(missing_ok=True)
        root.mkdir(parents=True, exist_ok=True)
        job = {
            "arguments": self._arguments(root / "run", [*sets_of_variant, *sets]),
            "root": str(root),
            "at": at,
            "mode": mode,
            "error": error,
            "log": str(log),
            "said": str(said),
            "faults": faults,
        }
        started = time.perf_counter()
        code = int(self._ask(job))
        seconds = time.perf_counter() - started
        calls = [line.split("\t") for line in log.read_text(encoding="utf-8").splitlines()]
        hit = next((f"{call[1]} {Path(call[4]).relative_to(root)}" for call in calls if int(call[0]) == at), "")
        if code == 0:
            told = json.loads(said.read_text(encoding="utf-8"))
            return Ended(told["code"], told["out"] + told["err"], len(calls), hit, seconds)
        tail = "" if code == KILLED else (self.folder / "host.log").read_text(encoding="utf-8")[-3000:]
        return Ended(code, tail, len(calls), hit, seconds)

    def calls(self) -> list[Call]:
        """The calls of the last run."""
        lines = (self.folder / "calls.tsv").read_text(encoding="utf-8").splitlines()
        fields = [line.split("\t") for line in lines]
        return [Call(int(n), name, int(inode), int(size), Path(path)) for n, name, inode, size, path in fields]

    @contextlib.contextmanager
    def root(self) -> Iterator[Path]:
        """A new folder for one run, gone afterwards."""
        self.rounds += 1
        root = self.folder / f"round {self.rounds}"
        yield root
        shutil.rmtree(root, ignore_errors=True)

    def _arguments(self, run_dir: Path, sets: list[str]) -> list[str]:
        options = [word for override in sets for word in ("--set", override)]
        return ["train", str(self.recipe), "--run-dir", str(run_dir), "--resume", "latest", *options]

    def _ask(self, job: dict[str, Any]) -> str:
        assert self.host.stdin is not None and self.host.stdout is not None
        self.host.stdin.write(json.dumps(job) + "\n")
        self.host.stdin.flush()
        return self.host.stdout.readline().strip()

    def _images(self) -> None:
        generator, folder = random.Random(5), self.folder / "images"
        folder.mkdir()
        for number in range(5):
            size = [(32, 32), (48, 24)][number % 2]
            Image.frombytes("RGB", size, generator.randbytes(3 * size[0] * size[1])).save(folder / f"{number}.png")
            (folder / f"{number}.txt").write_text(f"zibu, cat, {number}", encoding="utf-8")


@dataclass(frozen=True)
class Call:
    """One call that changes something: see ``note`` in the shim."""

    number: int
    name: str
    inode: int
    size: int
    path: Path

    @property
    def passing(self) -> bool:
        return any(part.startswith(PASSING) for part in self.path.parts[-2:])


def results(root: Path) -> dict[str, bytes]:
    """Every result file of a run, also half-written leftovers."""
    run_dir = root / "run"
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    names = {path.relative_to(run_dir).as_posix(): path for path in files if "tensorboard" not in path.parts}
    return {name: path.read_bytes() for name, path in names.items() if not name.startswith(NOT_COMPARED)}


def differing(found: dict[str, bytes], expected: dict[str, bytes]) -> list[str]:
    """Names of files that are not equal, or are on one side only."""
    return sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))


def lose_power(root: Path, calls: list[Call]) -> None:
    """Keep of each file only the bytes flushed to disk: the worst state after a power cut."""
    flushed: dict[int, int] = {}
    dirty: set[int] = set()
    for call in calls[:-1]:  # the last one did not happen
        if call.name in ("write", "writev", "pwrite", "create", "truncate"):
            flushed.setdefault(call.inode, 0)
            dirty.add(call.inode)
        elif call.name == "fsync":
            flushed[call.inode] = call.size
            dirty.discard(call.inode)
    for path in root.rglob("*"):
        if path.is_file() and path.stat().st_ino in dirty:
            os.truncate(path, min(flushed[path.stat().st_ino], path.stat().st_size))


ERRORS = {
    "ENOSPC": errno.ENOSPC,
    "EROFS": errno.EROFS,
    "EACCES": errno.EACCES,
    "EIO": errno.EIO,
    "ESTALE": errno.ESTALE,
}
