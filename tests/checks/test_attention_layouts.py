"""Layouts of attention's tensors: the models' layouts are tried, and a route that is wrong for one is held out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lora_rocm.checks import attention_routes
from lora_rocm.checks.attention_layouts import IN_MODELS, InputLayouts, Layout, laid_out, layout_of
from lora_rocm.checks.attention_routes import checked_attention
from lora_rocm.device.backend_settings import apply
from lora_rocm.hardware.settings import Settings
from lora_rocm.rundir.run_context import RunContext
from tests.checks import cudnn_in_flux
from tests.checks.layouts_seen import Seen, by_layout, layouts_seen
from tests.families.contract import Adapted, Its
from tests.tiny_models import RUN_TARGETS

CPU = torch.device("cpu")
REAL = F.scaled_dot_product_attention
TOKENS = InputLayouts("tokens", "tokens", "tokens")
ALL = {"causal-lm": "all-linear"}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("z-image", "anima", "sd15", "sdxl")]


@pytest.mark.parametrize("layout", ["heads", "tokens", "wide"])
def test_a_layout_is_made_and_known(layout: Layout) -> None:
    values = torch.randn(2, 3, 5, 8)
    found = laid_out(values, layout)
    assert layout_of(found) == layout and found.untyped_storage().data_ptr() != values.untyped_storage().data_ptr()
    torch.testing.assert_close(found, values, rtol=0, atol=0)


def test_layouts_that_hold_no_values() -> None:
    values = torch.randn(2, 3, 5, 8)
    assert layout_of(values[:, :1].expand_as(values)) == "expanded" and layout_of(values.flip(1).mT.mT) == "heads"
    assert layout_of(torch.randn(2, 3, 8, 5).mT) == "other"
    with pytest.raises(ValueError, match="expanded"):
        laid_out(values, "expanded")


def of_a_pass(its: Its, fuses: bool = True) -> Seen:
    with pytest.MonkeyPatch.context() as patch:
        if not fuses:
            patch.setattr(type(its.family), "fuse", lambda *_, **__: None)
        model = Adapted(its, CPU)
    with layouts_seen() as seen:
        model.passed(its.batch)
    return seen


@pytest.mark.parametrize("name", ["causal-lm", "flux", *SLOW])
def test_the_layouts_of_the_models_are_those_that_are_tried(name: str, tmp_path: Path) -> None:
    """Each with one layout of the gradient: a plan that is kept for the inputs alone serves it."""
    written = Its.write(name, tmp_path)
    sections: list[dict[str, Any]] = [{"targets": [RUN_TARGETS]}] if name.startswith("sd") else []
    sections += [{"targets": ALL.get(name, "attention-mlp"), **more} for more in ({}, {"dropout": 0.1})]
    for section in sections:
        found = by_layout(of_a_pass(replace(written, lora={"rank": 2, **section})))
        assert found
        for inputs, gradients in found.items():
            assert gradients == {IN_MODELS[inputs]}, (section, inputs)


def test_diffusers_flux_gives_two_layouts_for_the_same_inputs(tmp_path: Path) -> None:
    """The condition under which torch's cuDNN attention reads a gradient with the strides of another one."""
    its = replace(Its.write("flux", tmp_path), lora={"rank": 2, "targets": "attention"})
    assert by_layout(of_a_pass(its, fuses=False)) == {TOKENS: {("tokens", "wide")}}


# The trial, with injected faults


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """Returns a function that tries the routes of the CPU, and returns the ids of the changes."""
    monkeypatch.setattr(attention_routes, "TRIED_ON", ("cpu",))
    apply(Settings(), CPU)

    def changes() -> list[str]:
        events: list[Any] = []
        checked_attention(Settings(), CPU, (torch.bfloat16,), RunContext(emit=events.append))
        return [event.id for event in events if event.type == "change"]

    yield changes
    apply(Settings(), CPU)


class _Kept(torch.autograd.Function):
    """The identity; its backward pass reads each gradient with the strides of the first one for the same inputs."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, key: object, plans: dict[object, tuple[int, ...]]) -> Tensor:
        ctx.key, ctx.plans = key, plans
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        strides = ctx.plans.setdefault(ctx.key, gradient.stride())
        return gradient.as_strided(gradient.shape, strides, int(gradient.storage_offset())), None, None


def with_kept_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash attention as cuDNN's is: a plan of the backward pass for each shape and layout of the inputs."""
    plans: dict[object, tuple[int, ...]] = {}

    def attention(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        output = REAL(q, k, v, **how)
        if not torch.backends.cuda.flash_sdp_enabled():
            return output
        key = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in (q, k, v))
        kept: Tensor = _Kept.apply(output, key, plans)
        return kept

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)


@pytest.mark.parametrize("gradients", [("tokens", "wide"), ("wide", "tokens")])
def test_a_route_that_reads_a_second_layout_as_the_first_is_held_out(
    gradients: tuple[Layout, ...], tried: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a model gave two layouts. Wrong numbers, or an access outside of the gradient."""
    with_kept_plans(monkeypatch)
    monkeypatch.setitem(IN_MODELS, TOKENS, gradients)
    assert tried() == ["attention-flash-off"]


def test_it_is_used_for_the_layouts_of_our_models(
    tried: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_kept_plans(monkeypatch)
    assert tried() == []


def test_two_layouts_are_no_fault_of_a_sound_route(
    tried: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(IN_MODELS, TOKENS, ("tokens", "wide", "tokens"))
    assert tried() == []


@pytest.mark.parametrize("inputs", list(IN_MODELS), ids="/".join)
@pytest.mark.parametrize("crashes", [False, True])
def test_a_fault_for_one_layout_of_the_inputs_is_found(
    inputs: InputLayouts, crashes: bool, tried: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        wrong = torch.backends.cuda.flash_sdp_enabled() and tuple(map(layout_of, (q, k, v))) == inputs
        if wrong and crashes:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return REAL(q, k, v, **how) * (0.9 if wrong else 1.0)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    assert tried() == ["attention-flash-off"]


@pytest.mark.parametrize("layout", ["tokens", "wide"])
def test_a_fault_for_one_layout_of_the_gradient_is_found(
    layout: Layout, tried: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``wide`` is the control: no model gives it, so it does not matter."""

    def attention(*given: Tensor, **how: Any) -> Tensor:
        output = REAL(*given, **how)
        if torch.backends.cuda.flash_sdp_enabled():
            output.register_hook(lambda gradient: gradient * (0.9 if layout_of(gradient) == layout else 1.0))
        return output

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    assert tried() == (["attention-flash-off"] if layout == "tokens" else [])


@pytest.mark.parametrize(("way", "is_tried"), [("auto", True), ("sdpa-cudnn", True), ("sdpa-flash", False)])
def test_cudnn_is_tried_where_torch_may_choose_it(way: str, is_tried: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    routes = list[str]()

    def fault(route: str, **_: object) -> str:
        routes.append(route)
        return ""

    monkeypatch.setattr(attention_routes, "TRIED_ON", ("cpu",))
    monkeypatch.setattr(attention_routes, "_fault", fault)
    settings = Settings(attention=way)  # type: ignore[arg-type]
    apply(settings, CPU)
    checked_attention(settings, CPU, (torch.bfloat16,), RunContext(emit=lambda event: None))
    apply(Settings(), CPU)
    assert ("cudnn" in routes) is is_tried


# The script for a GPU


@pytest.mark.parametrize("row", cudnn_in_flux.ROWS, ids=lambda row: row.name)
def test_the_rows_of_the_table_are_right_on_a_sound_route(row: cudnn_in_flux.Row) -> None:
    assert cudnn_in_flux.tried(row, "flash", toy=True).startswith(f"ok      {row.name}")


def test_the_table_shows_kept_plans() -> None:
    """Wrong, or with an access outside of the gradient: exactly the rows with a second layout."""

    def is_right(row: cudnn_in_flux.Row) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            with_kept_plans(patch)
            try:
                return cudnn_in_flux.tried(row, "flash", toy=True).startswith("ok")
            except RuntimeError:
                return False

    wrong = {row.name for row in cudnn_in_flux.ROWS if not is_right(row)}
    assert wrong == {row.name for row in cudnn_in_flux.ROWS if len(row.gradients) > 1}


def test_a_process_that_ends_is_a_crash() -> None:
    row = cudnn_in_flux.ROWS[0]
    aborts = [sys.executable, "-c", "import os; os.abort()"]
    says_ok = [sys.executable, "-c", f"print('ok      {row.name}: x')"]
    hangs = [sys.executable, "-c", "import time; time.sleep(30)"]
    assert cudnn_in_flux.in_a_process(row, aborts, 30).startswith("crash ")
    assert cudnn_in_flux.in_a_process(row, says_ok, 30).startswith("ok ")
    assert cudnn_in_flux.in_a_process(row, hangs, 0.5).startswith("crash ")
