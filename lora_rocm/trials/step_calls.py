"""The attention calls and matrix products of a training pass, counted on a model without weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lora_rocm.device.attention import Call
from lora_rocm.families.base import ModelFamily
from lora_rocm.families.objectives.loss import losses
from lora_rocm.hardware.settings import Settings
from lora_rocm.memory.footprint import hollow_model, inputs_on_meta, largest_of
from lora_rocm.memory.op_counter import fused_attention
from lora_rocm.recipe.schema import Recipe

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


@dataclass(frozen=True)
class AttentionCall:
    """Shapes of one call without mask and dropout: query [B, H, S, D], key and value [B, H, T, D]."""

    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    is_causal: bool

    def __str__(self) -> str:
        causal = ", causal" if self.is_causal else ""
        return f"{self.batch}x{self.heads} heads of {self.head_dim}, {self.queries} to {self.keys}{causal}"


@dataclass(frozen=True)
class Laid:
    """Shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def random(self, device: torch.device, generator: torch.Generator) -> Tensor:
        tensor = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        values = torch.randn(self.shape, device=device, generator=generator)
        if 0 in self.strides:  # expanded: several elements are one number
            tensor.fill_(1)
            return tensor
        return tensor.copy_(values)


@dataclass(frozen=True)
class Product:
    """One matrix product as PyTorch's operation."""

    name: str
    inputs: tuple[Laid, ...]

    def __str__(self) -> str:
        sides = " @ ".join("x".join(map(str, one.shape)) for one in self.inputs[-2:])
        return f"{self.name} {sides} {str(self.inputs[-1].dtype).removeprefix('torch.')}"

    def run(self, inputs: list[Tensor]) -> Tensor:
        result: Tensor = getattr(aten, self.name).default(*inputs)
        return result


@dataclass
class StepCalls:
    """How often a pass makes each call."""

    attention: Counter[AttentionCall]
    products: Counter[Product]


def count_calls(
    recipe: Recipe, family: ModelFamily, dtype: torch.dtype, settings: Settings, on_gpu: bool = True
) -> StepCalls:
    """Count one forward and backward pass of a micro-batch in the largest shape, on the meta device."""
    model = hollow_model(family, recipe, dtype, on_gpu and settings.triton)
    rows = -(-recipe.train.batch_size // settings.micro_batch_parts)
    batch, draws = inputs_on_meta(family, largest_of(recipe), rows)
    calls = StepCalls(Counter(), Counter())
    with fused_attention(settings.attention != "math"), _Attention(calls.attention), _Products(calls.products):
        losses(family, model, batch, draws).sum().backward()
    return calls


class _Attention(TorchFunctionMode):
    def __init__(self, found: Counter[AttentionCall]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            call = Call(*args, **(kwargs or {}))
            if call.is_plain:
                batch, heads, queries, head_dim = call.query.shape
                self.found[AttentionCall(batch, heads, queries, call.key.shape[2], head_dim, call.is_causal)] += 1
        return func(*args, **(kwargs or {}))


class _Products(TorchDispatchMode):
    def __init__(self, found: Counter[Product]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            inputs = tuple(Laid(tuple(t.shape), tuple(t.stride()), t.dtype) for t in args if isinstance(t, Tensor))
            self.found[Product(func._schema.name.partition("::")[2], inputs)] += 1
        return func(*args, **(kwargs or {}))
