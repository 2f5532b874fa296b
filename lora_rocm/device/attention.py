"""Attention backends, and contexts in which one backend computes all attention of a model.

Rules choose the backend with ``setting:attention``. The sources are the self-test, measured choices and mitigations;
the last one takes precedence.

Families call ``scaled_dot_product_attention`` and need not know the backend. For torch's own backends, the context sets
their order of preference. For other backends, a ``TorchFunctionMode`` replaces torch's function, so they work both in
eager passes and in captured graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from lora_rocm.device.kept_attention import attention_output
from lora_rocm.hardware.settings import Settings
from lora_rocm.processes.optional_packages import show

Attend = Callable[..., Tensor]
"""Attention function: (query_BHSD, key_BHSD, value_BHSD, is_causal, scale) -> output_BHSD."""
Context = Callable[[], AbstractContextManager[Any]]
FLASH, EFFICIENT, CUDNN, MATH = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)
ORDERS = {
    "sdpa-flash": (FLASH, EFFICIENT, MATH),
    "sdpa-ck": (FLASH, EFFICIENT, MATH),
    "sdpa-efficient": (EFFICIENT, MATH),
    "sdpa-cudnn": (CUDNN, FLASH, EFFICIENT, MATH),
    "math": (MATH,),
}
"""Torch's backends for each setting, in order of preference. Each handles the shapes that the earlier ones do not
support.
"""
ROUTES = {"math": MATH, "efficient": EFFICIENT, "flash": FLASH, "cudnn": CUDNN}
"""Torch's constants for the backends of ``scaled_dot_product_attention``, keyed by name. The plainest backend comes
first.
"""
_held_out: set[str] = set()
"""Routes (keys of ``ROUTES``) that are disabled, because they gave wrong numbers in this process or in an earlier one.
``enable`` and ``hold_out`` set it.
"""
GROUP_BYTES = 2**28
"""Memory for the attention scores of one group of heads (``grouped``). The memory plan reserves this much."""
COPIES = 4
"""Number of tensors as large as the scores that exist at once in the backward pass of a group."""


def enable(settings: Settings) -> None:
    """Enable the attention routes that the settings allow, and disable the others, in the whole process."""
    fused = settings.attention != "math"
    allowed = {
        "math": settings.plain_attention,
        "efficient": settings.efficient_attention,
        "flash": settings.flash_attention,
        "cudnn": settings.cudnn_attention,
    }
    _held_out.clear()
    _held_out.update(route for route, allows in allowed.items() if not allows)
    cuda = torch.backends.cuda
    cuda.enable_flash_sdp(fused and allowed["flash"])
    cuda.enable_mem_efficient_sdp(fused and allowed["efficient"])
    cuda.enable_cudnn_sdp(fused and allowed["cudnn"])
    cuda.enable_math_sdp(allowed["math"])


def hold_out(settings: Settings, routes: Iterable[str]) -> Settings:
    """Disable these attention routes in this process, and return the settings without them."""
    out = set(routes)
    changed = replace(
        settings,
        flash_attention=settings.flash_attention and "flash" not in out,
        efficient_attention=settings.efficient_attention and "efficient" not in out,
        cudnn_attention=settings.cudnn_attention and "cudnn" not in out,
        plain_attention=settings.plain_attention and "math" not in out,
    )
    enable(changed)
    return changed


def context_of(backend: str) -> Context:
    """Return a function that creates a context. Inside the context, attention is computed by this backend.

    ``backend``: a value of ``hardware.settings.Settings.attention``.
    """
    if backend in ORDERS:
        return lambda: _ordered(backend)
    return (lambda: _Instead(OTHERS[backend]())) if backend in OTHERS else nullcontext


def training_context(backend: str) -> Context | None:
    """Return the context for training (see ``context_of``), or None if process-wide switches suffice."""
    return None if backend in ("auto", "math") else context_of(backend)


@contextmanager
def _ordered(backend: str) -> Iterator[None]:
    before = torch.backends.cuda.preferred_rocm_fa_library() if backend == "sdpa-ck" else None
    if before is not None:
        torch.backends.cuda.preferred_rocm_fa_library("ck")
    try:
        bad = {ROUTES[route] for route in _held_out}
        right = [backend for backend in ORDERS[backend] if backend not in bad]
        right = right or [backend for backend in ROUTES.values() if backend not in bad]
        with sdpa_kernel(right, set_priority=True):
            yield
    finally:
        if before is not None:
            torch.backends.cuda.preferred_rocm_fa_library(before)


class _Instead(TorchFunctionMode):
    """A context in which ``attend`` computes attention. Calls with a mask or dropout are still computed by torch."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            call = Call(*args, **kwargs)
            if call.is_plain:
                return self.attend(call.query, call.key, call.value, call.is_causal, call.scale)
        return func(*args, **kwargs)


class Call(NamedTuple):
    """Arguments of ``scaled_dot_product_attention``, by torch's names."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the call has neither mask nor dropout, and as many key heads as query heads."""
        return self.attn_mask is None and not self.dropout_p and not self.enable_gqa and self.query.ndim == 4


def _library(module: str) -> Attend:
    """Return the attention function of a package with flash-attention's API, which expects tensors [B, S, H, D].

    Raises:
        ImportError: the package is not installed, or cannot be loaded.
    """
    show((module,))
    function = import_module(module).flash_attn_func

    def attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> Tensor:
        if query.dtype not in (torch.float16, torch.bfloat16):
            return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale)
        moved = (tensor.transpose(1, 2) for tensor in (query, key, value))
        output_BSHD: Tensor = function(*moved, causal=is_causal, softmax_scale=scale)
        return output_BSHD.transpose(1, 2)

    return attend


def grouped(products: torch.dtype | None = None, group_bytes: int = GROUP_BYTES) -> Attend:
    """Return plain attention that computes one group of heads at a time, to limit the memory for scores.

    This applies to the forward and the backward pass. ``products``: dtype of the matrix products, or None for the
    tensors' dtype. The softmax is always computed in float32, because exponentials of 16-bit scores lose too many
    digits.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> Tensor:
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        flat = (tensor.flatten(0, 1) for tensor in (query, key, value))
        how = is_causal, factor, products or query.dtype, group_bytes
        output_NSD: Tensor = _Grouped.apply(*flat, *how)  # type: ignore[no-untyped-call]
        return output_NSD.unflatten(0, query.shape[:2])  # type: ignore[no-any-return]

    return attend


class _Grouped(torch.autograd.Function):
    """Attention in groups of heads; N counts the heads of all samples.

    The backward pass recomputes the probabilities.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_NSD: Tensor,
        key_NTD: Tensor,
        value_NTD: Tensor,
        is_causal: bool,
        scale: float,
        products: torch.dtype,
        group_bytes: int,
    ) -> Tensor:
        scores_bytes = COPIES * query_NSD.shape[1] * key_NTD.shape[1] * torch.float32.itemsize
        ctx.how = is_causal, scale, products, max(1, group_bytes // scores_bytes)

        def compute() -> Tensor:
            made_NSD = query_NSD.new_empty((*query_NSD.shape[:2], value_NTD.shape[-1]))
            for q, k, v, out in _split(ctx.how, query_NSD, key_NTD, value_NTD, made_NSD):
                out.copy_(_probabilities(q, k, ctx.how).to(products) @ v.to(products))
            return made_NSD

        output_NSD = attention_output(compute)
        ctx.save_for_backward(query_NSD, key_NTD, value_NTD, output_NSD)
        return output_NSD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        products, saved = ctx.how[2], ctx.saved_tensors
        found = [torch.empty_like(tensor) for tensor in saved[:3]]
        for q, k, v, out, d_out, d_q, d_k, d_v in _split(ctx.how, *saved, gradients[0], *found):
            given = d_out.to(products)
            p_GST = _probabilities(q, k, ctx.how)
            d_v.copy_(p_GST.to(products).mT @ given)
            mean_GS1 = (d_out.float() * out.float()).sum(-1, keepdim=True)
            d_scores_GST = p_GST.mul_((given @ v.to(products).mT).float() - mean_GS1).to(products)
            d_q.copy_((d_scores_GST @ k.to(products)).float() * ctx.how[1])
            d_k.copy_((d_scores_GST.mT @ q.to(products)).float() * ctx.how[1])
        return *found, None, None, None, None


def _split(how: tuple[bool, float, torch.dtype, int], *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(how[3]) for tensor in tensors), strict=True)


def _probabilities(q: Tensor, k: Tensor, how: tuple[bool, float, torch.dtype, int]) -> Tensor:
    """Attention probabilities of one group of heads, float32 [G, S, T]."""
    is_causal, scale, products, _ = how
    scores_GST = ((q.to(products) * scale) @ k.to(products).mT).float()
    if is_causal:
        scores_GST.masked_fill_(torch.ones_like(scores_GST[0], dtype=torch.bool).triu_(1), float("-inf"))
    return scores_GST.softmax(-1)


OTHERS: dict[str, Callable[[], Attend]] = {
    "flash": lambda: _library("flash_attn"),
    "aiter": lambda: _library("aiter"),
    "math-groups": grouped,
    "math-groups-float32": lambda: grouped(torch.float32),
}
"""Factory of the function that replaces torch's attention, for each setting."""
