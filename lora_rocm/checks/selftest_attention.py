"""Self-test of attention: each backend ("route") of torch, forward and backward, compared with the formula on the CPU.

A route is tested by a call: torch's ``can_use_...`` functions return true even if the wheel lacks the kernels
(ComfyUI#15647).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from lora_rocm.checks.attention_layouts import InputLayouts, Layout, laid_out
from lora_rocm.checks.selftest_base import (
    Answers,
    Check,
    NotHereError,
    all_right,
    judge,
    judge_norm,
    poison,
    synchronize,
)
from lora_rocm.device.attention import ROUTES
from lora_rocm.device.precision import FLOATS
from lora_rocm.foundation.quiet import EVERYTHING

DEFAULT = "default"
"""Route name for the test in which torch itself chooses among the enabled routes."""
NO_BACKEND = ("No available kernel", "No viable backend")
"""Parts of torch's messages if a backend does not support this device or these shapes (aten sdp_utils)."""
TOLERANCES = {"fp32": 256.0, "fp16": 16.0, "bf16": 16.0}
"""Maximum error in units of eps, relative to the largest number. Scores and probabilities are rounded to 16 bits,
mainly by the math backend. Each rounding is an error of eps / 2, which the exponential and the sums over keys
propagate. In float32 some kernels compose their products from TF32 parts.
"""
NORM_TOLERANCES = {"fp32": 128.0, "fp16": 4.0, "bf16": 4.0}
"""Maximum norm of the error in units of eps, relative to the norm of the answer. In 16 bits the errors of four
roundings are independent, so their norm is near 0.6 eps (``children.tune.attention.MAX_EPS``).
"""
PLAIN_INPUTS = InputLayouts("heads", "heads", "heads")
Shapes = tuple[tuple[int, int, int, int, bool], ...]
"""Test shapes: batch, heads, queries, keys, and whether attention is causal."""
GRID = 64  # inputs are multiples of 1/64 up to 4: nine bits including the sign


def attention_checks(device: torch.device) -> Iterator[Check]:
    """Yield the attention checks.

    They use odd lengths: 77-token captions, an image plus one token, and both combined.
    """
    long, heads = (4097, 2) if device.type == "cuda" else (129, 2)
    shapes = ((2, heads, 77, 77, True), (1, heads, long, 77, False), (1, 1, long, long, False))
    for route in (*ROUTES, DEFAULT):
        for number, (dtype, head_dim) in enumerate(product(("bf16", "fp16"), (64, 128, 256))):
            run = partial(attention, device, route, dtype, head_dim, shapes, scale=2.0 ** (number % 4))
            yield Check(f"attention.{route}.{dtype}-d{head_dim}", run)


@cache
def _problem(batch: int, heads: int, queries: int, keys: int, causal: bool, head_dim: int) -> tuple[Tensor, ...]:
    """Return q, k, v and the gradient of the result, then the result and the gradients of q, k and v by the formula.

    All are float64 [B, H, L, D].
    """
    generator = torch.Generator().manual_seed(head_dim)

    def numbers(length: int) -> Tensor:
        plain = torch.randn((batch, heads, length, head_dim), generator=generator, dtype=torch.float64)
        return (plain.clamp(-4, 4) * GRID).round() / GRID

    q, k, v = (numbers(length).requires_grad_() for length in (queries, keys, keys))
    grad = numbers(queries)
    scores = q @ k.mT / head_dim**0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    result = scores.softmax(dim=-1) @ v
    return q.detach(), k.detach(), v.detach(), grad, result.detach(), *torch.autograd.grad(result, (q, k, v), grad)


@cache
def _answers(batch: int, heads: int, queries: int, keys: int, causal: bool, head_dim: int, scale: float) -> Answers:
    """Return the result and the gradients of q, k and v of ``_problem``, if v and the gradient are scaled."""
    *_, result, dq, dk, dv = _problem(batch, heads, queries, keys, causal, head_dim)
    return Answers.of(result * scale, dq * scale * scale, dk * scale * scale, dv * scale)


def attention(
    device: torch.device,
    route: str,
    dtype: str,
    head_dim: int,
    shapes: Shapes,
    *,
    scale: float,
    layouts: InputLayouts = PLAIN_INPUTS,
    of_gradient: Sequence[Layout] = ("heads",),
) -> None:
    """Check the results of a route at each shape, and its gradients for each layout of the output's gradient, in turn.

    For ``DEFAULT``, torch chooses among the enabled routes.
    """
    tolerance = TOLERANCES[dtype] * torch.finfo(FLOATS[dtype]).eps
    for batch, heads, queries, keys, causal in shapes:
        problem = (batch, heads, queries, keys, causal, head_dim)
        inputs, answers = _problem(*problem)[:4], _answers(*problem, scale)
        factors = (1.0, 1.0, scale, scale)
        q, k, v, grad = (
            (tensor * factor).to(FLOATS[dtype]).to(device) for tensor, factor in zip(inputs, factors, strict=True)
        )
        q, k, v = (laid_out(tensor, its).requires_grad_() for tensor, its in zip((q, k, v), layouts, strict=True))
        poison(device, *(tensor.numel() * tensor.element_size() for tensor in (q, q, k, v)))
        if route == DEFAULT:
            result = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        else:
            result = _by(route, q, k, v, causal)
        what = (
            f"{'chosen' if route == DEFAULT else route} attention {queries}x{keys}, head dimension {head_dim}, {dtype}"
        )
        what += "" if layouts == PLAIN_INPUTS else f", layouts {'/'.join(layouts)}"
        of_all = NORM_TOLERANCES[dtype] * torch.finfo(FLOATS[dtype]).eps
        for number, layout in enumerate(of_gradient, 1):
            kept = number < len(of_gradient)
            dq, dk, dv = torch.autograd.grad(result, (q, k, v), laid_out(grad, layout), retain_graph=kept)
            synchronize(device)
            if all_right((result, dq, dk, dv), answers, tolerance, of_all):
                continue
            # Name the wrong one
            given = "" if len(of_gradient) == 1 else f" for an output gradient in layout {layout}"
            parts = ("", *(f", gradient of {name}{given}" for name in "qkv"))
            for part, found, answer in zip(parts, (result, dq, dk, dv), answers.tensors, strict=True):
                judge(found, answer, what + part, tolerance)
                judge_norm(found, answer, what + part, of_all)


def _by(route: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    with EVERYTHING as texts:
        try:
            with sdpa_kernel([ROUTES[route]]):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        except RuntimeError as error:
            if not any(words in str(error) for words in NO_BACKEND):
                raise
    reasons = {text.partition(" (Triggered")[0] for text in texts}
    raise NotHereError(
        f"torch has no {route} attention for this GPU and these shapes: {'; '.join(sorted(reasons)) or 'not built'}"[
            :300
        ]
    )
