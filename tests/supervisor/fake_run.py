"""A run directory as a worker would leave it, without a worker."""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

from lora_rocm.foundation.files import write_json
from lora_rocm.rundir.checkpoint_record import Position, sealed
from lora_rocm.rundir.event_line import event_of
from lora_rocm.rundir.event_types import TYPES, Event, NoticeEvent
from lora_rocm.rundir.events import EventWriter
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.run_context import RunContext
from tests.supervisor.wire import start_fields, step_fields

RECIPE = """\
model: {name_or_path: "builtin:tiny-sdxl"}
data: {path: "builtin:demo", trigger_word: zibu}
train: {max_train_steps: 40}
sample: {prompts: [a zibu, "a <b>zibu</b> & co"], control_prompts: [a circle]}
output: {author: größe}
"""
TITLE = 'name: "größe <script>alert(1)</script>"'
"""A title that no file can have; a run of an earlier version may."""
RECIPES: dict[tuple[str, tuple[str, ...]], str] = {}
"""The recipes that runs were given, by the current folder and the overrides."""


def save_recipe(run_dir: RunDir, *overrides: str) -> None:
    key = os.getcwd(), overrides  # relative paths start there
    if key not in RECIPES:
        from lora_rocm.recipe.load import dump_recipe, load_recipe  # half of a fake worker's start time

        path = run_dir.path / "source.yaml"
        path.write_text(RECIPE.replace("author: größe", TITLE), encoding="utf-8")
        RECIPES[key] = dump_recipe(load_recipe(path, overrides).recipe)
        path.unlink()
    run_dir.recipe.write_text(RECIPES[key], encoding="utf-8")


def event(event_type: str, **fields: Any) -> Event:
    """An event of a fake worker; an event that no reader accepts is refused."""
    return TYPES[event_type](**fields)


def listening(said: list[str]) -> RunContext:
    """A context that records its messages."""
    return RunContext(lambda emitted: said.append(emitted.text) if isinstance(emitted, NoticeEvent) else None)


def heard(fields: dict[str, Any]) -> Event:
    """An event of a fake worker, as its reader gets it: an event that the real writer would refuse is an error here."""
    return event(fields["type"], **{name: value for name, value in fields.items() if name != "type"})


def refused(path: Path) -> list[bytes]:
    """The lines of a file of events that its reader passes over."""
    return [line for line in path.read_bytes().splitlines() if event_of(line) is None]


def as_heard(line: str) -> dict[str, Any]:
    """The event that a child wrote, as its reader gets it; a line that the reader would pass over is an error."""
    read = event_of(line.encode("utf-8"))
    assert read is not None, line
    return read.to_json()


def data_fields(**changes: Any) -> dict[str, Any]:
    fields = {
        "samples": 18,
        "set_aside": [{"where": "pics/<bad>.png", "what": "broken", "fix": "save it again"}],
        "notices": ["two images are the same: a & b"],
        "buckets": {"128x128": 12, "96x160": 6},
        "steps_per_epoch": 5,
        "max_train_steps": 40,
    }
    return {**fields, **changes}


def failure_fields(**changes: Any) -> dict[str, Any]:
    fields = {
        "seen": "died",
        "phase": "step",
        "activity": "step",
        "updates": 12,
        "silent_s": None,
        "limit_s": None,
        "code": "worker-died",
        "what": "It ended without a word.",
        "where": "",
        "stacks": None,
        "kernel_log": [],
    }
    return {**fields, **changes}


def change_fields(**changes: Any) -> dict[str, Any]:
    text = "copies are made by shaders instead of the copy engines"
    return {"id": "sdma-off", "effect": "exact", "seen": "hang", "text": text, **changes}


def restart_fields(**changes: Any) -> dict[str, Any]:
    fields = {"number": 1, "spent": 1, "budget": 10, "progress": True, "from_updates": 10, "attempt": 0, "changes": []}
    return {**fields, **changes}


def safetensors_bytes(num_bytes: int) -> bytes:
    """A whole safetensors file of this size, without tensors."""
    return (num_bytes - 8).to_bytes(8, "little") + b"{}".ljust(num_bytes - 8)


def write_checkpoint(run_dir: RunDir, updates: int, num_bytes: int = 1000, **facts: object) -> Path:
    """A checkpoint as a worker would write it, but with an adapter without tensors."""
    folder, content = run_dir.checkpoint(updates), safetensors_bytes(num_bytes)
    folder.mkdir(parents=True)
    (folder / "adapter.safetensors").write_bytes(content)
    checksums = {"adapter.safetensors": hashlib.sha256(content).hexdigest()}
    state = {"position": asdict(Position(updates, updates)), "facts": facts, "sha256": checksums}
    (folder / "state.json").write_bytes(sealed(state))
    return folder


@cache
def png_of(size: tuple[int, int], colour: tuple[int, int, int]) -> bytes:
    """An image file of one colour; each is compressed once."""
    from PIL import Image

    content = BytesIO()
    Image.new("RGB", size, colour).save(content, "png")
    return content.getvalue()


def write_whole_run(run_dir: RunDir) -> None:
    """Everything that a run can leave: previews, incidents, exports, result."""
    run_dir.create()
    save_recipe(run_dir)
    writer = EventWriter(run_dir.events(), session=1)
    writer.write(event("start", **start_fields()))
    writer.write(event("phase", phase="cache", state="begin", seconds=0.0))
    writer.write(event("cache", what="images", done=18, total=18, per_second=3.5))
    writer.write(event("phase", phase="cache", state="end", seconds=5.5))
    writer.write(event("repaired", kind="image", item="pics/<c>.png", reason="cut short"))
    writer.write(event("data", **data_fields()))
    for updates in range(1, 41):
        writer.write(event("step", **step_fields(updates)))
        if updates % 10 == 0:
            writer.write(event("validation", updates=updates, loss=0.3 - updates / 400))
    writer.write(event("canary", updates=0, passed=True, checks=["sums"], detail="", seconds=0.01))
    writer.write(event("canary", updates=40, passed=True, checks=["sums"], detail="", seconds=0.01))
    writer.write(
        event(
            "incident",
            kind="transfer",
            iteration=7,
            samples=["pics/a.png"],
            detail="<latents> differ",
            action="sent again",
        )
    )
    lora = "checkpoints/lora-step00000040.safetensors"
    writer.write(event("checkpoint", updates=40, path="checkpoints/step-00000040", lora=lora))
    for updates in (0, 20, 40):
        for number in range(3):
            path = run_dir.samples_at(updates) / f"{number:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png_of((128, 128), (updates * 5, number * 80, 120)))
    run_dir.before_after.write_bytes(png_of((640, 900), (0, 128, 128)))
    write_checkpoint(run_dir, 40)
    (run_dir.path / lora).write_bytes(safetensors_bytes(2000))
    run_dir.lora.write_bytes(safetensors_bytes(3000))
    told = {"format": "kohya", "path": "lora.safetensors", "max_difference": 1.5e-6, "cannot_read": ["reader <x>"]}
    writer.write(event("export", **told))
    score = {"score": 0.97, "control": 0.51, "detail": {"before": 0.61, "after": 0.32}, "previews": 8, "demo": False}
    writer.write(event("concept", **score))
    writer.write(event("end", reason="done", updates=40, exit_code=0))
    writer.close()
    write_json(run_dir.result, {"updates": 40, "exports": [told]})
    write_json(
        run_dir.environment,
        {
            "python": "3.11",
            "packages": {"torch": "2.13", "peft": None},
            "variables": [{"variable": "A", "value": "<1>", "why": "because", "source": "here", "from_user": False}],
        },
    )
