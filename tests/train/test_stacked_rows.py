"""LoRA's A in the product of merged layers: whole models, every change of weights, the plan of memory, and resumes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lora_rocm.adapters.adapter_kind import PEFT_NAME
from lora_rocm.checks import kernel_choice
from lora_rocm.checks.kernel_choice import FACT, KernelChoice, stacks
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.hardware.settings import Settings
from lora_rocm.kernels import merged, stacked_rows
from lora_rocm.kernels.merged import MergedLinears
from lora_rocm.kernels.stacked_rows import rows_stacked
from lora_rocm.loader.batch import Batch
from lora_rocm.memory.footprint import count, meta_model
from lora_rocm.optim.base import GatedOptimizer
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.checkpoint_record import sealed
from lora_rocm.rundir.layout import STATE_FILE, RunDir
from lora_rocm.rundir.run_context import NOBODY
from lora_rocm.train import load_model
from lora_rocm.train.graphs import Captured, Graphs
from tests.families.contract import Adapted, Its
from tests.train.runs import start

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ROUNDING = 1e-5
"""Of the gradients, relative to their norm: sums of float32 in another order."""
ON_GPU = 2e-3
"""The same on a GPU, where products of float32 may be composed of shorter numbers."""
TARGETS = {"causal-lm": "all-linear"}


def written(name: str, folder: Path, **lora: Any) -> Its:
    section = {"rank": 3, "alpha": 2, "targets": TARGETS.get(name, "attention-mlp"), **lora}
    return replace(Its.write(name, folder), lora=section)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Its:
    return written("causal-lm", tmp_path_factory.mktemp("llm"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each product that includes A."""
    made, original = list[int](), merged.stacked_projections

    def counted(*given: Any) -> tuple[Tensor, ...]:
        made.append(1)
        return original(*given)

    monkeypatch.setattr(merged, "stacked_projections", counted)
    return made


def adapted(its: Its, stacked: bool, device: torch.device = CPU, offloads: bool = False) -> Adapted:
    with rows_stacked(stacked):
        return Adapted(its, device, offloads)


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("flux", "z-image", "anima", "sd15")]


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("name", ["causal-lm", *SLOW])
def test_losses_and_gradients_are_the_plain_form(name: str, offloads: bool, tmp_path: Path, calls: list[int]) -> None:
    its = written(name, tmp_path)
    loss_B, wanted_N = adapted(its, False).passed(its.batch)
    assert not calls
    model = adapted(its, True, offloads=offloads)
    for _ in range(2):  # offloaded weights are fetched again
        found, found_N = model.passed(its.batch)
        assert off(found_N, wanted_N) < ROUNDING and off(found.loss_B, loss_B.loss_B) < ROUNDING
    assert calls and not float(model.transfer.bad)
    assert model.model.placement is not None and not model.model.placement.changed(), "the base has its bytes"


def test_layers_that_are_no_plain_loras_reserve_nothing(tmp_path: Path, calls: list[int]) -> None:
    for number, lora in enumerate(({"use_dora": True}, {"dropout": 0.5})):
        its = written("causal-lm", tmp_path / str(number), **lora)
        model = adapted(its, True)
        model.passed(its.batch)
        assert not calls and merged_of(model) and not any(one.reserved for one in merged_of(model))


def merged_of(model: Adapted) -> list[MergedLinears]:
    blocks: list[Any] = model.family.blocks(model.model)
    return [each for block in blocks for each in (block.merged_attention, block.merged_mlp) if each is not None]


def rows_of(model: Adapted) -> list[Tensor]:
    """A of each merged product, as the latest pass multiplied it."""
    found = []
    for each in merged_of(model):
        assert each.weight_OI is not None and each.reserved
        found.append(each.weight_OI[len(each.weight_OI) - each.reserved :])
    return found


def leaves_of(model: Adapted) -> list[Tensor]:
    """The same from the leaves."""
    blocks: list[Any] = model.family.blocks(model.model)
    merged_layers = [
        layers
        for block in blocks
        for attention, mlp in [(block.self_attn, block.mlp)]
        for layers in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj))
    ]
    return [torch.cat([layer.lora_A[PEFT_NAME].weight.detach() for layer in layers]) for layers in merged_layers]


def require_fresh(model: Adapted, batch: Batch) -> None:
    with torch.no_grad():
        model.engine.measured(*model.sent(batch))
    for rows, wanted in zip(rows_of(model), leaves_of(model), strict=True):
        torch.testing.assert_close(rows[: len(wanted)], wanted, rtol=0, atol=0)


def optimizer_of(its: Its, model: Adapted) -> GatedOptimizer:
    groups = model.adapter.groups(its.recipe.optim, its.recipe.lora)
    how: dict[str, Any] = {"max_train_steps": 10, "ema_decay": 0.5, "use_loss_scale": False}
    return GatedOptimizer(model.weights, groups, its.recipe.optim, **how)


def test_after_every_change_of_weights_the_rows_are_the_leaves(llm: Its, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates, updates that the guard blocks, a resume, other weights, and the average for previews."""
    model = adapted(llm, True)
    optimizer, batch = optimizer_of(llm, model), llm.batch
    before = {name: parameter.clone() for name, parameter in model.weights.parameters.items()}
    for blocked in (0.0, 1.0, 0.0):
        model.engine.run(*model.sent(batch))
        optimizer.step(0, torch.tensor(blocked))
        require_fresh(model, batch)
    with model.adapter.using(optimizer.shown()):
        require_fresh(model, batch)
    require_fresh(model, batch)
    updated = [rows.clone() for rows in rows_of(model)]
    model.adapter.load(before)
    require_fresh(model, batch)
    assert any(off(one, other) > 1e-4 for one, other in zip(rows_of(model), updated, strict=True))
    # A fault: rows that are wrong before a pass cannot reach it, rows that nobody writes are found
    for rows in rows_of(model):
        rows.fill_(float("nan"))
    require_fresh(model, batch)
    monkeypatch.setattr(stacked_rows, "_with_rows", lambda weight, *_: weight)
    for rows in rows_of(model):
        rows.mul_(1.01)
    with pytest.raises(AssertionError):
        require_fresh(model, batch)


def test_fewer_and_more_ranks_than_reserved(llm: Its, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = adapted(llm, True), adapted(llm, False)
    wanted = plain.passed(llm.batch)[1]
    assert off(model.passed(llm.batch)[1], wanted) < ROUNDING and calls
    calls.clear()
    for each in merged_of(model):
        assert each.weight_OI is not None
        rows = len(each.weight_OI) - each.reserved
        each.reserved, each.weight_OI = 4, each.weight_OI[: rows + 4]
    assert off(model.passed(llm.batch)[1], wanted) < ROUNDING and not calls


def test_the_plan_counts_the_rows(llm: Its) -> None:
    shape, dtype = SampleShape.of(tokens=32), torch.float32
    plain, stacked = (
        count(llm.family, meta_model(llm.family, llm.recipe, dtype, False, form), llm.recipe, shape)
        for form in (False, True)
    )
    reserved = sum(each.numel() * each.element_size() for each in rows_of(adapted(llm, True)))
    assert stacked.weight_bytes - plain.weight_bytes == reserved > 0
    assert sum(b.weight_bytes for b in stacked.blocks) - sum(b.weight_bytes for b in plain.blocks) == reserved


@pytest.mark.parametrize("case", ["cpu", "deterministic", "compiled", "after a failure", "gpu"])
def test_who_stacks(llm: Its, case: str) -> None:
    runtime = {"deterministic": case == "deterministic", "compile": "full" if case == "compiled" else "auto"}
    recipe = llm.recipe.model_copy(update={"runtime": llm.recipe.runtime.model_copy(update=runtime)})
    settings = replace(Settings(), triton=case != "after a failure")
    assert stacks(recipe, settings, on_gpu=case != "cpu") is (case == "gpu")


# Whole runs


def recipe_of(its: Its) -> Recipe:
    sections = its.recipe.model_dump(mode="json", exclude_unset=True)
    return recipe_from({**sections, "runtime": {"deterministic": False}, "sample": {"prompts": []}})


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Let new runs on this device stack or not. Nothing is compiled."""
    monkeypatch.setattr(kernel_choice, "choose", lambda *_, **__: KernelChoice(False))
    monkeypatch.setattr(kernel_choice, "decides", lambda device: True)
    monkeypatch.setattr(load_model, "STACKED_ON", "cpu")
    yield lambda value: monkeypatch.setattr(kernel_choice, "stacks", lambda *_: value)


def stored(run: Path) -> Any:
    return json.loads((RunDir(run).list_checkpoints()[-1][1] / STATE_FILE).read_bytes())["facts"][FACT]["stacked"]


def result_of(run: Path) -> bytes:
    return (RunDir(run).export_of("peft") / "model" / "adapter_model.safetensors").read_bytes()


def test_a_resume_keeps_the_form(llm: Its, tmp_path: Path, decided: Callable[[bool], None], calls: list[int]) -> None:
    recipe, now = recipe_of(llm), {True: tmp_path / "stacked", False: tmp_path / "plain"}
    for form, run in now.items():
        decided(form)
        calls.clear()
        assert start(recipe, run) and stored(run) is form and bool(calls) is form
    for form in (True, False):
        run = tmp_path / f"stopped {form}"
        decided(form)
        assert not start(recipe, run, stop_at=2)
        decided(not form)
        calls.clear()
        assert start(recipe, run) and stored(run) is form and bool(calls) is form
        assert result_of(run) == result_of(now[form])


def test_a_run_of_an_earlier_version_keeps_the_plain_form(
    llm: Its, tmp_path: Path, decided: Callable[[bool], None], calls: list[int]
) -> None:
    recipe, run = recipe_of(llm), tmp_path / "run"
    decided(False)
    assert not start(recipe, run, stop_at=2)
    path = RunDir(run).list_checkpoints()[-1][1] / STATE_FILE
    state = json.loads(path.read_bytes())
    del state["facts"][FACT]["stacked"]
    state.pop("seal", None)
    path.write_bytes(sealed(state))
    decided(True)
    assert start(recipe, run) and stored(run) is False and not calls


# On a GPU


@pytest.mark.gpu
def test_a_captured_step_follows_the_weights(llm: Its, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    models = [adapted(llm, form, GPU) for form in (False, True)]
    replays, run = list[int](), Captured.run

    def counted(self: Captured, *given: Any) -> Any:
        replays.append(1)
        return run(self, *given)

    monkeypatch.setattr(Captured, "run", counted)
    stacked = models[1]
    stacked.engine.graphs = Graphs(stacked.weights, False, NOBODY)
    for _ in range(5):
        (loss_B, wanted_N), (found_B, found_N) = (model.passed(llm.batch) for model in models)
        assert off(found_N, wanted_N) < ON_GPU and off(found_B.loss_B, loss_B.loss_B) < ON_GPU
        for model in models:
            model.weights.masters.mul_(1.05)
            model.weights.publish()
    assert calls and len(replays) >= 3


@pytest.mark.gpu
def test_a_run_on_a_gpu_is_resumed_in_its_form(
    llm: Its, tmp_path: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_choice, "choose", lambda *_, **__: KernelChoice(False))
    recipe, run = recipe_of(llm), tmp_path / "run"
    assert not start(recipe, run, stop_at=2, device=GPU) and stored(run) is True and calls
    calls.clear()
    monkeypatch.setattr(kernel_choice, "stacks", lambda *_: False)
    assert start(recipe, run, device=GPU) and stored(run) is True and calls
    calls.clear()
    assert start(recipe, tmp_path / "plain", device=GPU) and stored(tmp_path / "plain") is False and not calls
