"""Seconds from the command to the first finished step, on a fresh and on a warm machine, of ours and another trainer.

    python -m benchmarks.first_start ROOT FAMILY [--side base,own,peer] [--starts fresh,warm] [--scripts FOLDER]
                                     [--path FOLDER] [--limit-s 200] [--set KEY=VALUE]... [--peer-word=WORD]...
                                     [--json FILE]
    python -m benchmarks.first_start ROOT FAMILY --toy     # on the CPU: tiny models

One call measures one family: flux-bf16, flux-int8, z-image, sdxl or llama-nf4. The base has the full size and random
weights, and is written once under ROOT (``--side base`` only writes it). The peer is an unmodified script: of diffusers
(``train_dreambooth_lora_*.py``) for image models, and of TRL (``trl/scripts/sft.py``) for the language model.
``--scripts`` is the folder with diffusers' scripts. ``--path`` is a folder of packages that only the peer searches.

Fresh: each side begins with empty caches (Triton, Inductor, the driver's, ``LORA_ROCM_HOME``, encoded samples). Warm:
the same command again, with the caches that the fresh start left. Byte code of Python and the page cache, shared
libraries included, are warm for both. The script of diffusers has no int8, so flux-int8 is compared with the script in
bf16.

Our phases are in the run's events, from the command to the first ``step`` event; "outside" is the rest. A peer's
first step has ended when its log shows the first loss. Each start is stopped then. Nothing is looked up in a network.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POLL_S, STOP_LIMIT_S, PIECE_BYTES = 0.02, 60.0, 16 * 2**20
SIDES, STARTS = ("base", "own", "peer"), ("fresh", "warm")
LOSS = re.compile(rb"loss['\"]?[=:] ?['\"]?\d")
"""A loss in a peer's log, after a step: in the progress bar of diffusers' scripts, or in a line of transformers."""
REPOSITORY = Path(__file__).resolve().parents[1]
RANK, TOKENS, ROWS, IMAGES = 16, 2048, 2, 4
PROMPT = "a photo of a blurred colour"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Row = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """A family to measure. ``base``: folder name of its base. ``script``: of diffusers; empty: TRL's."""

    family: str
    base: str
    script: str = ""
    quantization: str = ""
    structure: str = ""
    pipeline: str = ""


FAMILIES = {
    "flux-bf16": Measured("flux", "flux", "train_dreambooth_lora_flux.py", pipeline="FluxPipeline"),
    "flux-int8": Measured("flux", "flux", "train_dreambooth_lora_flux.py", "int8", pipeline="FluxPipeline"),
    "z-image": Measured("z-image", "z-image", "train_dreambooth_lora_z_image.py", pipeline="ZImagePipeline"),
    "sdxl": Measured("sdxl", "sdxl", "train_dreambooth_lora_sdxl.py", pipeline="StableDiffusionXLPipeline"),
    "llama-nf4": Measured("causal-lm", "llama", quantization="nf4"),
}


@dataclass(frozen=True)
class Asked:
    """The requested measurement."""

    root: Path
    family: str
    toy: bool
    limit_s: float
    scripts: Path | None = None
    path: str = ""
    settings: Sequence[str] = ()
    peer_words: Sequence[str] = ()

    @property
    def measured(self) -> Measured:
        return FAMILIES[self.family]

    @property
    def base(self) -> Path:
        return self.root / f"base-{self.measured.base}{'-toy' if self.toy else ''}"

    @property
    def images(self) -> Path:
        return self.root / ("images-toy" if self.toy else "images")

    @property
    def texts(self) -> Path:
        return self.root / ("texts-toy" if self.toy else "texts")

    @property
    def side_px(self) -> int:
        return 64 if self.toy else 1024

    @property
    def tokens(self) -> int:
        return 64 if self.toy else TOKENS

    def home(self, side: str) -> Path:
        """The folder with all caches of a side."""
        return self.root / f"home {self.family} {side}"

    def environment(self, side: str) -> dict[str, str]:
        """The environment of a side: its own caches, and no network."""
        home = self.home(side)
        folders = [str(REPOSITORY) if side == "own" else self.path, os.environ.get("PYTHONPATH", "")]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, folders)),
            "PYTHONUNBUFFERED": "1",
            "LORA_ROCM_HOME": str(home / "lora-rocm"),
            "TRITON_CACHE_DIR": str(home / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"),
            "CUDA_CACHE_PATH": str(home / "driver"),
            "XDG_CACHE_HOME": str(home / "cache"),
            "HF_HOME": str(home / "hub"),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }


def write_inputs(asked: Asked) -> Row:
    """Write base and data where they are missing, and byte code of our packages and of the peer's."""
    began = time.perf_counter()
    if not asked.base.is_dir():
        unfinished = asked.base.with_name(f"{asked.base.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        (write_toy if asked.toy else write_base)(asked.measured, unfinished)
        unfinished.rename(asked.base)
    if asked.measured.script:
        write_images(asked.images, asked.side_px)
    else:
        write_texts(asked.texts, asked.tokens)
    # Installers compile packages; images of containers may lack byte code, and then each import compiles again
    installed = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    own = {str(REPOSITORY / "lora_rocm"), asked.path, *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    for folder in own | installed:
        if folder and Path(folder).resolve() != REPOSITORY and os.access(folder, os.W_OK):
            compileall.compile_dir(folder, quiet=2, workers=0)
    # The side that starts first would read the GPU's libraries from the disk, and the other one from main memory
    for folder in installed | own:
        for library in Path(folder).rglob("*.so*") if folder else ():
            if library.is_file():
                read_through(library)
    return {"side": "base", "seconds": round(time.perf_counter() - began, 1)}


def read_through(path: Path) -> None:
    """Read a file, so that the page cache has it."""
    with path.open("rb") as file:
        while file.read(PIECE_BYTES):
            pass


def write_base(measured: Measured, folder: Path) -> None:
    """Write a base of full size: random weights in bf16 (SDXL: fp16), with packaged tokenizers."""
    import torch

    if not measured.script:
        from benchmarks.llama_8b import LLAMA_8B, random_model
        from benchmarks.peer_steps import TOKENIZER

        torch.manual_seed(0)
        model = random_model(LLAMA_8B, torch.device("cuda"))
        model.config.dtype = torch.bfloat16
        model.save_pretrained(folder, max_shard_size="4GB")
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(TOKENIZER / name, folder / name)
        return
    from benchmarks.full_size_sdxl import make_model
    from lora_rocm.base_models.loading import ModelLayout
    from lora_rocm.families.flux.family import LAYOUT as FLUX
    from lora_rocm.families.sdxl.family import LAYOUT as SDXL
    from lora_rocm.families.z_image.family import LAYOUT as Z_IMAGE

    layout: ModelLayout = {"flux": FLUX, "sdxl": SDXL, "z-image": Z_IMAGE}[measured.family]
    make_model(folder, layout, torch.float16 if measured.family == "sdxl" else torch.bfloat16)
    # The index of a whole pipeline, as diffusers' scripts read it
    index: dict[str, Any] = {"_class_name": measured.pipeline, "_diffusers_version": "0.36.0"}
    for name, part in layout.parts.items():
        index[name] = [part.cls.__module__.partition(".")[0], part.cls.__name__]
    for name in layout.tokenizers:
        kind = json.loads((folder / name / "tokenizer_config.json").read_text(encoding="utf-8"))["tokenizer_class"]
        index[name] = ["transformers", kind]
    scheduler = json.loads((folder / "scheduler" / "scheduler_config.json").read_text(encoding="utf-8"))
    index["scheduler"] = ["diffusers", scheduler["_class_name"]]
    (folder / "model_index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def write_toy(measured: Measured, folder: Path) -> None:
    """Write a tiny base."""
    from lora_rocm.base_models.loading import builtin_folder

    if measured.family == "flux":
        from tests.tiny_flux import write_tiny_flux

        write_tiny_flux(folder)
        return
    name = {"z-image": "tiny-z-image", "sdxl": "tiny-sdxl", "causal-lm": "tiny-llama"}[measured.family]
    shutil.copytree(builtin_folder(f"builtin:{name}"), folder)


def write_images(folder: Path, side_px: int) -> None:
    """Write images without captions: diffusers' scripts open every file of the folder as an image."""
    from benchmarks.full_size_sdxl import make_images

    if not folder.is_dir():
        make_images(folder, side_px, IMAGES, square=True)
        for caption in folder.glob("*.txt"):
            caption.unlink()


def write_texts(folder: Path, tokens: int) -> None:
    """Write texts that are longer than a batch takes."""
    import random

    folder.mkdir(exist_ok=True)
    draw = random.Random(0)
    words = "seven white foxes hide in the field while two grey owls sing near a barn".split()
    rows = [json.dumps({"text": " ".join(draw.choices(words, k=tokens * 2))}) for _ in range(16)]
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


def own_recipe(asked: Asked) -> Path:
    """Write the recipe of our start."""
    measured = asked.measured
    model: dict[str, Any] = {"family": measured.family, "name_or_path": str(asked.base)}
    if measured.quantization:
        model["quantization"] = measured.quantization
    sections: dict[str, Any] = {
        "model": model,
        "lora": {"rank": RANK, "alpha": RANK, "targets": "attention" if measured.script else "all-linear"},
        "train": {"max_train_steps": 1000, "batch_size": 1 if measured.script else ROWS},
        "cache": {"dir": str(asked.home("own") / "samples")},
    }
    if measured.script:
        sections["data"] = {
            "path": str(asked.images),
            "resolution": asked.side_px,
            "caption_fallback": "filename",
        }
    else:
        source = {"dataset": str(asked.texts / "train.jsonl")}
        sections["data"] = {"sources": [source], "max_length": asked.tokens}
    if not asked.toy:
        sections["train"]["mixed_precision"] = "bf16"
    path = asked.root / f"{asked.family}.yaml"
    path.write_text(json.dumps(sections, indent=1), encoding="utf-8")  # JSON is YAML
    return path


def peer_command(asked: Asked) -> list[str]:
    """Return the peer's command line."""
    measured, out = asked.measured, str(asked.home("peer") / "out")
    if not measured.script:
        spec = importlib.util.find_spec("trl")
        script = Path(asked.path or ".") / "trl" / "scripts" / "sft.py"
        if not script.exists() and spec is not None and spec.origin is not None:
            script = Path(spec.origin).parent / "scripts" / "sft.py"
        options: dict[str, Any] = {
            "model_name_or_path": asked.base,
            "dataset_name": asked.texts,
            "output_dir": out,
            "max_steps": 4,
            "per_device_train_batch_size": ROWS,
            "max_length": asked.tokens,
            "learning_rate": 1e-4,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "lora_r": RANK,
            "lora_alpha": RANK,
        }
        flags = ["--use_peft", "--lora_target_modules", *PROJECTIONS]
        flags += ["--use_cpu"] if asked.toy else ["--load_in_4bit", "--bnb_4bit_quant_type", "nf4"]
        return [sys.executable, str(script), *words_of(options), *flags, *asked.peer_words]
    options = {
        "pretrained_model_name_or_path": asked.base,
        "instance_data_dir": asked.images,
        "instance_prompt": PROMPT,
        "output_dir": out,
        "resolution": asked.side_px,
        "train_batch_size": 1,
        "max_train_steps": 4,
        "learning_rate": 1e-4,
        "rank": RANK,
        "mixed_precision": "no" if asked.toy else "bf16",
        "seed": 0,
    }
    flags = [] if measured.family == "sdxl" else ["--cache_latents"]
    assert asked.scripts is not None, "checked with the arguments"
    return [sys.executable, str(asked.scripts / measured.script), *words_of(options), *flags, *asked.peer_words]


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line."""
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def own_start(asked: Asked, start: str) -> Row:
    """Start our command, and stop it after its first step."""
    from lora_rocm.rundir.layout import RunDir

    home = asked.home("own")
    run = RunDir(home / f"run {start}")
    command = [sys.executable, "-m", "lora_rocm", "train", str(own_recipe(asked)), "--run-dir", str(run.path)]
    command += [word for setting in asked.settings for word in ("--set", setting)]
    log, events = home / f"{start}.log", list[dict[str, Any]]()
    began, ends_at = time.time(), time.monotonic() + asked.limit_s
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, cwd=home, env=asked.environment("own"), stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        while child.poll() is None and time.monotonic() < ends_at:
            time.sleep(POLL_S)
            events = events_of(run)
            if any(event["type"] == "step" for event in events):
                break
        with contextlib.suppress(OSError):
            run.stop.touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(STOP_LIMIT_S)
        ended = child.poll()
        child.kill()
        child.wait()
    if not any(event["type"] == "step" for event in events):
        return {"error": failure(log, ended), "phases": phases(events_of(run), began)}
    return {"command": command, **described(events_of(run), began)}


def events_of(run: Any) -> list[dict[str, Any]]:
    """Return the events of a run, as other programs read them."""
    from tests.event_lines import read_events

    return read_events(run.events()) if run.events().exists() else []


def described(events: Sequence[Mapping[str, Any]], began: float) -> Row:
    """Return the seconds to the first step, its phases, and the kernels that the start compared."""
    first = next(event for event in events if event["type"] == "step")
    before = [event for event in events if event["time"] <= first["time"]]
    seconds, found = first["time"] - began, phases(before, began)
    row: Row = {"first_step_s": round(seconds, 2), "phases": found, "parts": parts(before)}
    row["outside_s"] = round(seconds - sum(found.values()), 2)
    for event in before:
        if event["type"] == "start":
            row["device"] = event["device"]
        elif event["type"] == "kernels" and not event["kernel"]:
            row["kernels"] = {
                key: event[key] for key in ("done", "total", "compiled", "compiled_before", "plain") if key in event
            }
    return row


def phases(events: Iterable[Mapping[str, Any]], began: float) -> dict[str, float]:
    """Return the seconds of each outermost phase. The last is the first step, which its event ends."""
    found, open_s, last = dict[str, float](), list[tuple[str, float]](), began
    for event in events:
        last = event["time"]
        if event["type"] == "step" and open_s:
            name, at = open_s[0]
            found[f"first {name}"] = round(last - at, 2)
            break
        if event["type"] != "phase":
            continue
        if event["state"] == "begin":
            open_s.append((event["phase"], last))
        elif event["phase"] not in {name for name, _ in open_s}:  # command and imports, and parts of a phase
            if not open_s:
                found[event["phase"]] = round(event["seconds"], 2)
        else:
            name, at = open_s.pop()
            if not open_s:
                found[name] = round(found.get(name, 0.0) + last - at, 2)
    return found


def parts(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the seconds of the named parts of phases: events without a begin inside of a phase."""
    found, open_s = dict[str, float](), list[str]()
    for event in events:
        if event["type"] != "phase":
            continue
        if event["state"] == "begin":
            open_s.append(event["phase"])
        elif event["phase"] in open_s:
            open_s.remove(event["phase"])
        elif open_s:
            found[event["phase"]] = round(found.get(event["phase"], 0.0) + event["seconds"], 2)
    return found


def peer_start(asked: Asked, start: str) -> Row:
    """Start the peer's script, and kill it after its first step."""
    home, command = asked.home("peer"), peer_command(asked)
    log, read, ended_at = home / f"{start}.log", bytearray(), list[float]()
    shutil.rmtree(home / "out", ignore_errors=True)
    began, ends_at = time.time(), time.monotonic() + asked.limit_s
    child = subprocess.Popen(
        command,
        cwd=home,
        env=asked.environment("peer"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )

    def watch() -> None:
        assert child.stdout is not None
        while part := os.read(child.stdout.fileno(), 1 << 16):
            now = time.time()
            read.extend(part)
            if not ended_at and LOSS.search(read):
                ended_at.append(now)

    reader = threading.Thread(target=watch, daemon=True)
    reader.start()
    while reader.is_alive() and not ended_at and time.monotonic() < ends_at:
        time.sleep(POLL_S)
    ended = child.poll()
    child.kill()
    child.wait()
    reader.join(STOP_LIMIT_S)
    log.write_bytes(read)
    if not ended_at:
        return {"command": command, "error": failure(log, ended)}
    return {"command": command, "first_step_s": round(ended_at[0] - began, 2)}


def failure(log: Path, code: int | None) -> str:
    """Return how a start failed: its exit status, and the last lines of its output."""
    text = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join([f"exit status {code}" if code is not None else "no step in time", *lines[-4:]])[-1500:]


def measure(asked: Asked, sides: Sequence[str], starts: Sequence[str]) -> list[Row]:
    """Write what is missing, then start each side; fresh starts find empty caches."""
    rows = [write_inputs(asked)]
    for side in sides:
        if side == "base":
            continue
        for start in starts:
            home = asked.home(side)
            if start == "fresh":
                shutil.rmtree(home, ignore_errors=True)
            home.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(home / f"run {start}", ignore_errors=True)
            row = (own_start if side == "own" else peer_start)(asked, start)
            rows.append({"family": asked.family, "side": side, "start": start, **row})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table in Markdown. The ratio is ours to the peer's."""
    peers = {row["start"]: row.get("first_step_s") for row in rows if row["side"] == "peer"}
    lines = ["| family | side | start | first step s | ratio | phases s | outside s |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        if row["side"] == "base":
            continue
        seconds, other = row.get("first_step_s"), peers.get(row["start"])
        ratio = f"{seconds / other:.2f}" if row["side"] == "own" and seconds and other else "-"
        shown_parts = [f"{name} {value:g}" for name, value in row.get("parts", {}).items()]
        told = [f"{name} {value:g}" for name, value in row.get("phases", {}).items()]
        told = [
            f"{each} ({', '.join(shown_parts)})" if each.startswith("load ") and shown_parts else each for each in told
        ]
        shown = seconds if seconds is not None else row["error"].replace("|", "/")[-200:]
        cells = [
            row["family"],
            row["side"],
            row["start"],
            shown,
            ratio,
            ", ".join(told) or "-",
            row.get("outside_s", "-"),
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("family", choices=tuple(FAMILIES))
    parser.add_argument("--side", default=",".join(SIDES), metavar="SIDE,SIDE")
    parser.add_argument("--starts", default=",".join(STARTS), metavar="START,START")
    parser.add_argument("--scripts", type=Path, help="folder with diffusers' scripts")
    parser.add_argument("--path", default="", help="folder of packages that only the peer searches")
    parser.add_argument("--limit-s", type=float, default=200.0, help="of each start")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for our recipe")
    parser.add_argument("--peer-word", action="append", default=[], metavar="WORD", help="for the peer's command line")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    sides, starts = options.side.split(","), options.starts.split(",")
    if unknown := {*sides, *starts} - {*SIDES, *STARTS}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if "peer" in sides and FAMILIES[options.family].script and options.scripts is None:
        parser.error("--scripts: the folder with diffusers' train_dreambooth_lora_*.py")
    root = options.root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    scripts = options.scripts.resolve() if options.scripts else None
    path = str(Path(options.path).resolve()) if options.path else ""
    asked = Asked(root, options.family, options.toy, options.limit_s, scripts, path, options.set, options.peer_word)
    rows = measure(asked, sides, starts)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print(table(rows))
    return 0 if all("error" not in row for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
