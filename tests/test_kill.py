"""Pulling the plug: real processes killed at chosen moments, and the bytes of the run that nobody disturbed.

``LORA_ROCM_KILLS`` sets how many kills the slow test makes (20 by default).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from lora_rocm.rundir.layout import RunDir
from tests.event_lines import read_events
from tests.tiny_llm import write_chats, write_tiny_llm
from tests.tiny_models import RUN_TARGETS, SHALLOW, write_tiny_sdxl

NUM_KILLS = int(os.environ.get("LORA_ROCM_KILLS", "20"))
DEADLINE_S = 240.0
WORKER = "lora_rocm.train.worker"
MOMENTS = ("cache", "anywhere", "step", "checkpoint", "preview", "export")
KINDS = ("tree", "parent", "worker")
"""The killed processes: all at once; the parent, after which its worker saves and leaves; the worker, which is started
again.
"""


def write_recipe(folder: Path) -> Path:
    """Nine images in several buckets, accumulation, EMA, text-encoder LoRA off, previews; 12 updates."""
    write_tiny_sdxl(folder / "model", **SHALLOW)
    images = folder / "images"
    images.mkdir()
    generator = random.Random(5)
    for number in range(9):
        size = [(64, 64), (96, 48), (48, 96)][number % 3]
        image = Image.new("RGB", size)
        image.putdata([tuple(generator.randrange(256) for _ in range(3)) for _ in range(size[0] * size[1])])
        image.save(images / f"{number}.png")
        (images / f"{number}.txt").write_text(f"zibu, red cat, number {number}", encoding="utf-8")
    recipe = folder / "kill.yaml"
    recipe.write_text(
        f"""
model: {{name_or_path: '{folder / "model"}'}}
data:
  path: '{images}'
  resolution: 64
  bucket_step: 16
  shuffle_caption: true
  caption_dropout_rate: 0.2
  flip_aug: true
lora: {{rank: 2, dropout: 0.1, targets: ['{RUN_TARGETS}']}}
optim: {{learning_rate: 1.0e-3, lr_scheduler: cosine, lr_warmup_steps: 2}}
train: {{max_train_steps: 12, batch_size: 2, gradient_accumulation_steps: 2, ema_decay: 0.9, seed: 3}}
sample: {{every_n_steps: 6, prompts: [a zibu], steps: 2, width: 64, height: 64}}
runtime: {{threads: 1, device: cpu}}
output: {{save_every_n_steps: 3, formats: [kohya, peft]}}
""",
        encoding="utf-8",
    )
    return recipe


def write_text_recipe(folder: Path) -> Path:
    """A language model on conversations of several lengths: accumulation, EMA, previews, held-out loss; 12 updates."""
    folder.mkdir(exist_ok=True)
    write_tiny_llm(folder / "model")
    chats = [[("user", f"say {number}"), ("assistant", "zibu " * (1 + 7 * (number % 5)))] for number in range(9)]
    data = write_chats(folder / "chats.jsonl", *chats)
    recipe = folder / "kill.yaml"
    recipe.write_text(
        f"""
model: {{family: causal-lm, name_or_path: '{folder / "model"}'}}
data: {{sources: [{{dataset: '{data}'}}], validation_split: 0.2}}
lora: {{rank: 2, dropout: 0.1, use_rslora: true}}
optim: {{learning_rate: 1.0e-3, lr_scheduler: cosine, lr_warmup_steps: 2}}
train: {{max_train_steps: 12, batch_size: 2, gradient_accumulation_steps: 2, ema_decay: 0.9, seed: 3}}
sample: {{every_n_steps: 6, prompts: [a zibu], steps: 12}}
runtime: {{threads: 1, device: cpu}}
output: {{save_every_n_steps: 3}}
""",
        encoding="utf-8",
    )
    return recipe


RECIPES = {"images": write_recipe, "texts": write_text_recipe}


class Command:
    """``lora-rocm train`` in a separate process, and the means to end it brutally."""

    def __init__(self, recipe: Path, run_dir: Path, cache: Path) -> None:
        arguments = [
            "train",
            str(recipe),
            "--run-dir",
            str(run_dir),
            "--resume",
            "latest",
            "--set",
            f"cache.dir={cache}",
        ]
        self.events = run_dir / "events.jsonl"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lora_rocm", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def wait(self) -> int:
        output, _ = self.process.communicate(timeout=DEADLINE_S)
        assert self.process.returncode in (0, 3), output
        return self.process.returncode

    def wait_or_kill(self) -> None:
        """Wait for an end that is near."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=DEADLINE_S)

    def wait_for(self, moment: str, generator: random.Random) -> bool:
        """Wait until the moment has come (False: the run ended before)."""
        seen, deadline = self._count(moment), time.monotonic() + DEADLINE_S
        if moment == "anywhere":
            time.sleep(generator.uniform(0.2, 6.0))
            return self.process.poll() is None
        while time.monotonic() < deadline:
            if self._count(moment) > seen:
                time.sleep(generator.uniform(0.0, 0.15))
                return self.process.poll() is None
            if self.process.poll() is not None:
                return False
            time.sleep(0.005)
        raise AssertionError(f"waited too long for {moment}")

    def _count(self, moment: str) -> int:
        if not self.events.exists():
            return 0
        text = self.events.read_text(encoding="utf-8", errors="replace")
        return (
            text.count('"type": "step"') if moment == "step" else text.count(f'"phase": "{moment}", "state": "begin"')
        )

    def kill(self, kind: str) -> None:
        """Kill, and wait for the end of this command, unless only its worker was killed."""
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            workers = [child for child in parent.children(recursive=True) if WORKER in " ".join(child.cmdline())]
            killed = {"tree": [parent, *parent.children(recursive=True)], "parent": [parent], "worker": workers}
            for process in killed[kind]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        if kind != "worker":
            self.process.communicate()


def results(run_dir: Path) -> dict[str, bytes]:
    files = [
        *sorted(run_dir.glob("lora.safetensors")),
        *sorted((run_dir / "peft").rglob("*.*")),
        *sorted(run_dir.glob("checkpoints/*.safetensors")),
    ]
    return {file.relative_to(run_dir).as_posix(): file.read_bytes() for file in files}


def endure(
    folder: Path, rounds: list[list[tuple[str, str]]], seed: int, samples: str = "images"
) -> list[dict[str, Any]]:
    """One undisturbed run, and in each round a run with kills at the given moments; all results are compared."""
    recipe = RECIPES[samples](folder)
    assert Command(recipe, folder / "straight", folder / "cache").wait() == 0
    expected = results(folder / "straight")
    assert len(expected) >= 6
    generator, log = random.Random(seed), []
    for number, moments in enumerate(rounds):
        run_dir, cache = folder / f"killed-{number}", folder / f"cache-{number}"
        command, kills = Command(recipe, run_dir, cache), []
        for moment, kind in moments:
            hit = command.wait_for(moment, generator)
            kills.append({"moment": moment, "kind": kind, "hit": hit, "last": last_event(command.events)})
            kills[-1]["at"] = time.time()
            command.kill(kind)
            if kind != "worker" or not hit:
                command.wait_or_kill()
                command = Command(recipe, run_dir, cache)
        assert command.wait() == 0
        assert Command(recipe, run_dir, cache).wait() == 0  # after the end: reports that
        found = results(run_dir)
        assert expected.keys() <= found.keys()  # a worker without a parent saves one more checkpoint
        assert [name for name in expected if found[name] != expected[name]] == []
        log += [{"cost_s": cost_s(run_dir, kill.pop("at")), **kill} for kill in kills]
    return log


def cost_s(run_dir: Path, killed_at: float) -> float | None:
    """Seconds from a kill until the run had come further than before it; None where it was killed again before that."""
    events = read_events(RunDir(run_dir).events())
    starts = [event["time"] for event in events if event["type"] == "start" and event["time"] > killed_at]
    done = [event["updates"] for event in events if event["type"] == "step" and event["time"] <= killed_at]
    further = [
        event["time"]
        for event in events
        if event["time"] > (starts[0] if starts else killed_at)
        and (event["type"] == "end" or (event["type"] == "step" and event["updates"] > max(done, default=0)))
    ]
    if not starts or not further or sum(start < further[0] for start in starts) > 1:
        return None
    return round(float(further[0] - killed_at), 2)


def last_event(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    for line in reversed(lines):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        return " ".join(str(event.get(key, "")) for key in ("type", "phase", "state", "updates"))
    return "nothing"


@pytest.mark.slow  # tests/hangs kills a worker, too, and tests/crash cuts anywhere
def test_two_kills_and_the_same_bytes(tmp_path: Path) -> None:
    log = endure(tmp_path, [[("step", "worker"), ("checkpoint", "parent")]], seed=1)
    assert all(entry["hit"] for entry in log)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("samples", [*RECIPES])
def test_many_kills_at_random_moments_and_the_same_bytes(
    samples: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = random.Random(11)
    kills = [(MOMENTS[number % len(MOMENTS)], generator.choice(KINDS)) for number in range(NUM_KILLS)]
    rounds = [kills[start : start + len(MOMENTS)] for start in range(0, NUM_KILLS, len(MOMENTS))]
    log = endure(tmp_path, rounds, seed=12, samples=samples)
    with capsys.disabled():
        for number, entry in enumerate(log, start=1):
            print(f"kill {number:2}: {entry}")  # noqa: T201 - the record of this test
    assert sum(entry["hit"] for entry in log) >= 0.6 * len(log)
