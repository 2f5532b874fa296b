"""Values that are not finite, inserted into whole small runs: the messages, the written files, and the next start."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_rocm.device.transfer import Clock, DeviceTransfer
from lora_rocm.errors import ModelError, NonFiniteError
from lora_rocm.families.base import Tensors, family_for
from lora_rocm.hardware.settings import Settings
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rules.mitigations import seen_of_code
from lora_rocm.rundir.event_types import Event, StepEvent
from lora_rocm.rundir.layout import RunDir
from lora_rocm.train import context as start_facts
from lora_rocm.train import pipeline, resume
from lora_rocm.train.checkpoint import latest_valid, read_checkpoint
from lora_rocm.train.load_model import HoldsCodes
from lora_rocm.train.loop import Trainer
from lora_rocm.train.session import Session
from tests.event_lines import read_events
from tests.tiny_llm import write_tiny_gpt_oss
from tests.train import runs
from tests.train.runs import CPU, bytes_of, dumped, make_recipe
from tests.train.test_guard import after_step
from tests.wording import says

material = runs.material
STEPS = 8

Seen = list[tuple[int, list[str], float]]
"""(iteration, samples, a number of their noise) of each micro-batch in training."""


def recipe_of(material: Path) -> Recipe:
    """Eight updates of two samples, few layers; a checkpoint after the fourth and the last."""
    return make_recipe(
        material,
        train={"max_train_steps": STEPS, "gradient_accumulation_steps": 1},
        lora={"targets": (r".*mid_block.*attn1\.to_q", r".*mid_block.*attn2\.to_v")},
        output={"save_every_n_steps": 4, "keep_last": 9},
        runtime={"canary_every_n_steps": 0},
    )


@contextmanager
def watched(seen: Seen) -> Iterator[None]:
    """Record the micro-batches of training."""
    original = Trainer._forward_backward

    def noting(trainer: Trainer, batch: dict[str, Any], work: Any) -> None:
        draw = trainer.family.objective.draw

        def drawn(*args: Any) -> Any:
            draws = draw(*args)
            seen.append((batch.iteration, batch.sample_keys, float(draws.tensors["noise"].flatten()[0])))
            return draws

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(trainer.family.objective), "draw", lambda self, *args: drawn(*args))
            original(trainer, batch, work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_forward_backward", noting)
        yield


def start(recipe: Recipe, run_dir: Path, attempt: int = 0, stop_at: int = STEPS + 9) -> bool:
    """One start of the worker's work, which draws other noise where ``attempt`` is not 0."""
    directory = RunDir(run_dir).create()
    directory.stop.unlink(missing_ok=True)
    directory.recipe.write_text(dumped(recipe), encoding="utf-8")
    session = Session(directory, watch_parent=False)

    def stop(event: Event) -> None:
        if isinstance(event, StepEvent) and event.updates >= stop_at:
            directory.stop.touch()

    session.readers.append(stop)
    try:
        checkpoint = resume.find_checkpoint(session, None)
        return pipeline.train(
            pipeline.StartContext(session, recipe, CPU, torch.float32, Settings(), checkpoint, False, attempt)
        )[0]
    finally:
        session.close()


@dataclass
class Sound:
    """A run in which nothing goes wrong."""

    run_dir: Path
    seen: Seen


@pytest.fixture(scope="module")
def sound(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Sound:
    seen: Seen = []
    run_dir = tmp_path_factory.mktemp("sound") / "run"
    with watched(seen):
        assert start(recipe_of(material), run_dir)
    assert not events(run_dir, "incident")
    return Sound(run_dir, seen)


def events(run_dir: Path, event_type: str) -> list[dict[str, Any]]:
    return [event for event in read_events(RunDir(run_dir).events()) if event["type"] == event_type]


def is_finite(run_dir: Path) -> bool:
    """The result and every checkpoint."""
    found = [load_file(RunDir(run_dir).lora)]
    for _, path in RunDir(run_dir).list_checkpoints():
        checkpoint = read_checkpoint(path)
        assert checkpoint is not None
        found += [checkpoint.part_to_resume(part) for part in ("adapter", "ema", "optimizer")]
    return all(tensor.isfinite().all() for tensors in found for tensor in tensors.values())


class Poisoned(DeviceTransfer):
    """Behind the check, one number of the second sample's latents is not finite, in the sends that are listed."""

    hits: dict[int, float] = {}  # noqa: RUF012

    def send(
        self, tensors: Mapping[str, Tensor], fingerprints: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], Clock]:
        arrived, clock = super().send(tensors, fingerprints)
        self.batches = getattr(self, "batches", -1) + 1
        if self.batches in self.hits:
            arrived["latent_mean"] = arrived["latent_mean"].clone()
            arrived["latent_mean"][1, 0, 0, 0] = self.hits[self.batches]
        return arrived, clock


def test_samples_and_gradients_that_are_not_finite_are_named_and_the_file_is_finite(
    material: Path, tmp_path: Path, sound: Sound, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Poisoned, "hits", {1: float("nan"), 2: float("inf")})
    monkeypatch.setattr(start_facts, "DeviceTransfer", Poisoned)
    spoilt: list[int] = []

    def spoil(grad: Tensor) -> Tensor:
        spoilt.append(1)
        return grad * float("nan") if len(spoilt) == 1 else grad

    def arm(trainer: Trainer) -> None:
        list(trainer.optimizer.weights.leaves.values())[-1].register_hook(spoil)

    after_step(monkeypatch, 3, arm)
    assert start(recipe_of(material), tmp_path / "run") and spoilt
    found = events(tmp_path / "run", "incident")
    assert [(event["kind"], event["action"]) for event in found] == [("nonfinite", "update skipped")] * 3
    of_iteration = {iteration: samples for iteration, samples, _ in sound.seen}
    first, second, third = found
    for event, iteration in ((first, 1), (second, 2)):
        victim = of_iteration[iteration][1]
        assert event["iteration"] == iteration and event["samples"] == [victim]
        assert says(event["detail"], "train/not-finite-is-the-loss-of-victim", victim=victim)  # what the user reads
    assert len(third["samples"]) == 2 and says(third["detail"], "train/the-loss-of-each-sample-is-finite")
    assert is_finite(tmp_path / "run") and len(events(tmp_path / "run", "step")) == STEPS
    assert bytes_of(tmp_path / "run") != bytes_of(sound.run_dir)  # three batches were not learnt from


def test_state_or_losses_that_are_not_finite_end_the_worker_and_a_new_start_gives_the_bytes_of_the_sound_run(
    material: Path, tmp_path: Path, sound: Sound
) -> None:
    recipe, run_dir = recipe_of(material), tmp_path / "run"

    def poison_moments(trainer: Trainer) -> None:
        moments = next(t for name, t in trainer.optimizer.state().items() if name.endswith("exp_avg"))
        moments.fill_(float("nan"))
        trainer.optimizer.state_guard.reset()  # as if the update had made them

    def poison_loss(trainer: Trainer) -> None:
        measured = trainer.engine.measured

        def poisoned(*inputs: Tensors) -> tuple[Tensor, Mapping[str, Tensor]]:
            losses_B, measures = measured(*inputs)
            return losses_B * float("nan"), measures

        trainer.engine.measured = poisoned  # type: ignore[method-assign]

    for at, poison, code, newest, seen in (
        (4, poison_moments, "state-nonfinite", 0, "corruption"),  # the same noise again: the bytes of the sound run
        (5, poison_loss, "nonfinite", 4, "nonfinite"),
    ):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(NonFiniteError) as caught:
            after_step(patch, at, poison)
            start(recipe, run_dir)
        assert caught.value.code == code and caught.value.exit_code == 3 and seen_of_code(code) == seen
        last = events(run_dir, "phase")[-1]  # a check before a checkpoint has a checkpoint's time
        assert (last["phase"], last["state"]) == ("checkpoint", "begin" if code == "state-nonfinite" else "end")
        checkpoint, damaged = latest_valid(RunDir(run_dir))
        assert (checkpoint.position.updates if checkpoint else 0) == newest and not damaged
    assert checkpoint is not None and checkpoint.position.nonfinite_in_a_row == 0
    skipped = events(run_dir, "incident")
    assert len(skipped) == 4 and all(len(event["samples"]) == 2 for event in skipped)
    assert says(caught.value.what, "train/4-times-in-a-row") and skipped[-1]["samples"][0] in caught.value.where
    assert start(recipe, run_dir)
    assert is_finite(run_dir) and bytes_of(run_dir) == bytes_of(sound.run_dir)


def rolled_back(sound: Sound, to: Path) -> Path:
    """A run directory with an old checkpoint of the sound run as the newest."""
    shutil.copytree(sound.run_dir, to)
    for updates, path in RunDir(to).list_checkpoints():
        if updates > 4:
            shutil.rmtree(path)
    return to


def test_a_roll_back_draws_other_noise_for_the_same_data_however_often_it_is_interrupted(
    material: Path, tmp_path: Path, sound: Sound, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, seen = recipe_of(material), []
    straight, stopped = (rolled_back(sound, tmp_path / name) for name in ("straight", "stopped"))
    with watched(seen):
        assert start(recipe, straight, attempt=2)
    rest = [its for its in sound.seen if its[0] >= 4]
    assert [its[:2] for its in seen] == [its[:2] for its in rest]  # the order of the data stays
    assert all(one[2] != other[2] for one, other in zip(seen, rest, strict=True))
    assert bytes_of(straight) != bytes_of(sound.run_dir)
    assert not start(recipe, stopped, attempt=2, stop_at=5)
    checkpoint, _ = latest_valid(RunDir(stopped))
    assert checkpoint is not None and checkpoint.position.attempt == 2 and checkpoint.position.updates in (5, 6)
    shutil.copytree(stopped, tmp_path / "forgetful")
    assert start(recipe, stopped)  # it is saved: nobody has to repeat it
    assert bytes_of(stopped) == bytes_of(straight)
    restore = resume.restore

    def forgetful(*args: Any) -> Any:
        position = restore(*args)
        position.attempt = 0
        return position

    monkeypatch.setattr(resume, "restore", forgetful)  # negative control
    assert start(recipe, tmp_path / "forgetful") and bytes_of(tmp_path / "forgetful") != bytes_of(straight)


@pytest.mark.parametrize("value", [3e38, -1e12, float("inf"), float("nan")])
def test_a_base_with_a_number_that_no_weight_has_is_refused_when_it_is_loaded(
    material: Path, tmp_path: Path, value: float
) -> None:
    """Else the loss is not finite at each of six starts."""
    model = Path(shutil.copytree(material / "model", tmp_path / "model"))
    path = model / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if name.endswith("to_v.weight"))
    tensors[name][0, 0] = value
    save_file(tensors, path)
    recipe = make_recipe(material, model={"name_or_path": str(model)})
    with pytest.raises(ModelError) as caught:
        runs.start(recipe, tmp_path / "run")
    wanted = "weights-implausible" if abs(value) < float("inf") else "weights-not-finite"
    assert caught.value.code == wanted and name in caught.value.what and caught.value.exit_code == 2


def test_codes_of_mxfp4_that_stand_for_no_weight_are_named(tmp_path: Path) -> None:
    folder = write_tiny_gpt_oss(tmp_path)
    model = {"family": "causal-lm", "name_or_path": str(folder)}
    sections = {"model": model, "data": {"path": str(tmp_path)}, "train": {"max_train_steps": 1}}
    recipe = recipe_from(sections)
    loaded = family_for(recipe).load(torch.float32, CPU).components["model"]
    experts = [module for module in loaded.modules() if isinstance(module, HoldsCodes)]
    assert experts and not any(module.implausible() for module in experts)
    experts[0].get_parameter("down_proj_scales").data[0, 0, 0] = 255
    assert experts[0].implausible() == ["down_proj_scales"]
