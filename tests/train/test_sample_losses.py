"""Recording the loss of each sample: the same bytes of the result, complete after stops, none for texts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.sample_losses import read_losses
from lora_rocm.train import build_trainer
from tests.event_lines import read_events
from tests.train.runs import STEPS, bytes_of, make_recipe, material, rewound, start, straight

__all__ = ["material", "straight"]


def test_the_result_is_the_same_without_the_recording(
    material: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_trainer, "_loss_writer", lambda start, position: None)
    assert start(make_recipe(material), tmp_path / "run")
    assert bytes_of(tmp_path / "run") == bytes_of(straight)
    assert RunDir(tmp_path / "run").all_losses() == [] and len(RunDir(straight).all_losses()) == 1


def test_the_records_are_those_of_the_steps(straight: Path) -> None:
    found = read_losses(RunDir(straight).all_losses())
    assert set(found.names) == {f"bild {number}.png" for number in range(5)}
    per_step = Counter(found.updates.tolist())
    assert set(per_step) == set(range(1, STEPS + 1)) and max(per_step.values()) <= 4
    assert ((found.position >= 0) & (found.position <= 1)).all() and len(set(found.position.tolist())) > STEPS
    losses = {
        event["updates"]: event["loss"] for event in read_events(RunDir(straight).events()) if event["type"] == "step"
    }
    for updates, loss in losses.items():  # the weights of an update's samples are equal
        assert found.loss[found.updates == updates].mean() == pytest.approx(loss, rel=1e-4)


def test_a_resume_repeats_no_step(material: Path, straight: Path, tmp_path: Path) -> None:
    run = rewound(straight, tmp_path / "run")
    assert max(read_losses(RunDir(run).all_losses()).updates) == STEPS, "the control: they are still there"
    assert start(make_recipe(material), run)
    assert RunDir(run).losses().read_bytes() == RunDir(straight).losses().read_bytes()
