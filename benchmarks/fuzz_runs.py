"""Fuzz targets for files of a run or of this program: checkpoints, event logs, reports, facts, configs."""

from __future__ import annotations

import hashlib
import io
import json
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.fuzz_inputs import STEERING, Refused, model
from benchmarks.mutations import changed, json_bytes

SCRATCH: list[str] = []
"""Folder of the sound files that are to be damaged."""
BAIT = "bait.safetensors"
DEVICE = "/dev/null"  # a device like /dev/zero, but with an end in case it is read
NAMES = (
    f"optimizer.safetensors/../../sound/{BAIT}",
    "state.json",
    "adapter",
    "..",
    "",
    "ema.safetensors",
    "C:\\CON\\NUL",
    "\\\\host\\share\\x",
    "a\0b",
)
"""File names that a state may contain although they are not the checkpoint's."""


@cache
def _checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    import torch

    from lora_rocm.rundir.checkpoint_record import Position
    from lora_rocm.rundir.layout import RunDir
    from lora_rocm.train import checkpoint

    position = Position(**{name: 0 for name in Position.__dataclass_fields__})
    parts = {"adapter": {"w": torch.zeros(3)}, "optimizer": {"m": torch.zeros(3)}}
    run_dir = RunDir(folder).create()
    run_dir.recipe.write_text("{}", encoding="utf-8")  # without a recipe it is not a run
    path = checkpoint.save_checkpoint(run_dir, position, parts, {"threads": 1})
    (folder / BAIT).write_bytes((path / checkpoint.FILE_OF["adapter"]).read_bytes())
    return json.loads((path / checkpoint.STATE_FILE).read_bytes()), {
        file.name: file.read_bytes() for file in path.iterdir() if file.suffix == ".safetensors"
    }


def checkpoint_state(rng: random.Random) -> bytes:
    """Return a damaged state, mostly with a correct seal, so that the checks after the seal are reached."""
    from lora_rocm.rundir import checkpoint_record

    found, _ = _checkpoint(Path(SCRATCH[0]))
    body = {key: value for key, value in found.items() if key != "seal"}
    if rng.random() < 0.2:
        return checkpoint_record.sealed({**body, "sha256": _renamed(rng, body["sha256"])})
    if rng.random() < 0.3:
        return json_bytes(rng, changed(rng, found))
    other = changed(rng, body)
    return checkpoint_record.sealed(other) if isinstance(other, dict) else json_bytes(rng, other)


def _renamed(rng: random.Random, checksums: dict[str, str]) -> dict[str, str]:
    """Add or replace one file name; for readable files the checksum is correct, so only the name is wrong."""
    replaced = rng.choice((None, *checksums))
    kept = {name: checksum for name, checksum in checksums.items() if name != replaced}
    right = {f"../sound/{BAIT}": checksums["adapter.safetensors"], DEVICE: hashlib.sha256(b"").hexdigest()}
    name = rng.choice((*right, rng.choice(NAMES)))
    return {**kept, name: right.get(name, "0" * 64)}


def read_checkpoint(path: Path) -> None:
    """Read a checkpoint as a resume does."""
    from lora_rocm.train import checkpoint

    for name, content in _checkpoint(Path(SCRATCH[0]))[1].items():
        (path.parent / name).write_bytes(content)
    found = checkpoint.read_checkpoint(path.parent)
    if found is None:
        raise Refused("damaged")
    assert set(found.checksums) <= set(checkpoint.FILE_OF.values()), "a file was read that is none of the checkpoint"
    for part in ("adapter", "optimizer"):
        found.part_to_resume(part)


@cache
def _events() -> tuple[bytes, ...]:
    from lora_rocm.rundir.layout import RunDir
    from tests.supervisor.fake_run import write_whole_run

    run_dir = RunDir(Path(SCRATCH[0]) / "run")
    write_whole_run(run_dir)
    return tuple(run_dir.events().read_bytes().splitlines())


def event_log(rng: random.Random) -> bytes:
    """Return a run's events, some of them changed."""
    lines = list(_events())
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(lines))
        lines[at] = json_bytes(rng, changed(rng, json.loads(_events()[at % len(_events())]), 2))
        if rng.random() < 0.2:
            lines.insert(rng.randrange(len(lines)), lines[at])
    return b"\n".join(lines) + rng.choice((b"\n", b"", b'{"type"'))


def read_events(path: Path) -> None:
    """Read events as progress and status do."""
    from lora_rocm.commands.status import status, status_text
    from lora_rocm.report.progress_bar import LineView, ProgressDisplay
    from lora_rocm.rundir.events import EventReader
    from lora_rocm.rundir.layout import RunDir

    stream = io.StringIO()
    display = ProgressDisplay(LineView(stream))
    for event in EventReader(path).poll():
        display.on_event(event)
    shown = stream.getvalue() + status_text(status(RunDir(path.parent)))
    assert not any(letter in shown for letter in STEERING), "a terminal is steered"


def result(rng: random.Random) -> bytes:
    """Return changed contents of a run's JSON files."""
    value = {
        "updates": 40,
        "exports": [{"format": "kohya", "path": "x", "max_difference": 1e-6, "cannot_read": ["a"]}],
        "python": "3.11",
        "packages": {"torch": "2.13", "peft": None},
        "variables": [{"variable": "A", "value": "<1>", "why": "w", "source": "here", "from_user": False}],
        "settings": {"precision": "bf16"},
    }
    return json_bytes(rng, changed(rng, value))


def read_report(path: Path) -> None:
    """Write the report of a run with these files."""
    from lora_rocm.page_parts.inlined import inlined_files
    from lora_rocm.report.report import write_report
    from lora_rocm.rundir.layout import RunDir

    run_dir = RunDir(path.parent)
    content = path.read_bytes()
    run_dir.result.write_bytes(content)
    run_dir.environment.write_bytes(content)
    run_dir.heartbeat().write_bytes(content)
    run_dir.events().write_bytes(b"\n".join([*_events(), content]))
    html = write_report(run_dir).read_text(encoding="utf-8")
    own = inlined_files()
    for script in (f"<script>{own.library}</script>", f'<script type="module">{own.module}</script>'):
        html = html.replace(script, "")
    assert "<script" not in html


def facts(rng: random.Random) -> bytes:
    """Return the changed facts of a recorded machine."""
    files = sorted((Path(__file__).resolve().parents[1] / "tests" / "hosts").glob("*.json"))
    return json_bytes(rng, changed(rng, json.loads(rng.choice(files).read_bytes())))


def read_facts(path: Path) -> None:
    """Load facts, show them, and plan."""
    from lora_rocm.commands.env import planned, result_of
    from lora_rocm.commands.output import json_value
    from lora_rocm.hardware.facts import load_facts
    from lora_rocm.rules.environment_text import described

    load_facts(path)
    made = planned(None, (), path)
    json_value(result_of(*made))
    shown = described(*made, None, explain=True)
    assert not any(letter in shown for letter in STEERING), "a terminal is steered"


def own_json(rng: random.Random) -> bytes:
    """Return changed contents of this program's own JSON files."""
    from lora_rocm.hardware.selftest_result import Result, SelftestVerdict, SoftwareAndGpu

    stack = SoftwareAndGpu("2.13", "hip 7.2", "6.19", "gfx1151")
    verdict = SelftestVerdict(stack, (Result("gemm.lora-bf16-TN", "passed", 0.5),), remedies=("a",)).to_json()
    memory = {"format": 1, "tools": {"hipinfo": {"key": "k", "said": "x"}}}
    beat = {"pid": 1, "count": 2, "activity": "step"}
    return json_bytes(rng, changed(rng, rng.choice((verdict, memory, beat, {"pin_memory": False}))))


def read_own_json(path: Path) -> None:
    """Call each reader of such files."""
    from lora_rocm.hardware.probe.sources import MEMORY_FILE, recalled
    from lora_rocm.hardware.selftest_result import SoftwareAndGpu, path_of, stored
    from lora_rocm.hardware.settings import VARIABLE, settings_from
    from lora_rocm.rundir.heartbeat import read_heartbeat

    content, stack = path.read_bytes(), SoftwareAndGpu("2.13", "hip 7.2", "6.19", "gfx1151")
    path_of(path.parent, stack).write_bytes(content)
    (path.parent / MEMORY_FILE).write_bytes(content)
    verdict = stored(path.parent, stack)
    if verdict is not None:
        assert isinstance(verdict.unusable, str) and verdict.clears_fast in (True, False)
    recalled(path.parent, "hipinfo", "k")
    read_heartbeat(path)
    settings_from({VARIABLE: content.decode("utf-8", "replace")})


@cache
def _configs() -> dict[str, Any]:
    from lora_rocm.base_models.loading import builtin_folder

    folder = builtin_folder("builtin:tiny-sdxl")
    names = ("model_index.json", "vae/config.json", "text_encoder/config.json", "scheduler/scheduler_config.json")
    return {name: json.loads((folder / name).read_bytes()) for name in names}


def config(rng: random.Random) -> bytes:
    """Return a changed model config."""
    name = rng.choice(tuple(_configs()))
    more = {"auto_map": {"AutoModel": "evil.Model"}, "trust_remote_code": True} if rng.random() < 0.2 else {}
    return name.encode() + b"\n" + json_bytes(rng, changed(rng, {**_configs()[name], **more}))


def read_config(path: Path) -> None:
    """Read a config as the check of a base model does."""
    from lora_rocm.base_models.loading import BaseSource, builtin_folder
    from lora_rocm.families.common.unet import detect
    from lora_rocm.families.registry import FAMILIES
    from lora_rocm.families.sdxl.family import EXPECTED

    family, _ = model()
    folder = path.parent / "model"
    if not folder.exists():
        shutil.copytree(builtin_folder("builtin:tiny-sdxl"), folder)
    name, _, content = path.read_bytes().partition(b"\n")
    target = folder / name.decode()
    before = target.read_bytes()
    target.write_bytes(content)
    try:
        source = BaseSource("x", family.source.layout, folder, folder)
        detect.check(source, EXPECTED, FAMILIES)
        for part in ("vae", "text_encoder"):
            source.fingerprint(part)
    finally:
        target.write_bytes(before)
