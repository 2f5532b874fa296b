"""On a GPU: training with captured steps is training; the graphs are used, and their memory is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lora_rocm.errors import StateError
from lora_rocm.rundir.layout import RunDir
from lora_rocm.train import graphs as graphs_module
from lora_rocm.train.graphs import Capture, Captured, Graphs
from tests.event_lines import read_events
from tests.optim.test_state_guard import PARTS, flip
from tests.train.runs import bytes_of, make_recipe, start, write_material
from tests.train.test_graphs import Layer, sound
from tests.train.test_guard import after_step

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"train": {"gradient_accumulation_steps": 2}},
    "ema": {"train": {"ema_decay": 0.9}},
    "text encoders": {"lora": {"train_text_encoder": True}},
    "checkpointing": {"train": {"gradient_checkpointing": True}},
    "dora": {"lora": {"use_dora": True}},
    "bf16 weights": {"lora": {"weight_dtype": "bf16"}},
    "dropped ranks": {"lora": {"rank_dropout": 0.3, "module_dropout": 0.2}, "train": {"gradient_checkpointing": True}},
    "dropped outputs": {"lora": {"type": "loha", "rank_dropout": 0.3, "module_dropout": 0.2}},
}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_material(tmp_path_factory.mktemp("material"))


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    made: list[int] = []
    run = Captured.run

    def counted(self: Captured, *given: Any) -> Any:
        made.append(1)
        return run(self, *given)

    monkeypatch.setattr(Captured, "run", counted)
    return made


def trained(material: Path, run_dir: Path, graphs: str, precision: str, **sections: Any) -> list[str]:
    sections["train"] = {"mixed_precision": precision, "max_train_steps": 8, **sections.get("train", {})}
    recipe = make_recipe(material, **sections, runtime={"graphs": graphs, "deterministic": True})
    torch.use_deterministic_algorithms(True)
    try:
        assert start(recipe, run_dir, device=GPU)
    finally:
        torch.use_deterministic_algorithms(False)
    return [event["text"] for event in read_events(RunDir(run_dir).events()) if event["type"] == "notice"]


@pytest.mark.parametrize(
    ("variant", "precision"), [*((name, "bf16") for name in VARIANTS), ("plain", "fp16"), ("plain", "no")]
)
def test_replayed_steps_give_the_bytes_of_launched_ones(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replays: list[int], variant: str, precision: str
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    said = trained(material, tmp_path / "graphs", "auto", precision, **VARIANTS[variant])
    assert len(replays) >= 4, said
    made = len(replays)
    trained(material, tmp_path / "eager", "off", precision, **VARIANTS[variant])
    assert len(replays) == made
    assert bytes_of(tmp_path / "graphs") == bytes_of(tmp_path / "eager")


def test_a_graph_that_adds_up_is_not_used(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replays: list[int]
) -> None:
    """As memset nodes that do nothing would make it: gradients of the capture's own batch are in each result."""
    run = Captured.run

    def adds(self: Captured, *given: Any) -> Any:
        passed = run(self, *given)
        for graphs in living:
            graphs.weights.gradients.mul_(1.5)
        return passed

    living: list[Graphs] = []
    init = Graphs.__init__

    def watched(self: Graphs, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        living.append(self)

    monkeypatch.setattr(Graphs, "__init__", watched)
    monkeypatch.setattr(Captured, "run", adds)
    said = trained(material, tmp_path / "run", "auto", "bf16")
    assert sum("different gradients" in text for text in said) == 1


@pytest.mark.parametrize("part", ["weights", "exp_avg_sq"])
def test_a_flipped_bit_in_trained_state_is_seen_between_captured_steps(
    part: str, material: Path, tmp_path: Path, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    how: dict[str, Any] = {"train": {"ema_decay": 0.9}, "output": {"save_every_n_steps": 4}}
    trained(material, tmp_path / "sound", "auto", "bf16", **how)
    with monkeypatch.context() as patch:
        after_step(patch, 6, lambda trainer: flip(PARTS[part](trainer.optimizer), 1 << 22))
        with pytest.raises(StateError) as caught:
            trained(material, tmp_path / "run", "auto", "bf16", **how)
    assert replays and part in caught.value.where
    assert [updates for updates, _ in RunDir(tmp_path / "run").list_checkpoints()] == [4]
    trained(material, tmp_path / "run", "auto", "bf16", **how)
    assert bytes_of(tmp_path / "run") == bytes_of(tmp_path / "sound")


@pytest.mark.parametrize("places", [1, 2])
def test_a_graph_that_takes_the_place_of_another_leaves_the_others_right(
    places: int, monkeypatch: pytest.MonkeyPatch, replays: list[int]
) -> None:
    """The memory pool outlives a graph that is dropped, as long as it has another."""
    monkeypatch.setattr(graphs_module, "MAX_GRAPHS", places)
    layer, eager = Layer(sound, device=GPU), Layer(sound, device=GPU)
    layer.graphs.new_capture = Capture
    stream = [*([64] * 4), *([32] * 3), *([96] * 12), *([64] * 3), *([32] * 26), 96, 64, 32, 96, 64, 32]
    pairs = zip(layer.passes_of(stream), eager.passes_of(stream, captures=False), strict=True)
    assert all(torch.allclose(found, wanted) for found, wanted in pairs)
    assert layer.captured_rows == ({32} if places == 1 else {96, 32}) and len(replays) > 10 and len(layer.said) == 1
