"""No checkpoint after kernels, the base's weights or the state went wrong; and nothing changes while all is well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lora_rocm.checks.canary import Canary
from lora_rocm.errors import CanaryError, ExportError, NonFiniteError, StateError
from lora_rocm.export import writers
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.event_types import Event, StepEvent
from lora_rocm.rundir.layout import RunDir
from lora_rocm.train import checkpoint
from lora_rocm.train.guard import Guard
from lora_rocm.train.hooks import Save
from lora_rocm.train.loop import Trainer
from tests.device.broken import PRODUCTS, Broken, Fault, one_nan, stale, wrong_tail, zeros
from tests.event_lines import read_events
from tests.train.runs import bytes_of, make_recipe, material, start
from tests.wording import saying

__all__ = ["material"]


def recipe_of(material: Path, canary_every_n_steps: int = 0, **train: Any) -> Recipe:
    """Six updates, a checkpoint after each second."""
    return make_recipe(
        material,
        train={"gradient_accumulation_steps": 1, "ema_decay": 0.9, **train},
        runtime={"canary_every_n_steps": canary_every_n_steps},
        output={"save_every_n_steps": 2, "keep_last": 9},
    )


def after_step(monkeypatch: pytest.MonkeyPatch, updates: int, act: Callable[[Trainer], object]) -> None:
    """Do something to the run when update ``updates`` is confirmed, before hooks see it."""
    fit = Trainer.fit

    def watched(trainer: Trainer, max_train_steps: int) -> bool:
        emit = trainer.context.emit

        def told(event: Event) -> None:
            emit(event)
            if isinstance(event, StepEvent) and event.updates == updates:
                act(trainer)

        trainer.context = replace(trainer.context, emit=told)
        return fit(trainer, max_train_steps)

    monkeypatch.setattr(Trainer, "fit", watched)


class Later(Broken):
    """Kernels that are correct until they are spoilt."""

    def __init__(self, fault: Fault) -> None:
        self.spoilt = False
        super().__init__(PRODUCTS, lambda right, before: fault(right, before) if self.spoilt else right)

    def spoil(self, trainer: Trainer) -> None:
        self.spoilt = True


def written(run_dir: Path) -> tuple[list[int], list[str]]:
    """Updates of the checkpoints that are whole, and the names of all LoRA files."""
    directory = RunDir(run_dir)
    whole = [updates for updates, path in directory.list_checkpoints() if checkpoint.read_checkpoint(path) is not None]
    return whole, sorted(path.name for path in run_dir.rglob("*lora*.safetensors"))


def looks(run_dir: Path, weights: str = "base weights") -> list[tuple[int, bool]]:
    """(updates, passed) of the checks of a training, or of its caching (``ENCODERS``)."""
    events = [event for event in read_events(RunDir(run_dir).events()) if event["type"] == "canary"]
    return [(event["updates"], event["passed"]) for event in events if weights in event["checks"]]


@pytest.fixture(scope="module")
def sound(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which nothing goes wrong."""
    run_dir = tmp_path_factory.mktemp("sound") / "run"
    assert start(recipe_of(material), run_dir)
    return run_dir


def test_it_looks_at_the_start_and_before_anything_is_written_and_once_for_an_update(
    material: Path, sound: Path, tmp_path: Path
) -> None:
    assert looks(sound) == [(updates, True) for updates in (0, 2, 4, 6)]
    assert not start(recipe_of(material, 3), tmp_path / "run", stop_at=4)  # one more is in progress
    assert start(recipe_of(material, 3), tmp_path / "run")
    assert looks(tmp_path / "run") == [(updates, True) for updates in (0, 2, 3, 4, 5, 5, 6)]


@pytest.mark.slow
def test_a_look_at_every_step_and_none_at_all_give_the_same_bytes(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(name: str, every: int) -> dict[str, bytes]:
        recipe = recipe_of(material, every, mixed_precision="bf16")
        recipe = recipe.model_copy(update={"lora": recipe.lora.model_copy(update={"dropout": 0.2})})
        assert start(recipe, tmp_path / name)
        last = RunDir(tmp_path / name).checkpoint(6)
        return {path.name: path.read_bytes() for path in [RunDir(tmp_path / name).lora, *last.glob("*.safetensors")]}

    often = trained("often", 1)
    monkeypatch.setattr(Guard, "check_all", lambda self, updates: None)
    monkeypatch.setattr(Guard, "check_kernels", lambda self, updates: None)
    assert trained("never", 0) == often and len(often) == 4
    assert len(looks(tmp_path / "often")) == 7 and not looks(tmp_path / "never")


@pytest.mark.parametrize(
    ("fault", "every"),
    [
        (zeros, 1),
        pytest.param(wrong_tail, 0, marks=pytest.mark.slow),
        pytest.param(one_nan, 0, marks=pytest.mark.slow),
        (stale, 0),
    ],
    ids=["zeros", "tail", "nan", "stale"],
)
def test_kernels_that_go_wrong_are_caught_before_the_next_checkpoint(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault, every: int
) -> None:
    with Later(fault) as kernels:
        after_step(monkeypatch, 3, kernels.spoil)
        with pytest.raises(CanaryError) as caught:
            start(recipe_of(material, every), tmp_path / "run")
    assert caught.value.exit_code == 3 and "LoRA products" in caught.value.where
    assert looks(tmp_path / "run")[-1] == (3 if every else 4, False)
    assert written(tmp_path / "run") == ([2], ["lora-step00000002.safetensors"])


def test_without_the_canary_wrong_kernels_go_into_a_checkpoint(
    material: Path, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the test above."""
    monkeypatch.setattr(Canary, "failure", lambda self: None)
    with Later(zeros) as kernels:
        after_step(monkeypatch, 2, kernels.spoil)
        start(recipe_of(material), tmp_path / "run", stop_at=3)
    assert 4 in written(tmp_path / "run")[0]
    poisoned, right = (checkpoint.read_checkpoint(RunDir(path).checkpoint(4)) for path in (tmp_path / "run", sound))
    assert poisoned is not None and right is not None
    ours, theirs = poisoned.part_to_resume("adapter"), right.part_to_resume("adapter")
    assert any(not torch.equal(ours[name], theirs[name]) for name in theirs)


def test_kernels_that_are_wrong_at_the_start_never_train(material: Path, sound: Path, tmp_path: Path) -> None:
    kernels = Later(zeros)
    kernels.spoilt = True
    with kernels, pytest.raises(CanaryError, match="lora-rocm doctor"):
        start(recipe_of(material), tmp_path / "run")  # the caches are filled: ``sound`` has done so
    events = {event["type"] for event in read_events(RunDir(tmp_path / "run").events())}
    assert "step" not in events and written(tmp_path / "run") == ([], [])


def test_a_flipped_bit_in_the_base_is_caught(
    material: Path, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flip(trainer: Trainer) -> None:
        weight = trainer.model.components["unet"].conv_in.weight
        assert not weight.requires_grad
        weight.data.view(torch.int32).view(-1)[17] ^= 1 << 11

    with monkeypatch.context() as patch:
        after_step(patch, 3, flip)
        with pytest.raises(CanaryError, match=r"unet\.conv_in\.weight") as caught:
            start(recipe_of(material), tmp_path / "run")
    assert caught.value.code == "canary-weights"
    assert written(tmp_path / "run")[0] == [2]
    assert start(recipe_of(material), tmp_path / "run")
    assert bytes_of(tmp_path / "run") == bytes_of(sound)


def some_weight(trainer: Trainer) -> Tensor:
    return next(iter(trainer.optimizer.parameters.values()))


def moment_of_some_weight(trainer: Trainer, moment: str) -> Tensor:
    return trainer.optimizer.state()[f"{next(iter(trainer.optimizer.parameters))}.{moment}"]


POISONS: dict[str, Callable[[Trainer], Tensor]] = {
    "weight": lambda trainer: some_weight(trainer).data,
    "average of": lambda trainer: next(iter(trainer.optimizer.ema.values())),
    "exp_avg": lambda trainer: moment_of_some_weight(trainer, "exp_avg"),
    "exp_avg_sq": lambda trainer: moment_of_some_weight(trainer, "exp_avg_sq"),
    "loss_scale": lambda trainer: trainer.optimizer.loss_scale,
}


def flip(tensor: Tensor) -> None:
    tensor.view(torch.int32).view(-1)[3] ^= 1 << 22


def test_a_flipped_bit_in_what_is_trained_is_never_trained_on_or_written(
    material: Path, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two updates; while the average is read to be saved. A new start gives the bytes of the sound run."""
    recipe, run_dir = recipe_of(material), tmp_path / "run"
    with monkeypatch.context() as patch:
        after_step(patch, 3, lambda trainer: flip(POISONS["exp_avg_sq"](trainer)))
        with pytest.raises(StateError, check=saying("train/not-what-the-last-update-made-of")) as caught:
            start(recipe, run_dir)
    assert caught.value.where == "after 3 updates: exp_avg_sq" and caught.value.exit_code == 3
    assert written(run_dir) == ([2], ["lora-step00000002.safetensors"])
    with monkeypatch.context() as patch:
        write = writers.write

        def spoiling(*given: Any) -> Any:
            digests = write(*given)
            if RunDir(run_dir).checkpoint_lora(4) in given:
                flip(POISONS["average of"](trainers[0]))
            return digests

        trainers: list[Trainer] = []
        patch.setattr(writers, "write", spoiling)
        after_step(patch, 3, trainers.append)
        with pytest.raises(StateError, check=saying("train/average-of-the-weights")):
            start(recipe, run_dir)
    assert trainers and written(run_dir) == ([2], ["lora-step00000002.safetensors"])
    assert start(recipe, run_dir)
    assert bytes_of(run_dir) == bytes_of(sound)


def poison(trainer: Trainer, where: str, value: float) -> None:
    """The state changes as if the last update had written it: only then does it count as the update's result."""
    POISONS[where](trainer).view(-1)[-1:].fill_(value)
    trainer.optimizer.state_guard.reset()


def test_state_that_is_not_finite_is_named_and_not_written(
    material: Path, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, each before the same checkpoint. The control: it is written when all is well again."""
    run_dir, refused = tmp_path / "run", []

    def act(trainer: Trainer) -> None:
        (hook,) = (hook for hook in trainer.hooks if isinstance(hook, Save))
        for where, value in (*((where, float("nan")) for where in POISONS), ("exp_avg_sq", float("inf"))):
            right = POISONS[where](trainer).clone()
            poison(trainer, where, value)
            with pytest.raises(NonFiniteError) as caught:
                hook.act(trainer)
            assert (
                caught.value.code == "state-nonfinite" and where in caught.value.where and "1 of" in caught.value.what
            )
            assert written(run_dir) == ([2], ["lora-step00000002.safetensors"])
            POISONS[where](trainer).copy_(right)
            refused.append(where)
        trainer.optimizer.state_guard.reset()

    after_step(monkeypatch, 4, act)
    assert start(recipe_of(material), run_dir)
    assert len(refused) == len(POISONS) + 1 and bytes_of(run_dir) == bytes_of(sound)
    assert written(run_dir)[0] == written(sound)[0]


def test_without_the_look_state_that_is_not_finite_would_be_written(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the test above."""
    monkeypatch.setattr(Guard, "check_all", Guard.check_kernels)
    after_step(monkeypatch, 4, lambda trainer: poison(trainer, "exp_avg", float("nan")))
    with pytest.raises(ExportError):  # a step later the weights are of no use
        start(recipe_of(material), tmp_path / "run", stop_at=4)
    poisoned = checkpoint.read_checkpoint(RunDir(tmp_path / "run").checkpoint(4))
    assert poisoned is not None
    assert any(tensor.isnan().any() for tensor in poisoned.part_to_resume("optimizer").values())
