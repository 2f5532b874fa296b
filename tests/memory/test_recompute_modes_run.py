"""Whole runs with kept attention and with inputs in main memory: a full device, and another mode after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lora_rocm.device.kept_attention import AttentionStore
from lora_rocm.errors import MachineError
from lora_rocm.families.common.block_inputs import BlockInputs
from lora_rocm.memory import oom_recovery
from lora_rocm.rundir.layout import RunDir
from tests.event_lines import read_events
from tests.train.runs import bytes_of, losses_of, make_recipe, material, start, straight

__all__ = ["material", "straight"]

FULL = "HIP out of memory. Tried to allocate 2.00 MiB."
PLACES: dict[str, tuple[type, str]] = {
    "attention": (AttentionStore, "_give"),  # in a recomputation
    "inputs": (BlockInputs, "_restored"),  # before a recomputation, when earlier inputs are in transit
    "inputs, forward": (BlockInputs, "_send"),  # in the forward pass
}


class FullOnce:
    """A device that is full at one call of a method; all other calls are counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, place: str, at: int) -> None:
        owner, name = PLACES[place]
        self.calls, whole = 0, getattr(owner, name)

        def method(this: object, *args: Any) -> Any:
            self.calls += 1
            if self.calls == at:
                raise torch.OutOfMemoryError(FULL)
            return whole(this, *args)

        monkeypatch.setattr(owner, name, method)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oom_recovery, "empty_pools", lambda: None)


def changes_in(run: Path) -> list[str]:
    return [event["id"] for event in read_events(RunDir(run).events()) if event["type"] == "change"]


def test_a_run_changes_its_mode_at_each_start_and_no_byte_changes(
    material: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention, inputs = (FullOnce(monkeypatch, place, 0) for place in ("attention", "inputs"))
    for memory, stop_at in (("attention", 1), ("inputs", 3), ("recompute", None)):
        recipe = make_recipe(material, runtime={"memory": memory})
        assert start(recipe, tmp_path / "run", stop_at=stop_at) == (stop_at is None)
    assert attention.calls and inputs.calls, "the control: both modes were on"
    assert bytes_of(tmp_path / "run") == bytes_of(straight)
    assert losses_of(tmp_path / "run") == losses_of(straight)


@pytest.mark.parametrize("place", PLACES)
def test_a_full_device_halves_the_micro_batch_and_the_mode_stays(
    material: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The step is repeated after it was interrupted in the middle of a pass."""
    at = 30
    full = FullOnce(monkeypatch, place, at)
    assert start(make_recipe(material, runtime={"memory": place.partition(",")[0]}), tmp_path / "run")
    assert changes_in(tmp_path / "run") == ["micro-batch-halved"]
    assert full.calls > 2 * at, "the mode is still on"
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(straight), rel=1e-5)


def test_attention_is_recomputed_where_nothing_else_is_left(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = {"max_train_steps": 2, "batch_size": 1, "gradient_accumulation_steps": 1}
    assert start(make_recipe(material, train=train), tmp_path / "plain")
    full = FullOnce(monkeypatch, "attention", 3)
    assert start(make_recipe(material, train=train, runtime={"memory": "attention"}), tmp_path / "run")
    assert changes_in(tmp_path / "run") == ["checkpointing"] and full.calls == 3
    assert bytes_of(tmp_path / "run") == bytes_of(tmp_path / "plain")


def test_inputs_in_main_memory_leave_nothing_to_reduce(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = {"max_train_steps": 2, "batch_size": 1, "gradient_accumulation_steps": 1}
    FullOnce(monkeypatch, "inputs", 3)
    with pytest.raises(MachineError) as caught:
        start(make_recipe(material, train=train, runtime={"memory": "inputs"}), tmp_path / "run")
    assert caught.value.code == "out-of-memory" and changes_in(tmp_path / "run") == []
