"""Backends of attention: each gives plain attention's numbers, in the passes of training and nowhere else."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lora_rocm.device import attention
from lora_rocm.device.attention import OTHERS, context_of, grouped, training_context


def inputs(dtype: torch.dtype = torch.float64, queries: int = 12, keys: int = 7) -> tuple[Tensor, ...]:
    own = torch.Generator().manual_seed(1)
    sides = (queries, keys, keys)
    return tuple(torch.randn(2, 3, side, 8, generator=own).to(dtype).requires_grad_() for side in sides)


def with_gradients(output: Tensor, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return output.detach(), *torch.autograd.grad((output * torch.linspace(0, 1, 8, dtype=output.dtype)).sum(), given)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("group_bytes", [1, 4 * 4 * 12 * 12 * 4, 2**28], ids=["one head", "four heads", "all heads"])
def test_groups_of_heads_give_the_whole_forward_and_backward(is_causal: bool, group_bytes: int) -> None:
    given = inputs(torch.float32, keys=12)
    whole = with_gradients(F.scaled_dot_product_attention(*given, is_causal=is_causal), given)
    parts = with_gradients(grouped(group_bytes=group_bytes)(*given, is_causal, None), given)
    for found, wanted in zip(parts, whole, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-6)


def test_groups_with_16_bit_products_are_nearer_with_float32_ones() -> None:
    given = tuple(tensor.detach() for tensor in inputs(torch.bfloat16, 64, 64))
    exact = F.scaled_dot_product_attention(*(tensor.double() for tensor in given))
    errors = [float((grouped(dtype)(*given, False, None) - exact).abs().max()) for dtype in (None, torch.float32)]
    assert errors[1] <= errors[0] < 0.02


def test_a_group_holds_no_more_scores_than_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    whole = attention._probabilities

    def watched(q: Tensor, k: Tensor, how: Any) -> Tensor:
        seen.append(len(q))
        return whole(q, k, how)

    monkeypatch.setattr(attention, "_probabilities", watched)
    given = inputs(torch.float32)
    with_gradients(grouped(group_bytes=2 * 4 * 12 * 7 * 4)(*given, False, None), given)
    assert seen == [2, 2, 2] * 2, "six heads of two samples, two at a time, forward and backward"


@pytest.mark.parametrize("way", ["math", "math-groups", "sdpa-flash"])
def test_a_way_holds_inside_its_context_also_where_a_block_is_recomputed(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs(torch.float32)
    wanted = with_gradients(F.scaled_dot_product_attention(*given), given)
    calls: list[int] = []
    if way in OTHERS:
        inner = OTHERS[way]()

        def counted(*args: Any) -> Tensor:
            calls.append(1)
            return inner(*args)

        monkeypatch.setitem(OTHERS, way, lambda: counted)
    passes = context_of(way)
    with passes():
        again = lambda: (nullcontext(), passes())  # noqa: E731
        output = checkpoint(F.scaled_dot_product_attention, *given, use_reentrant=False, context_fn=again)
    found = with_gradients(output, given)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert len(calls) == (2 if way in OTHERS else 0)
    F.scaled_dot_product_attention(*given)
    assert len(calls) == (2 if way in OTHERS else 0), "outside, torch computes it"


def test_masks_and_float32_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: Any) -> Tensor:
        raise AssertionError("a mask is not for it")

    monkeypatch.setitem(OTHERS, "flash", lambda: refuses)
    q, k, v = inputs(torch.float32)
    with context_of("flash")():
        F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(12, 7, dtype=torch.bool))
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        with pytest.raises(AssertionError):
            F.scaled_dot_product_attention(q, k, v)


def test_a_package_gets_its_own_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    class Package:
        @staticmethod
        def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float | None) -> Tensor:
            moved = (tensor.transpose(1, 2) for tensor in (q, k, v))
            return F.scaled_dot_product_attention(*moved, is_causal=causal, scale=softmax_scale).transpose(1, 2)

    monkeypatch.setattr(attention, "import_module", lambda name: Package)
    given = inputs(torch.bfloat16)
    with context_of("aiter")():
        found = F.scaled_dot_product_attention(*given, scale=0.3)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(*given, scale=0.3))


def test_training_needs_no_context_where_the_whole_process_is_switched() -> None:
    assert training_context("auto") is None and training_context("math") is None
    assert training_context("sdpa-flash") is not None
