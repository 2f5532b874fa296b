"""The gate: a blocked or non-finite update moves nothing; loaded state continues with the same bytes.

For every update rule.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lora_rocm.adapters.flat_params import FlatWeights
from lora_rocm.errors import ResumeError
from lora_rocm.optim.base import LOSS_SCALE_GROWTH_INTERVAL, GatedOptimizer
from lora_rocm.optim.registry import RULES
from lora_rocm.optim.update_rule import Scalars
from lora_rocm.recipe.optim_sections import (
    OPTIMIZERS,
    AdafactorSection,
    Adamw8bitSection,
    AdamwBf16Section,
    AdamwSection,
    CameSection,
    DAdaptAdamSection,
    LionSection,
    MuonSection,
    OptimSection,
    ProdigyScheduleFreeSection,
    ProdigySection,
    ScheduleFreeSection,
)

FREE, BLOCKED = torch.tensor(0.0), torch.tensor(1.0)
SECTIONS: list[OptimSection] = [
    AdamwSection(learning_rate=1e-2),
    ProdigySection(d0=1e-3, use_bias_correction=True),
    Adamw8bitSection(learning_rate=1e-2),
    AdamwBf16Section(learning_rate=1e-2, rounding="kahan"),
    ScheduleFreeSection(learning_rate=1e-2),
    AdafactorSection(learning_rate=1e-2, beta1=0.9, scale_parameter=True),
    CameSection(learning_rate=1e-2),
    LionSection(learning_rate=1e-2),
    MuonSection(learning_rate=1e-2),
    ProdigyScheduleFreeSection(d0=1e-3),
    DAdaptAdamSection(d0=1e-3, growth_rate=1.02),
]
each_rule = pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.optimizer)


def make(
    section: OptimSection = SECTIONS[0],
    *,
    ema: float = 0.9,
    scale: bool = False,
    weight_dtype: torch.dtype = torch.float32,
    multiple: float = 1.0,
    stops: str = "",
) -> GatedOptimizer:
    """Two weights of [4, 5], a group each; the rate of the second is ``multiple`` times the section's.

    ``stops``: the weight that stands for new tokens.
    """
    generator = torch.Generator().manual_seed(3)
    parameters = {name: nn.Parameter(torch.randn(4, 5, generator=generator)) for name in "ab"}
    rates = {"a": section.learning_rate, "b": section.learning_rate * multiple}
    groups = [{"names": [name], "lr": rate, "stops": name == stops} for name, rate in rates.items()]
    how = {"max_train_steps": 10, "ema_decay": ema, "use_loss_scale": scale}
    return GatedOptimizer(FlatWeights(parameters, torch.float32, weight_dtype), groups, section, **how)


def set_gradients(optimizer: GatedOptimizer, seed: int, value: float | None = None) -> None:
    generator = torch.Generator().manual_seed(seed)
    for leaf in optimizer.weights.leaves.values():
        leaf.grad = torch.randn(leaf.shape, generator=generator) * optimizer.loss_scale
        if value is not None:
            leaf.grad[0, 0] = value
    optimizer.weights.gather()


def everything(optimizer: GatedOptimizer) -> dict[str, Tensor]:
    live = {f"live.{name}": p.detach().clone() for name, p in optimizer.parameters.items()}
    ema = {f"ema.{name}": average.clone() for name, average in optimizer.ema.items()}
    return {**live, **ema, **{name: tensor.clone() for name, tensor in optimizer.state().items()}}


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    """Names of the tensors with other bytes."""
    return {name for name in before if not torch.equal(as_bytes(before[name]), as_bytes(after[name]))}


@torch.no_grad()
def copy_weights(source: GatedOptimizer, target: GatedOptimizer) -> None:
    for name, parameter in target.parameters.items():
        parameter.copy_(source.parameters[name])


def test_each_optimizer_of_a_recipe_has_a_rule() -> None:
    assert RULES.keys() == OPTIMIZERS.keys() == {section.optimizer for section in SECTIONS}


@each_rule
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_a_blocked_update_moves_nothing_and_a_free_one_everything(
    section: OptimSection, weight_dtype: torch.dtype
) -> None:
    optimizer = make(section, scale=True, weight_dtype=weight_dtype)
    for number in range(3):
        set_gradients(optimizer, number)
        optimizer.step(number, FREE)
    before = everything(optimizer)
    set_gradients(optimizer, 3)
    optimizer.step(3, BLOCKED)
    assert changed(before, everything(optimizer)) == set()
    set_gradients(optimizer, 3)
    optimizer.step(3, FREE)  # negative control
    constant = {"loss_scale", "a.start", "b.start", "d"}  # d grows in some steps only
    if weight_dtype is torch.float32:
        constant |= {"a.kahan", "b.kahan"}  # nothing is skipped
    assert changed(before, everything(optimizer)) >= set(before) - constant


@each_rule
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_nonfinite_gradient_moves_nothing_but_the_scale(section: OptimSection, value: float) -> None:
    optimizer = make(section, scale=True)
    set_gradients(optimizer, 0)
    optimizer.step(0, FREE)
    before = everything(optimizer)
    set_gradients(optimizer, 1, value)
    stats = optimizer.step(1, FREE)
    assert float(stats.nonfinite) == 1
    assert changed(before, everything(optimizer)) == {"loss_scale", "growth"}
    assert float(optimizer.loss_scale) == 0.5 * float(before["loss_scale"])


@each_rule
def test_a_blocked_overflow_does_not_touch_the_scale(section: OptimSection) -> None:
    optimizer = make(section, scale=True)
    set_gradients(optimizer, 0, float("inf"))
    before = everything(optimizer)
    optimizer.step(0, BLOCKED)
    assert changed(before, everything(optimizer)) == set()


def test_the_scale_doubles_after_a_clean_run() -> None:
    optimizer = make(scale=True)
    optimizer.growth = torch.tensor(LOSS_SCALE_GROWTH_INTERVAL - 1.0)
    before = float(optimizer.loss_scale)
    set_gradients(optimizer, 0)
    optimizer.step(0, FREE)
    assert float(optimizer.loss_scale) == 2 * before and float(optimizer.growth) == 0


@each_rule
def test_loss_scale_does_not_change_the_update(section: OptimSection) -> None:
    scaled, plain = make(section, scale=True), make(section, scale=False)
    for optimizer in (scaled, plain):
        for number in range(3):
            set_gradients(optimizer, number)
            optimizer.step(number, FREE)
    for name in plain.parameters:
        torch.testing.assert_close(scaled.parameters[name], plain.parameters[name])


@each_rule
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_state_round_trip_continues_with_the_same_bytes(section: OptimSection, weight_dtype: torch.dtype) -> None:
    def fresh() -> GatedOptimizer:
        return make(section, scale=True, weight_dtype=weight_dtype, multiple=0.5)

    straight, stopped = fresh(), fresh()
    for seed in range(3):
        for optimizer in (straight, stopped):
            set_gradients(optimizer, seed)
            optimizer.step(seed, FREE)
    resumed, forgetful = fresh(), fresh()
    copy_weights(stopped, resumed)
    resumed.load(stopped.state(), stopped.ema)
    copy_weights(stopped, forgetful)  # negative control: without its state the next update differs
    for optimizer in (straight, resumed, forgetful):
        set_gradients(optimizer, 3)
        optimizer.step(3, FREE)
    assert changed(everything(straight), everything(resumed)) == set()
    assert "live.a" in changed(everything(straight), everything(forgetful))


@each_rule
def test_a_group_with_half_the_rate_goes_half_the_way(section: OptimSection) -> None:
    ways = []
    for multiple in (1.0, 0.5):
        optimizer = make(section, ema=0.0, multiple=multiple)
        before = {name: weight.clone() for name, weight in optimizer.parameters.items()}
        set_gradients(optimizer, 0)
        optimizer.step(0, FREE)
        ways.append({name: weight - before[name] for name, weight in optimizer.parameters.items()})
    whole, half = ways
    torch.testing.assert_close(half["b"], 0.5 * whole["b"], rtol=1e-2, atol=1e-6)
    assert torch.equal(half["a"], whole["a"]) and float(whole["b"].abs().min()) > 1e-5


@each_rule
def test_state_of_another_optimizer_is_refused(section: OptimSection) -> None:
    optimizer = make(section)
    state = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    optimizer.load(state, optimizer.ema)  # the control
    other = make(next(each for each in SECTIONS if each is not section)).state()
    less = {name: tensor for name, tensor in state.items() if "exp_avg" not in name}
    longer = {name: torch.cat([tensor, tensor]) if tensor.ndim else tensor for name, tensor in state.items()}
    for wrong in (other, less, longer, {**state, "a.more": FREE}):
        before = everything(optimizer)
        with pytest.raises(ResumeError) as caught:
            optimizer.load(wrong, optimizer.ema)
        assert caught.value.code == "resume-optimizer-changed" and section.optimizer in str(caught.value)
        assert changed(before, everything(optimizer)) == set()


@each_rule
def test_the_metadata_name_the_published_class_and_its_arguments(section: OptimSection) -> None:
    name, _, arguments = section.description.partition("(")
    assert name == section.published and "." in name
    given = set(re.findall(r"(\w+)=", arguments))
    own = type(section).model_fields.keys() - OptimSection.model_fields.keys()
    assert given - section.implied.keys() == {name.replace("epsilon", "eps") for name in own} | {"weight_decay"}


@each_rule
def test_state_stays_where_it_was_made(section: OptimSection) -> None:
    """Memory must not run out for it within an update."""
    optimizer = make(section)
    before = {name: tensor.data_ptr() for name, tensor in optimizer.state().items()}
    set_gradients(optimizer, 0)
    optimizer.step(0, FREE)
    assert {name: tensor.data_ptr() for name, tensor in optimizer.state().items()} == before


@each_rule
def test_what_a_rule_logs_has_the_names_that_it_had_before(section: OptimSection) -> None:
    optimizer = make(section)
    names = tuple(optimizer.rule.logged)
    set_gradients(optimizer, 0)
    logged = optimizer.step(0, FREE).logged
    assert tuple(logged) == names == tuple(optimizer.rule.logged)
    assert all(number.ndim == 0 for number in logged.values())


class NoHostWait(TorchDispatchMode):
    """Raises where a number is read back from the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host would wait for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("section", SECTIONS[1:], ids=lambda section: section.optimizer)
def test_a_step_waits_for_nothing(section: OptimSection) -> None:
    """PyTorch's fused kernel for the CPU reads AdamW's step counts, which its kernel for GPUs does not."""
    optimizer = make(section, scale=True, multiple=0.5)
    set_gradients(optimizer, 0)
    with NoHostWait():
        optimizer.step(0, FREE)
        with pytest.raises(AssertionError, match="would wait"):
            float(optimizer.loss_scale)  # the control


def test_the_average_follows_slowly_after_a_quick_start() -> None:
    """The decay of update u is (1 + u) / (10 + u), until that reaches the recipe's value."""
    optimizer = make(ema=0.15)
    average = optimizer.parameters["a"].clone()
    for number, decay in enumerate((0.1, 0.15, 0.15)):
        set_gradients(optimizer, number)
        optimizer.step(number, FREE)
        average.lerp_(optimizer.parameters["a"], 1 - decay)
        torch.testing.assert_close(optimizer.shown()["a"], average)
    assert not torch.allclose(average, optimizer.parameters["a"], rtol=0, atol=1e-4)


def test_there_is_room_for_so_many_numbers_and_no_more() -> None:
    scalars = Scalars(torch.device("cpu"))
    for number in range(Scalars.CAPACITY):
        assert float(scalars.add(f"number {number}", float(number))) == number
    assert scalars.flat_S.tolist() == list(range(Scalars.CAPACITY))
    with pytest.raises(ValueError, match=f"'one more'.* {Scalars.CAPACITY} "):
        scalars.add("one more")
    few = Scalars(torch.device("cpu"))
    few.add("step")
    with pytest.raises(ValueError, match="'step'"):
        few.add("step")


def test_the_logged_rate_is_the_recipes_also_when_text_encoders_come_first() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    groups = [{"names": ["p"], "lr": 1e-6}]
    optim = AdamwSection(learning_rate=1e-4, text_encoder_learning_rate=1e-6)
    weights = FlatWeights({"p": parameter})
    optimizer = GatedOptimizer(weights, groups, optim, max_train_steps=9, ema_decay=0, use_loss_scale=False)
    assert optimizer.learning_rate(0) == 1e-4


def moved_by_small_gradients(section: OptimSection, weight_dtype: torch.dtype) -> Tensor:
    """The change after ten updates with gradients near 1e-5, which have squares below fp16's range."""
    optimizer = make(section, ema=0.0, weight_dtype=weight_dtype)
    before = optimizer.weights.masters.to(torch.float32, copy=True)
    for update in range(10):
        set_gradients(optimizer, seed=update)
        optimizer.weights.gradients.mul_(1e-5).add_(1e-5 * (before > 0))
        optimizer.step(update, FREE)
    return optimizer.weights.masters.float() - before


FP16 = [section for section in SECTIONS if "fp16" in section.weight_dtypes]


@pytest.mark.parametrize("section", [*FP16, SECTIONS[0]], ids=lambda section: section.optimizer)
def test_fp16_weights_move_as_those_of_float32_where_they_are_allowed(section: OptimSection) -> None:
    """The control is AdamW; its second moments would be zero."""
    section = section.model_copy(update={"max_grad_norm": 0.0})
    wanted, found = (moved_by_small_gradients(section, dtype) for dtype in (torch.float32, torch.float16))
    off = float((found - wanted).norm() / wanted.norm())
    assert (off < 0.2) is (section in [s.model_copy(update={"max_grad_norm": 0.0}) for s in FP16]), off


@pytest.mark.parametrize(
    "section", [each for each in SECTIONS if not each.averages], ids=lambda section: section.optimizer
)
def test_new_tokens_stay_as_they_are_after_their_part_of_the_run(section: OptimSection) -> None:
    stopping = type(section).model_validate({**section.model_dump(), "embedding_until_ratio": 0.15})
    optimizer = make(stopping, ema=0.0, stops="b")
    for update in range(4):
        before = {name: weight.clone() for name, weight in optimizer.parameters.items()}
        set_gradients(optimizer, update)
        stats = optimizer.step(update, FREE)
        assert not torch.equal(optimizer.parameters["a"], before["a"])
        assert torch.equal(optimizer.parameters["b"], before["b"]) == (update >= 2)  # 0.15 of 10 updates, rounded up
        assert stats.nonfinite == 0
    set_gradients(optimizer, 9)
    whole = float(optimizer.weights.gradients.norm())
    assert float(optimizer.step(4, FREE).grad_norm) < 0.9 * whole, "they do not count in clipping"
