"""A ledger that records every operation, and the allocation and release of every tensor.

It works on any device. On PyTorch's meta device, where nothing is computed, it counts the same as on a real device.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lora_rocm.device.allocator import PIECE_BYTES
from lora_rocm.device.kept_attention import OPERATORS
from lora_rocm.kernels.eight_bit_library import EIGHT_BIT_PRODUCTS, INTEGER_PRODUCT
from lora_rocm.planning.step_plan import SampleCost


@dataclass
class Tally:
    """Total work so far (see ``SampleCost``).

    attention: the part of it that forward passes of attention do. attention_bytes: their outputs.
    """

    flops: float = 0.0
    moved_bytes: float = 0.0
    launches: int = 0
    attention_flops: float = 0.0
    eight_bit_flops: float = 0.0
    attention: SampleCost = SampleCost()
    attention_bytes: int = 0

    def minus(self, earlier: SampleCost) -> SampleCost:
        return difference(self.now(), earlier)

    def now(self) -> SampleCost:
        return SampleCost(self.flops, self.moved_bytes, self.launches, self.attention_flops, self.eight_bit_flops)


def difference(one: SampleCost, other: SampleCost) -> SampleCost:
    """Return the work of ``one`` minus the work of ``other``."""
    return SampleCost(*(a - b for a, b in zip(astuple(one), astuple(other), strict=True)))


class ReusedShapes(TorchDispatchMode):
    """A dispatch mode that computes the shapes of an operation's results only once for inputs of the same shapes.

    PyTorch's shape rules for the meta device are slow, and models repeat their layers. Each result is a new tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[Hashable, tuple[_Made | None, ...]] = {}
        self._written = set[Hashable]()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Skip the wrapper that hides ``__torch_dispatch__`` from Dynamo: it would run at each operation."""
        return False

    # untyped: PyTorch calls it
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._result(func, args, kwargs or {}, (func, _signature(args), _signature(kwargs or {})))

    def _result(self, func: Any, args: tuple[object, ...], kwargs: dict[str, object], key: tuple[Hashable, ...]) -> Any:
        """Run an operation, or on the meta device make new results of the shapes that they had before.

        A result is reused if its tensors are new, or if it is the first input, which the operation writes and leaves in
        its shape. Views are detected by their storage, too, because not every schema marks them.

        ``key``: of the operation and the shapes of its inputs.
        """
        kind = _kind_of(func)
        if kind is None:
            return func(*args, **kwargs)
        if kind == "writes":
            if key in self._written:
                return args[0]
            result = func(*args, **kwargs)
            if result is args[0] and _is_meta(result) and _signature(args) == key[1]:
                self._written.add(key)
            return result
        if (known := self._made.get(key)) is not None:
            made = [None if each is None else each.again() for each in known]
            return tuple(made) if len(func._schema.returns) > 1 else made[0]
        result = func(*args, **kwargs)
        results = result if isinstance(result, tuple) else (result,)
        if all(each is None or _is_meta(each) for each in results):
            given = {tensor.untyped_storage()._cdata for tensor in _tensors_in((args, kwargs))}
            made_here = [each.untyped_storage()._cdata for each in results if each is not None]
            if len({*made_here}) == len(made_here) and given.isdisjoint(made_here):
                self._made[key] = tuple(None if each is None else _Made.of(each) for each in results)
        return result


class Ledger(ReusedShapes):
    """A dispatch mode that counts live bytes, their peak since the last ``mark``, and work (see ``Tally``).

    ``known``: tensors that are not counted (weights, inputs).
    """

    def __init__(self, known: Iterator[Tensor]) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._shared_bytes = self._own_peak_bytes = 0
        self._shared = set[int]()
        self._latest = (0, 0)  # storage, and the own peak before it
        self.tally = Tally()
        self._sizes: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._flops: dict[Hashable, float] = {}
        for tensor in known:
            self._sizes[tensor.untyped_storage()._cdata] = 0

    def mark(self) -> int:
        """Return the peak since the last mark, and start a new peak at the current bytes."""
        peak, self.peak_bytes = self.peak_bytes, self.live_bytes
        self._own_peak_bytes = self.live_bytes - self._shared_bytes
        return peak

    @property
    def shared_peak_bytes(self) -> int:
        """The part of the peak that does not grow with the number of samples; see ``note_shared``."""
        return self.peak_bytes - self._own_peak_bytes

    def note_shared(self, tensor: Tensor) -> None:
        """Count a tensor that was just made as one that all samples share."""
        key = tensor.untyped_storage()._cdata
        if key in self._alive and key not in self._shared:
            self._shared.add(key)
            self._shared_bytes += self._sizes[key]
            latest, before = self._latest
            if latest == key:
                self._own_peak_bytes = before

    def size_of(self, tensor: Tensor) -> int:
        """Bytes that were counted for a tensor's storage; 0 if it is not counted."""
        return self._sizes.get(tensor.untyped_storage()._cdata, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        key = (func, _signature(args), _signature(given))
        result = self._result(func, args, given, key)
        made = list(_tensors_in(result))
        fresh = sum(self._take(tensor) for tensor in made)
        before = self.tally.now() if func in OPERATORS else None
        self._count(func, args, given, result, key, made, fresh > 0 or func._schema.is_mutable)
        if before is not None:
            done = self.tally.minus(before)
            self.tally.attention = difference(self.tally.attention, difference(SampleCost(), done))
            self.tally.attention_bytes += fresh
        return result

    def _take(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return 0
        size = -(-storage.nbytes() // PIECE_BYTES) * PIECE_BYTES
        self._sizes[key] = size
        self._alive[key] = weakref.ref(storage, partial(self._gone, key))
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._latest = key, self._own_peak_bytes
        self._own_peak_bytes = max(self._own_peak_bytes, self.live_bytes - self._shared_bytes)
        return size

    def _gone(self, key: int, _: object) -> None:
        size = self._sizes.pop(key, 0)
        self.live_bytes -= size
        if key in self._shared:
            self._shared.discard(key)
            self._shared_bytes -= size
        self._alive.pop(key, None)

    def _count(
        self, func: Any, args: Any, kwargs: Any, result: Any, key: Hashable, made: list[Tensor], writes: bool
    ) -> None:
        formula = _formula(func)
        if formula is not None:
            flops = self._flops.get(key)
            if flops is None:
                inputs = {name: value for name, value in kwargs.items() if name != "out"}
                flops = formula(*args, **inputs, out_val=result)
                if all(tensor.is_meta for tensor in _tensors_in((args, kwargs))):  # offsets of samples have values
                    self._flops[key] = flops
            if "_attention" in func._overloadpacket.__name__:
                self.tally.attention_flops += flops
            elif func._overloadpacket in EIGHT_BIT_PRODUCTS:
                self.tally.eight_bit_flops += flops
            else:
                self.tally.flops += flops
            self.tally.launches += 1
        elif writes:  # else it is a view
            tensors = [*_tensors_in(args), *made]
            self.tally.moved_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.tally.launches += 1


@dataclass(frozen=True)
class _Made:
    """A new tensor of an operation."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Made:
        return cls(tensor.shape, tensor.stride(), tensor.dtype)

    def again(self) -> Tensor:
        """Return a new tensor like it."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


@cache
def _kind_of(func: Any) -> Literal["makes", "writes"] | None:
    """Whether a schema declares only new tensors, or returns the first input and writes no other; else None."""
    schema = func._schema
    values = [*schema.arguments, *schema.returns]
    marked = [value for value in values if value.alias_info is not None]
    if not marked:
        are_tensors = all(isinstance(value.type, torch.TensorType) for value in schema.returns)
        return "makes" if schema.returns and are_tensors else None
    if len(schema.returns) == 1 and marked == [schema.arguments[0], schema.returns[0]]:
        return "writes" if all(value.alias_info.is_write for value in marked) else None
    return None


def _is_meta(value: object) -> bool:
    return type(value) is Tensor and value.is_meta


def _signature(value: object) -> Hashable:
    """A key of everything that a result's shape depends on: values, and the metadata of tensors."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.is_meta
    if isinstance(value, list | tuple):
        return tuple(map(_signature, value))
    if isinstance(value, dict):
        return tuple((name, _signature(part)) for name, part in value.items())
    return type(value), value


def _tensors_in(value: object) -> Iterator[Tensor]:
    """Return the tensors among an operation's arguments or results. PyTorch's ``tree_leaves`` takes longer."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors_in(part)
    elif isinstance(value, dict):
        yield from _tensors_in(tuple(value.values()))


@cache
def _formula(func: Any) -> Any:
    """PyTorch's FLOP formula for an operation; an in-place operation has the formula of its out-of-place variant."""
    packet = func._overloadpacket if func._overloadpacket is not INTEGER_PRODUCT else torch.ops.aten.mm
    plain = getattr(torch.ops.aten, packet.__name__.removesuffix("_"), None)
    return flop_registry.get(packet) or flop_registry.get(plain)


class _FusedAttention(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            return _fused(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute fused attention for tensors of shape [B, H, S, D]. Parameter names are PyTorch's, for keyword arguments.

    With a mask it is memory-efficient attention, because PyTorch's flash attention takes none. Its backward pass reads
    the mask as a bias: a boolean mask is converted, and each call keeps its own bias of S * S numbers.
    """
    if enable_gqa and key.shape[1] != query.shape[1]:  # a GPU kernel reads each key head once per group
        groups = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    if attn_mask is not None:
        bias = attn_mask
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
        bias = bias.expand(*query.shape[:2], query.shape[2], key.shape[2])
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        masked_BHSD: Tensor = efficient(query, key, value, bias, True, dropout_p, is_causal)[0]
        return masked_BHSD
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    output_BHSD: Tensor = flash(query, key, value, dropout_p, is_causal)[0]
    return output_BHSD


@contextmanager
def fused_attention(fused: bool = True) -> Iterator[None]:
    """Within this context, attention is counted as GPU kernels compute it, without storing all scores.

    On the meta device PyTorch itself would store them.
    """
    if not fused:
        yield
        return
    with _FusedAttention():
        yield
