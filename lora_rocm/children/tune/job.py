"""Used by all tuning child processes: counts the operations in a recipe's pass, and reports measured rows.

The operations are counted on a model without weights.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lora_rocm.checks.timing import MeasuredRow, measure
from lora_rocm.children.measuring import run_reported
from lora_rocm.device.attention import Call
from lora_rocm.device.backend_settings import apply
from lora_rocm.device.precision import choose_device, compute_dtype
from lora_rocm.families.base import ModelFamily, family_for
from lora_rocm.families.objectives.loss import losses
from lora_rocm.hardware.settings import Settings, settings_from
from lora_rocm.memory.footprint import inputs_on_meta, largest_of, meta_model
from lora_rocm.memory.op_counter import fused_attention
from lora_rocm.processes.jobs import TuneAttentionJob, TuneProductsJob, job_of
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.schema import Recipe

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


@dataclass(frozen=True)
class AttentionCall:
    """Shapes of an attention call without mask and dropout: query [B, H, S, D], key and value [B, H, T, D]."""

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

    @classmethod
    def of(cls, tensor: Tensor) -> Laid:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    def random(self, device: torch.device, generator: torch.Generator) -> Tensor:
        tensor = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        if 0 in self.strides:  # expanded: several elements are one number
            return tensor.fill_(1)
        return tensor.copy_(torch.randn(self.shape, device=device, generator=generator))


@dataclass(frozen=True)
class Product:
    """A matrix product: the name of PyTorch's operation and the layouts of its inputs."""

    name: str
    inputs: tuple[Laid, ...]

    def __str__(self) -> str:
        sides = " @ ".join("x".join(map(str, one.shape)) for one in self.inputs[-2:])
        return f"{self.name} {sides} {str(self.inputs[-1].dtype).removeprefix('torch.')}"

    def run(self, inputs: list[Tensor]) -> Tensor:
        result: Tensor = getattr(aten, self.name).default(*inputs)
        return result

    @property
    def flops(self) -> float:
        left, right = self.inputs[-2:]
        return 2.0 * prod(left.shape) * right.shape[-1]


@dataclass(frozen=True)
class Convolution:
    """A convolution without its bias: pixels [B, C, ...], kernel [O, C / groups, ...]."""

    pixels: Laid
    kernel: Laid
    output: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def run(self, pixels: Tensor, kernel: Tensor) -> Tensor:
        none = [0] * len(self.stride)
        sides = self.stride, self.padding, self.dilation
        result: Tensor = aten.convolution.default(pixels, kernel, None, *map(list, sides), False, none, self.groups)
        return result

    @property
    def flops(self) -> float:
        return 2.0 * prod(self.output) * prod(self.kernel.shape[1:])


class _Attention(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[AttentionCall]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            call = Call(*args, **(kwargs or {}))
            if call.is_plain:
                batch, heads, queries, head_dim = call.query.shape
                self.found[AttentionCall(batch, heads, queries, call.key.shape[2], head_dim, call.is_causal)] += 1
        return func(*args, **(kwargs or {}))


class _Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = Counter[Product]()
        self.convolutions = Counter[Convolution]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            inputs = tuple(Laid.of(t) for t in args if isinstance(t, Tensor))
            self.found[Product(func._schema.name.partition("::")[2], inputs)] += 1
        result = func(*args, **(kwargs or {}))
        if func is aten.convolution.default and not args[6]:  # 6: transposed
            stride, padding, dilation = (tuple(side) for side in args[3:6])
            given = Laid.of(args[0]), Laid.of(args[1]), tuple(result.shape)
            self.convolutions[Convolution(*given, stride, padding, dilation, groups=args[8])] += 1
        return result


def count_calls(
    recipe: Recipe, family: ModelFamily, dtype: torch.dtype, settings: Settings, on_gpu: bool = True
) -> tuple[Counter[AttentionCall], Counter[Product], Counter[Convolution]]:
    """Return how often each attention call, matrix product and convolution occurs in a forward and backward pass.

    The pass has a micro-batch of the recipe's largest shape.
    """
    model = meta_model(family, recipe, dtype, on_gpu and settings.triton)
    rows = -(-recipe.train.batch_size // settings.micro_batch_parts)
    batch, draws = inputs_on_meta(family, largest_of(recipe), rows)
    with fused_attention(settings.attention != "math"), _Attention() as attention, _Products() as products:
        losses(family, model, batch, draws).sum().backward()
    return attention.found, products.found, products.convolutions


@dataclass(frozen=True)
class RecipeWork:
    """The operations in a recipe's pass, and the settings with which this machine computes them."""

    device: torch.device
    dtype: torch.dtype
    captures: bool
    """Whether the run's passes are captured as graphs. The host's time per call is then not measured."""
    attention: Counter[AttentionCall]
    products: Counter[Product]
    convolutions: Counter[Convolution]

    @classmethod
    def of(cls, recipe: Recipe) -> RecipeWork:
        settings = settings_from(os.environ)
        device = choose_device(recipe.runtime.device, settings)
        apply(settings, device)
        dtype = compute_dtype(recipe.train.mixed_precision, device, settings, recipe.spec.takes_fp16)
        on_gpu = device.type == "cuda"
        captures = on_gpu and recipe.runtime.graphs == "auto" and settings.graphs and not recipe.lora.dropout
        return cls(device, dtype, captures, *count_calls(recipe, family_for(recipe), dtype, settings, on_gpu))


Prepare = Callable[[dict[str, Any]], Callable[[], float]]
"""Prepares a row: it checks the results, and returns a function that measures the row's time in seconds.

It adds further results to the dictionary. It raises RuntimeError if a result is wrong.
"""


def _own_seconds(call: Callable[[], object]) -> float:
    taken = call()
    assert isinstance(taken, float)
    return taken


J = TypeVar("J", TuneAttentionJob, TuneProductsJob)


def report_rows(kind: type[J], rows_of: Callable[[J, RecipeWork], Iterable[tuple[dict[str, Any], Prepare]]]) -> int:
    """Measure and report the rows of this process's job. Return the exit code.

    ``rows_of`` returns (fields, preparation) of each row.
    """

    def run() -> None:
        job = job_of(kind)
        works = []
        for fields, prepare in rows_of(job, RecipeWork.of(recipe_from(job.recipe))):
            found: dict[str, Any] = {}
            works.append(MeasuredRow(fields, 1.0, partial(prepare, found), found))
        measure(works, job.start, _own_seconds, job.limit_s)

    return run_reported(run)
