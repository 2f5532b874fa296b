"""Whole runs in this process: any number of stops gives the bytes of the undisturbed run."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_rocm.adapters.base import Adapter
from lora_rocm.dataset.order.batch_plan import BatchPlan
from lora_rocm.dataset.order.update_note import larger_updates_note
from lora_rocm.device import attention
from lora_rocm.device.transfer import DeviceTransfer, copy_to_device
from lora_rocm.errors import DataError, ModelError, ResumeError, TransferError
from lora_rocm.hardware.settings import Settings
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.checkpoint_record import Position
from lora_rocm.rundir.layout import RunDir
from lora_rocm.train import context as start_facts
from lora_rocm.train import pipeline, resume
from lora_rocm.train.checkpoint import latest_valid, save_checkpoint
from lora_rocm.train.loop import Trainer
from tests.config_mutations import mutate
from tests.event_lines import read_events
from tests.tiny_models import SHALLOW, write_tiny_sdxl
from tests.train.runs import CPU, STEPS, bytes_of, losses_of, make_recipe, material, rewound, start, straight
from tests.wording import saying, says, says_if, worded

__all__ = ["material", "straight"]


def weights_of(path: Path) -> dict[str, bytes]:
    """The tensors of a file; its metadata differ."""
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(path).items()}


def test_another_way_of_attention_takes_torchs_place_in_every_pass(
    material: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, whole = [0, 0], attention.grouped()
    for recomputes in (False, True):

        def counted(*args: Any, recomputes: bool = recomputes) -> Tensor:
            calls[recomputes] += 1
            return whole(*args)

        monkeypatch.setitem(attention.OTHERS, "math-groups", lambda made=counted: made)
        recipe = make_recipe(material, train={"gradient_checkpointing": recomputes, "max_train_steps": 1})
        run = tmp_path / str(recomputes)
        assert start(recipe, run, settings=Settings(attention="math-groups"))
        assert losses_of(run) == pytest.approx(losses_of(straight)[:1], rel=1e-4)
    assert 0 < 2 * calls[False] == calls[True], "a recomputed block computes it again"


VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "accumulation, two buckets": {},
    "average": {"train": {"ema_decay": 0.9, "gradient_accumulation_steps": 1}},
    "text encoders": {"lora": {"train_text_encoder": True}, "optim": {"text_encoder_learning_rate": 1e-4}},
    "dropout, DoRA": {"lora": {"dropout": 0.2, "use_dora": True}},
    "dropped ranks, own ranks and rates, limited norms": {
        "lora": {"rank_dropout": 0.3, "module_dropout": 0.2, "loraplus_lr_ratio": 4.0, "scale_weight_norms": 0.01}
        | {"overrides": [{"match": ".*to_q", "rank": 1, "learning_rate": 1e-2}]},
        "train": {"gradient_checkpointing": True},
    },
    "LoHa, dropped outputs, limited norms": {
        "lora": {"type": "loha", "rank_dropout": 0.3, "module_dropout": 0.2, "scale_weight_norms": 0.01},
        "train": {"gradient_checkpointing": True},
    },
    "PiSSA": {"lora": {"init": "pissa", "overrides": [{"match": ".*to_q", "rank": 1}]}, "train": {"ema_decay": 0.9}},
    "EVA": {"lora": {"init": "eva", "use_dora": True}, "train": {"ema_decay": 0.9}},
    "trained norms": {"lora": {"train_norms": True}, "train": {"ema_decay": 0.9, "gradient_checkpointing": True}},
    "fp16 with loss scale": {"train": {"mixed_precision": "fp16"}},
    "Prodigy, two rates, bf16 weights": {
        "optim": {"optimizer": "prodigy", "learning_rate": 1.0, "text_encoder_learning_rate": 0.5, "d0": 1e-3},
        "lora": {"train_text_encoder": True, "weight_dtype": "bf16"},
        "train": {"ema_decay": 0.9},
    },
    "schedule-free": {"optim": {"optimizer": "adamw_schedule_free", "lr_scheduler": "constant"}},
    "8-bit moments": {"optim": {"optimizer": "adamw_8bit"}},
    "CAME, fp16 with loss scale": {"optim": {"optimizer": "came"}, "train": {"mixed_precision": "fp16"}},
    "shuffled, dropped, mirrored": {
        "data": {"shuffle_caption": True, "caption_dropout_rate": 0.3, "flip_aug": True, "validation_split": 0.2},
        "train": {"validation_every_n_steps": 2},
        "objective": {"noise_offset": 0.05, "min_snr_gamma": 5.0},
    },
}


OFTEN = ("accumulation, two buckets",)
"""The others take long; benchmarks/reliability.py crashes cuts them everywhere."""


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in VARIANTS]
)
def test_any_number_of_stops_gives_the_same_bytes(material: Path, straight: Path, tmp_path: Path, variant: str) -> None:
    recipe = make_recipe(material, **VARIANTS[variant])
    if VARIANTS[variant]:
        straight = tmp_path / "straight"
        assert start(recipe, straight)
    generator = random.Random(variant)
    for stop in (generator.choice((1, 2)), generator.choice((3, 4))):
        assert not start(recipe, tmp_path / "stopped", stop_at=stop)
    assert start(recipe, tmp_path / "stopped")
    assert bytes_of(tmp_path / "stopped") == bytes_of(straight)


def test_a_run_begun_in_the_earlier_order_keeps_it(
    material: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints of earlier versions do not name an order: their updates are of one bucket each."""
    recipe, order = make_recipe(material), {"by_length": True, "one_bucket_updates": True}
    with monkeypatch.context() as earlier:
        earlier.setattr(pipeline, "order_of", lambda checkpoint: order)
        assert start(recipe, tmp_path / "whole")
        assert not start(recipe, tmp_path / "stopped", stop_at=2)
    run_dir = RunDir(tmp_path / "stopped")
    found, _ = latest_valid(run_dir)
    assert found is not None
    parts = {part: dict(found.part_to_resume(part)) for part in ("adapter", "ema", "optimizer")}
    facts = {key: value for key, value in found.facts.items() if key != "one_bucket_updates"}
    shutil.rmtree(found.path)
    save_checkpoint(run_dir, found.position, parts, facts)
    assert start(recipe, run_dir.path)
    assert weights_of(run_dir.lora) == weights_of(RunDir(tmp_path / "whole").lora), "one process, one computation"
    assert losses_of(tmp_path / "whole")[1:] != losses_of(straight)[1:], "the control: a new run has another order"


def test_what_check_says_of_larger_updates_a_run_says_too(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(material, train={"max_train_steps": 1}, sample={"prompts": []})
    monkeypatch.setattr(BatchPlan, "one_bucket_steps", property(lambda plan: plan.steps_per_epoch + 90))
    assert start(recipe, tmp_path / "run")
    (data,) = read_events(RunDir(tmp_path / "run").events(), "data")
    wanted = larger_updates_note(recipe.train, data["steps_per_epoch"], data["steps_per_epoch"] + 90)
    assert wanted is not None and data["notices"].count(wanted) == 1
    assert larger_updates_note(recipe.train, 5, 5) is None, "the control: nothing has changed"


@pytest.mark.parametrize(
    "forgotten",
    ["adapter", pytest.param("optimizer", marks=pytest.mark.slow), pytest.param("position", marks=pytest.mark.slow)],
)
def test_a_resume_that_forgets_something_gives_other_bytes(
    material: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    """Negative control of the test above."""
    recipe = make_recipe(material)
    rewound(straight, tmp_path / "stopped")
    if forgotten == "position":
        restore = resume.restore
        monkeypatch.setattr(resume, "restore", lambda *args: Position(iteration=2, updates=restore(*args).updates))
    elif forgotten == "optimizer":
        monkeypatch.setattr("lora_rocm.optim.base.GatedOptimizer.load", lambda self, *tensors: self.state_guard.reset())
    else:
        monkeypatch.setattr("lora_rocm.adapters.kinds.lora.Adapter.load", lambda self, tensors: None)
    assert start(recipe, tmp_path / "stopped")
    assert bytes_of(tmp_path / "stopped") != bytes_of(straight)


def test_a_damaged_newest_checkpoint_costs_steps_but_not_the_result(
    material: Path, straight: Path, tmp_path: Path
) -> None:
    recipe = make_recipe(material)
    last = RunDir(rewound(straight, tmp_path / "stopped", STEPS)).list_checkpoints()[-1][1]
    newest = last / "adapter.safetensors"
    newest.write_bytes(newest.read_bytes()[:-8])
    assert start(recipe, tmp_path / "stopped")
    assert bytes_of(tmp_path / "stopped") == bytes_of(straight)
    notices = [
        event["text"] for event in read_events(RunDir(tmp_path / "stopped").events()) if event["type"] == "notice"
    ]
    assert says(notices, "train/name-is-damaged", name=last.name)


def test_more_steps_may_be_asked_for_on_resume(material: Path, tmp_path: Path) -> None:
    def recipe(steps: int, schedule: str = "constant") -> Recipe:
        train = {"max_train_steps": steps, "gradient_accumulation_steps": 1}
        return make_recipe(material, optim={"lr_scheduler": schedule}, train=train)

    def said() -> list[str]:
        return [event["text"] for event in read_events(RunDir(tmp_path / "short").events(), "notice")]

    short, long = recipe(1), recipe(3)
    assert start(long, tmp_path / "long")
    assert start(short, tmp_path / "short")
    assert start(long, tmp_path / "short")
    assert bytes_of(tmp_path / "short") == bytes_of(tmp_path / "long")
    assert not any("schedule" in text for text in said()), "a constant rate has no end"
    assert start(recipe(4, "cosine"), tmp_path / "short", accept_changes=True)
    assert said()[-1] == worded("train/the-learning-rate-schedule-cosine-now-ends")


def test_the_state_of_another_optimizer_is_refused_also_with_accept_changes(
    material: Path, straight: Path, tmp_path: Path
) -> None:
    rewound(straight, tmp_path / "run")
    other = make_recipe(material, optim={"optimizer": "prodigy", "learning_rate": 1.0})
    with pytest.raises(ResumeError) as caught:
        start(other, tmp_path / "run", accept_changes=True)
    assert caught.value.code == "resume-optimizer-changed"
    assert RunDir(tmp_path / "run").list_checkpoints()


def test_a_changed_base_that_cannot_compute_is_refused_with_accept_changes(
    material: Path, straight: Path, tmp_path: Path
) -> None:
    """Its weights fit, so it loads. The file from which the run began is no longer needed."""
    rewound(straight, tmp_path / "run")
    base = Path(shutil.copytree(material / "model", tmp_path / "model"))
    lora = {"init_from": str(tmp_path / "gone.safetensors")}
    recipe = make_recipe(material, model={"name_or_path": str(base)}, lora=lora)
    mutate(base / "unet" / "config.json", "addition_time_embed_dim", "number")
    with pytest.raises(ModelError) as caught:
        start(recipe, tmp_path / "run", accept_changes=True)
    assert caught.value.code == "config-unfit" and str(base / "unet") in str(caught.value.where)
    shutil.copy(material / "model" / "unet" / "config.json", base / "unet" / "config.json")
    assert start(recipe, tmp_path / "run", accept_changes=True), "the control"


def test_changed_recipe_or_images_are_refused_on_resume(material: Path, straight: Path, tmp_path: Path) -> None:
    recipe = make_recipe(material)
    rewound(straight, tmp_path / "run")
    with pytest.raises(ResumeError, match="recipe differs"):
        start(make_recipe(material, optim={"learning_rate": 2e-3}), tmp_path / "run")
    extra = material / "images" / "new.png"
    Image.new("RGB", (64, 64), "red").save(extra)
    try:
        with pytest.raises(ResumeError, check=saying("train/training-data-are-not-those")):
            start(recipe, tmp_path / "run")
        assert start(recipe, tmp_path / "run", accept_changes=True)
    finally:
        extra.unlink()


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
def test_images_that_vanish_after_the_last_update_do_not_cost_the_result(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut between the last update and the result; the bytes equal the run in which the images existed."""
    images = shutil.copytree(material / "images", tmp_path / "images")
    recipe = make_recipe(
        material,
        data={"path": str(images)},
        train={"max_train_steps": None, "epochs": 1},
        sample={"prompts": ["zibu"], "steps": 1, "width": 32, "height": 32},
    )
    with monkeypatch.context() as cut:
        cut.setattr(pipeline.Artifacts, "finish", lambda *of: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            start(recipe, tmp_path / "cut")
    whole = shutil.copytree(tmp_path / "cut", tmp_path / "whole")
    assert start(recipe, whole)
    with_score = json.loads(RunDir(whole).result.read_bytes())
    assert with_score.pop("concept")
    longer = recipe.model_copy(update={"train": recipe.train.model_copy(update={"epochs": 9})})
    for how in ("one gone", "gone"):
        for path in sorted(images.iterdir())[: 2 if how == "one gone" else None]:
            path.unlink()
        if how == "gone":
            images.rmdir()
        run = shutil.copytree(tmp_path / "cut", tmp_path / how)
        assert start(recipe, run)
        assert bytes_of(run) == bytes_of(whole)
        without = json.loads(RunDir(run).result.read_bytes())
        assert (without.pop("concept", None) is None) == (how == "gone")
        assert without == with_score
        notices = [event["text"] for event in read_events(RunDir(run).events()) if event["type"] == "notice"]
        assert any("raining is complete" in text for text in notices)
        assert says_if(how == "gone", notices, "train/no-concept-score")
        with pytest.raises(DataError if how == "gone" else ResumeError):  # control: where updates are still to be made
            start(longer, run)


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
def test_images_that_vanish_while_the_run_goes_on_cost_the_concept_score_only(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = shutil.copytree(material / "images", tmp_path / "images")
    finish = pipeline.Artifacts.finish

    def late(artifacts: pipeline.Artifacts, position: Position) -> None:
        shutil.rmtree(images)
        finish(artifacts, position)

    monkeypatch.setattr(pipeline.Artifacts, "finish", late)
    sample = {"prompts": ["zibu"], "steps": 1, "width": 32, "height": 32}
    recipe = make_recipe(material, data={"path": str(images)}, train={"max_train_steps": 1}, sample=sample)
    assert start(recipe, tmp_path / "run")
    result = json.loads(RunDir(tmp_path / "run").result.read_bytes())
    assert result["updates"] == 1 and "concept" not in result


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
def test_a_refused_step_back_deletes_nothing_and_an_accepted_one_what_came_after(
    material: Path, tmp_path: Path
) -> None:
    sample = {"prompts": ["zibu"], "steps": 1, "width": 32, "height": 32, "every_n_steps": 2}
    once, kept = {"gradient_accumulation_steps": 1}, {"save_every_n_steps": 2, "keep_last": 9}
    recipe = make_recipe(material, train=once, output=kept, sample=sample)
    directory = RunDir(tmp_path / "run")
    assert start(recipe, directory.path)
    whole, older = bytes_of(directory.path), directory.checkpoint(2)
    extra = material / "images" / "new.png"
    Image.new("RGB", (64, 64), "red").save(extra)
    try:
        with pytest.raises(ResumeError, check=saying("train/training-data-are-not-those")):
            start(recipe, directory.path, chosen=older)
    finally:
        extra.unlink()
    assert [updates for updates, _ in directory.list_checkpoints()] == [2, 4, 6]
    assert [updates for updates, _ in directory.list_samples()] == [0, 2, 4, 6]
    assert not start(recipe, directory.path, chosen=older, stop_at=2)
    assert max(updates for updates, _ in directory.list_checkpoints()) < 6
    assert not directory.checkpoint_lora(6).exists() and not directory.samples_at(6).exists()
    assert start(recipe, directory.path) and bytes_of(directory.path) == whole
    assert [updates for updates, _ in directory.list_samples()] == [0, 2, 4, 6]


@pytest.mark.slow
def test_a_resume_takes_the_checkpoints_threads_unless_the_recipe_names_them(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = torch.get_num_threads()
    during_cache: list[int] = []
    prepare = pipeline.prepare

    def watched(*args: Any, **how: Any) -> Any:
        during_cache.append(torch.get_num_threads())
        return prepare(*args, **how)

    monkeypatch.setattr(pipeline, "prepare", watched)
    try:
        torch.set_num_threads(2)
        assert not start(make_recipe(material), tmp_path / "run", stop_at=1)
        torch.set_num_threads(1)
        assert not start(make_recipe(material), tmp_path / "run", stop_at=2)
        torch.set_num_threads(1)
        assert not start(make_recipe(material, runtime={"threads": 1}), tmp_path / "run", stop_at=3)
    finally:
        torch.set_num_threads(used)
    assert during_cache == [2, 2, 1]  # a new cache depends on it too


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
def test_a_schedule_free_run_exports_its_average_and_goes_on_from_what_it_trains(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[dict[str, Tensor]] = []
    using = Adapter.using

    def watched(adapter: Adapter, tensors: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        shown.append({name: tensor.clone() for name, tensor in tensors.items()})
        return using(adapter, tensors)

    monkeypatch.setattr(Adapter, "using", watched)
    optim = {"optimizer": "adamw_schedule_free", "lr_scheduler": "constant"}
    validation = {"max_train_steps": 2, "validation_every_n_steps": 2}
    sample = {"prompts": ["zibu"], "steps": 1, "width": 32, "height": 32}
    recipe = make_recipe(material, optim=optim, train=validation, data={"validation_split": 0.2}, sample=sample)
    assert start(recipe, tmp_path / "run")
    checkpoint, _ = latest_valid(RunDir(tmp_path / "run"))
    assert checkpoint is not None and len(shown) == 4, "held-out loss, LoRA file of the checkpoint, export, preview"
    trained, state = checkpoint.part_to_resume("adapter"), checkpoint.part_to_resume("optimizer")
    for name, weight in trained.items():
        average = torch.lerp(weight, state[f"{name}.z"], 1 - 1 / 0.9)
        torch.testing.assert_close(shown[0][name], average, rtol=1e-6, atol=1e-7)
        assert all(torch.equal(each[name], shown[0][name]) for each in shown)
    assert any(not torch.equal(shown[0][name], weight) for name, weight in trained.items())


def test_an_average_that_is_new_to_a_run_starts_at_its_weights(
    material: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewound(straight, tmp_path / "run")
    checkpoint, _ = latest_valid(RunDir(tmp_path / "run"))
    assert checkpoint is not None
    averages: list[dict[str, torch.Tensor]] = []
    fit = Trainer.fit

    def watched(trainer: Trainer, max_train_steps: int) -> bool:
        averages.append({name: average.clone() for name, average in trainer.optimizer.ema.items()})
        return fit(trainer, max_train_steps)

    monkeypatch.setattr(Trainer, "fit", watched)
    start(make_recipe(material, train={"ema_decay": 0.9}), tmp_path / "run", accept_changes=True)
    weights = checkpoint.part_to_resume("adapter")
    assert averages[0].keys() == weights.keys()
    assert all(torch.equal(averages[0][name], weights[name]) for name in weights)


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
def test_the_images_before_and_after_are_those_of_the_prompts_and_weights_at_hand(
    material: Path, tmp_path: Path
) -> None:
    def asking(*prompts: str, **optim: Any) -> Recipe:
        sample = {"prompts": prompts, "steps": 1, "width": 32, "height": 32}
        train, output = {"max_train_steps": 2, "gradient_accumulation_steps": 1}, {"save_every_n_steps": 1}
        return make_recipe(material, sample=sample, optim=optim, train=train, output=output)

    def images(run_dir: Path) -> dict[str, bytes]:
        return {f"{file.parent.name}/{file.name}": file.read_bytes() for file in run_dir.glob("samples/*/*.png")}

    assert start(asking("zibu"), tmp_path / "fresh")
    assert start(asking("a red dog", "a cat"), tmp_path / "run")
    others = images(tmp_path / "run")
    assert start(asking("zibu"), tmp_path / "run")  # other prompts, fewer of them
    assert images(tmp_path / "run") == images(tmp_path / "fresh") and others != images(tmp_path / "fresh")
    back = RunDir(tmp_path / "run").checkpoint(1)
    assert start(asking("zibu", learning_rate=0.1), tmp_path / "run", chosen=back, accept_changes=True)
    changed = {
        name for name, content in images(tmp_path / "run").items() if content != images(tmp_path / "fresh")[name]
    }
    assert "step-00000002/00.png" in changed and "step-00000000/00.png" not in changed


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
@pytest.mark.parametrize("use_dora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_input_is_copied_to_float32_in_training_and_the_bytes_are_the_same(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_dora: bool
) -> None:
    sample = {"prompts": ["zibu"], "steps": 1, "width": 32, "height": 32, "every_n_steps": 1}
    bf16 = {"mixed_precision": "bf16", "max_train_steps": 2, "gradient_accumulation_steps": 1}
    recipe = make_recipe(material, train=bf16, sample=sample, lora={"use_dora": use_dora})
    inputs: set[torch.dtype] = set()
    fit = Trainer.fit

    def watched(trainer: Trainer, max_train_steps: int) -> bool:
        for name, module in trainer.model.components["unet"].named_modules():
            if name.endswith("to_q.lora_A.default" if use_dora else "to_out.0"):
                module.register_forward_pre_hook(
                    lambda _, given: inputs.add(given[0].dtype) if torch.is_grad_enabled() else None
                )
        return fit(trainer, max_train_steps)

    monkeypatch.setattr(Trainer, "fit", watched)
    assert start(recipe, tmp_path / "run")
    assert inputs == {torch.float32 if use_dora else torch.bfloat16}
    monkeypatch.setattr("lora_rocm.adapters.kinds.lora.Adapter.cast_inputs", lambda self, enabled: None)
    assert start(recipe, tmp_path / "casting")
    assert bytes_of(tmp_path / "casting") == bytes_of(tmp_path / "run")


def test_another_base_model_at_the_same_path_is_refused_on_resume(
    material: Path, straight: Path, tmp_path: Path
) -> None:
    own, kept = material / "model" / "unet", tmp_path / "kept"
    write_tiny_sdxl(tmp_path / "other", seed=1, **SHALLOW)
    rewound(straight, tmp_path / "run")
    shutil.move(own, kept)
    try:
        shutil.copytree(tmp_path / "other" / "unet", own)
        with pytest.raises(ResumeError, match="base model"):
            start(make_recipe(material), tmp_path / "run")
    finally:
        shutil.rmtree(own)
        shutil.move(kept, own)


def test_a_base_with_a_number_that_is_none_is_refused_by_its_name(material: Path, tmp_path: Path) -> None:
    """The control is ``straight``, a run on the sound model with the same weights."""
    write_tiny_sdxl(tmp_path / "model", **SHALLOW)
    recipe = make_recipe(material, model={"name_or_path": str(tmp_path / "model")})
    file = next((tmp_path / "model" / "unet").glob("*.safetensors"))
    weights = load_file(file)
    weights["conv_in.bias"][1] = float("nan")
    save_file(weights, file)
    with pytest.raises(ModelError, match=r"unet\.conv_in\.bias"):
        start(recipe, tmp_path / "run", stop_at=1)


class Bus:
    """Zeroes transferred latents now and then, for some methods of the ladder."""

    def __init__(self, methods: tuple[str, ...], every: int) -> None:
        self.methods, self.every, self.seen = methods, every, 0

    def __call__(self, tensor: torch.Tensor, device: torch.device, method: str) -> torch.Tensor:
        if tensor.ndim == 4 and tensor.dtype is torch.float32 and tensor.shape[1] == 4:
            self.seen += 1
            if method in self.methods and self.seen % self.every == 0:
                return torch.zeros_like(tensor)
        return copy_to_device(tensor, device, method)


def test_a_bus_that_zeroes_latents_changes_nothing_in_the_file(
    material: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(material)
    bus = Bus(("unpinned",), every=7)
    monkeypatch.setattr(start_facts, "DeviceTransfer", lambda *args, **how: DeviceTransfer(*args, **how, copy=bus))
    assert start(recipe, tmp_path / "faulty")
    assert bytes_of(tmp_path / "faulty") == bytes_of(straight)
    events = read_events(RunDir(tmp_path / "faulty").events())
    incidents = [event for event in events if event["type"] == "incident"]
    assert incidents and all(event["kind"] == "transfer" for event in incidents)
    assert [event for event in events if event["type"] == "step"][-1]["transfer_failures"] == len(incidents)


def test_a_bus_that_never_works_ends_the_run_with_all_kept(
    material: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(material)
    rewound(straight, tmp_path / "run")
    last = RunDir(tmp_path / "run").list_checkpoints()[-1][1]
    before = {path.name: path.read_bytes() for path in last.iterdir()}
    bus = Bus(("unpinned", "clone", "chunked"), every=1)
    monkeypatch.setattr(start_facts, "DeviceTransfer", lambda *args, **how: DeviceTransfer(*args, **how, copy=bus))
    with pytest.raises(TransferError, check=saying("train/nothing-was-trained-on-it")):
        start(recipe, tmp_path / "run")
    assert {path.name: path.read_bytes() for path in last.iterdir()} == before


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")  # in diffusers
def test_every_checkpoint_has_a_usable_file_and_old_states_are_rotated(
    material: Path, straight: Path, tmp_path: Path
) -> None:
    """The recipe of ``straight`` in epochs and shares, with two steps per epoch: the same bytes."""
    recipe = make_recipe(
        material,
        optim={"lr_warmup_steps": 0, "lr_warmup_ratio": 1 / 3},
        train={"max_train_steps": None, "epochs": 3},
        sample={"prompts": ["a cat"], "steps": 1, "width": 32, "height": 32, "every_n_epochs": 2},
        output={"save_every_n_steps": None, "save_every_n_epochs": 1, "keep_last": 1, "keep_last_loras": 2},
    )
    assert start(recipe, tmp_path / "run")
    directory = RunDir(tmp_path / "run")
    assert [updates for updates, _ in directory.list_checkpoints()] == [STEPS]
    written = [event["updates"] for event in read_events(directory.events()) if event["type"] == "checkpoint"]
    assert written == [2, 4, 6] and [updates for updates, _ in directory.checkpoint_loras()] == [4, 6]
    assert [updates for updates, _ in directory.list_samples()] == [0, 4, 6]
    assert weights_of(directory.lora) == weights_of(RunDir(straight).lora)


@pytest.mark.parametrize(("minutes", "saved"), [(1e-9, [2, 3]), (9.0, [3])])
def test_a_run_that_saves_by_the_clock_alone_resumes_to_the_byte(
    material: Path, tmp_path: Path, minutes: float, saved: list[int]
) -> None:
    train, output = {"max_train_steps": 3}, {"save_every_n_steps": None, "save_every_minutes": minutes, "keep_last": 9}
    recipe = make_recipe(material, train=train, output=output)
    assert start(recipe, tmp_path / "run")
    found = [updates for updates, _ in RunDir(tmp_path / "run").list_checkpoints()]
    assert found == saved
    if len(found) > 1:
        rewound(tmp_path / "run", tmp_path / "stopped", found[0])
        assert start(recipe, tmp_path / "stopped")
        assert bytes_of(tmp_path / "stopped") == bytes_of(tmp_path / "run")


@pytest.mark.parametrize(
    ("asked", "planned", "pins"),
    [("auto", True, True), ("auto", False, False), ("yes", False, True), ("no", True, False)],
)
def test_what_pins(material: Path, asked: str, planned: bool, pins: bool) -> None:
    """``auto`` is the plan's choice for a GPU; the CPU never pins."""
    settings, recipe = Settings(pin_memory=planned), make_recipe(material, runtime={"pin_memory": asked})
    session: Any = None
    begin = pipeline.StartContext(session, recipe, torch.device("cuda", 0), torch.float32, settings)
    assert start_facts.pins(begin) is pins
    assert start_facts.pins(replace(begin, device=CPU)) is False
    assert start_facts.pins(replace(begin, settings=replace(settings, copy_method="unpinned"))) is False


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_gpu_stops_give_the_same_bytes_with_deterministic_kernels(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    recipe = make_recipe(material, train={"mixed_precision": precision, "ema_decay": 0.9})
    device = torch.device("cuda", 0)
    torch.use_deterministic_algorithms(True)
    try:
        assert start(recipe, tmp_path / "straight", device=device)
        for stop in (1, 3):
            assert not start(recipe, tmp_path / "stopped", stop_at=stop, device=device)
        assert start(recipe, tmp_path / "stopped", device=device)
    finally:
        torch.use_deterministic_algorithms(False)
    assert bytes_of(tmp_path / "stopped") == bytes_of(tmp_path / "straight")


@pytest.mark.gpu
def test_gpu_losses_follow_the_cpu_ones(material: Path, tmp_path: Path) -> None:
    """Noise and timesteps are drawn on the CPU: the same recipe sees the same losses on every device, to rounding."""
    recipe = make_recipe(material)
    losses = {}
    for device in (CPU, torch.device("cuda", 0)):
        assert start(recipe, tmp_path / device.type, device=device)
        events = read_events(RunDir(tmp_path / device.type).events())
        losses[device.type] = [event["loss"] for event in events if event["type"] == "step"]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=2e-3)
