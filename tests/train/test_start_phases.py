"""From the command's first instruction to the first step, every second is in a named phase."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lora_rocm.commands import start_run as command
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.layout import RunDir
from lora_rocm.train import pipeline, worker
from tests.event_lines import read_events
from tests.program import RECIPE, Program, images
from tests.tiny_models import SHALLOW, write_tiny_sdxl

BEFORE_STEPS = ("command", "imports", "start", "cache", "load")
PARTS_OF_LOAD = ("plan", "weights", "kernels", "placement")
DELAY_S, ALLOWED = 1.0, 0.2
"""``ALLOWED``: seconds without a name, as a fraction of all seconds, because a busy machine takes longer."""


def test_only_a_delay_between_two_phases_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The delay is the fault; that nothing else is missing is the control. A start of the command takes longer."""
    write_tiny_sdxl(tmp_path / "model", **SHALLOW)
    images(tmp_path / "pics", count=1)
    (tmp_path / "r.yaml").write_text(RECIPE, encoding="utf-8")
    family_for = pipeline.family_for

    def slow(recipe: Recipe) -> object:
        time.sleep(DELAY_S)
        return family_for(recipe)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipeline, "family_for", slow)
    began_s = time.time()
    for module in (command, worker):
        monkeypatch.setattr(module, "BEGAN_S", began_s)
    said = Program(monkeypatch).train("run")
    assert said.code == 0, said.text
    events = read_events(RunDir(tmp_path / "run").events())
    ends = {event["phase"]: event["seconds"] for event in reversed(events) if event.get("state") == "end"}
    begins = {event["phase"]: event["time"] for event in reversed(events) if event.get("state") == "begin"}
    first_step = next(event["time"] for event in events if event["type"] == "step")
    named_s = sum(ends[phase] for phase in BEFORE_STEPS) + first_step - begins["step"]
    parts_s = [ends[part] for part in PARTS_OF_LOAD]
    assert 0 < sum(parts_s) <= ends["load"] + 0.01
    assert DELAY_S <= first_step - began_s - named_s < DELAY_S + ALLOWED * (first_step - began_s)
