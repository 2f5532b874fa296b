"""A run on a recorded machine with enough steps for a line of a public table."""

from __future__ import annotations

from typing import Any

from lora_rocm.foundation.files import write_json
from lora_rocm.recipe.load import dump_recipe, load_recipe
from lora_rocm.rundir.events import EventWriter
from lora_rocm.rundir.layout import RunDir
from tests.hardware.situations import facts_of
from tests.supervisor.fake_run import RECIPE, event
from tests.supervisor.wire import start_fields, step_fields

DEVICES = {
    "linux-rx7900xtx": "AMD Radeon RX 7900 XTX (gfx1100)",
    "windows-strix-halo": "AMD Radeon(TM) 8060S Graphics (gfx1151)",
    "nvidia-rtx4090": "NVIDIA GeForce RTX 4090",
}


def write_measured_run(
    run_dir: RunDir,
    machine: str = "linux-rx7900xtx",
    overrides: tuple[str, ...] = (),
    *,
    steps: int = 100,
    **start: Any,
) -> None:
    """Write a run with steps of 0.2 s. Steps of the warm-up, and steps with a preview or a checkpoint, take 9 s."""
    run_dir.create()
    source = run_dir.path / "source.yaml"
    source.write_text(RECIPE, encoding="utf-8")
    run_dir.recipe.write_text(dump_recipe(load_recipe(source, overrides).recipe), encoding="utf-8")
    source.unlink()
    facts = facts_of(machine)
    torch = facts.torch.version if facts.torch is not None else "2.13.0+cpu"
    fields = {"device": DEVICES.get(machine, "CPU"), "torch": torch, "precision": "bfloat16"}
    write_json(run_dir.environment, {"lora_rocm": "0.2.0", "machine": facts.to_json(), "settings": []})
    writer = EventWriter(run_dir.events(), session=1)
    writer.write(event("start", **start_fields(**fields | start)))
    for updates in range(1, steps + 1):
        slow = updates <= 20 or updates in (40, 41, 60, 61, 70)
        taken_s = 9.0 if slow else 0.2
        writer.write(
            event("step", **step_fields(updates, step_s=taken_s, memory_bytes=3 * 2**30, max_train_steps=steps))
        )
        if updates == 40:
            writer.write(event("preview", updates=40, images=[]))
        if updates == 60:
            writer.write(event("checkpoint", updates=60, path="checkpoints/step-00000060", lora=None))
        if updates == 70:
            fault = {"kind": "transfer", "iteration": 70, "samples": [], "detail": "x", "action": "sent again"}
            writer.write(event("incident", **fault))
    writer.close()
