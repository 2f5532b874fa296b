"""Machine-independent counts of a step: operators, waits, bytes, floating point operations.

On a CPU, "the device" is main memory too. There a tensor counts as the device's if it existed before the step, was sent
by the transfer, or was computed from such a tensor.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from benchmarks.training_step.marks import replaced
from benchmarks.training_step.setup import Bench

aten = torch.ops.aten
READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2")
"""Operators that make the host wait for the result (the first is ``item()``, ``bool()`` and ``float()``)."""
NO_KERNEL = ("_unsafe_view", "empty", "empty_like", "empty_strided", "is_pinned", "resize_")
"""Operators that compute nothing, although they are not views."""
COPIES_TO_HOST = ("tolist", "numpy")
"""Methods that read a tensor on the CPU without an operator."""


@dataclass(frozen=True)
class Counts:
    """Counts of one step.

    device_operators: operators on device tensors, without views: approximately the kernels of an eager step.
    host_operators: operators on tensors that did not come from the device.
    waits: reads of a device value by the host.
    door_bytes: bytes of tensors and fingerprints that were sent.
    flops: floating point operations of products, convolutions and attention.
    peak_bytes: peak of device memory in use, beyond the memory in use before the step.
    saved_bytes: bytes kept for the backward pass, without weights.
    """

    device_operators: int
    host_operators: int
    waits: int
    door_bytes: int
    flops: int
    peak_bytes: int
    saved_bytes: int

    def to_json(self) -> dict[str, int]:
        return asdict(self)


class OnDevice:
    """Set of the device's storages; counts the live bytes of those added later."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._known: dict[int, weakref.ref[Any]] = {}
        self.bytes = self.peak = 0

    def has(self, tensor: Tensor) -> bool:
        return tensor.is_cuda if self._gpu else tensor.untyped_storage()._cdata in self._known

    def add(self, tensor: Tensor, resident: bool = False) -> None:
        """Add a tensor to the device; ``resident``: it existed before, and its bytes do not count."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, 0 if resident else storage.nbytes()
        if key not in self._known:
            self._known[key] = weakref.ref(storage, lambda _: self._gone(key, size))
            self.bytes += size
            self.peak = max(self.peak, self.bytes)

    def _gone(self, key: int, size: int) -> None:
        del self._known[key]
        self.bytes -= size


class Operators(TorchDispatchMode):
    """Counts dispatched operators."""

    def __init__(self, on_device: OnDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on_device = on_device
        self.device: Counter[str] = Counter()
        self.host: Counter[str] = Counter()
        self.waits = self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_iter(out) if isinstance(leaf, Tensor)]
        of_device = any(map(self.on_device.has, [*given, *made]))
        name = func._schema.name.removeprefix("aten::")
        if name.startswith("profiler::"):
            return out
        if of_device:
            self.waits += name in READS
            for tensor in made:
                self.on_device.add(tensor)
        if not func.is_view and name not in NO_KERNEL:
            (self.device if of_device else self.host)[name] += 1
        formula = _formula(func)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
        return out


def _formula(func: Any) -> Callable[..., int] | None:
    """Return PyTorch's FLOP formula of an operator; PyTorch's table lacks the CPU's attention."""
    packet = func.overloadpacket
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return lambda q, k, v, *args, out_val, **kwargs: int(sdpa_flop_count(q.shape, k.shape, v.shape))
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return lambda d, q, k, v, *args, out_val, **kwargs: int(
            sdpa_backward_flop_count(d.shape, q.shape, k.shape, v.shape)
        )
    formula: Callable[..., int] | None = flop_registry.get(packet)
    return formula


class Methods(TorchFunctionMode):
    """Counts methods that read a device tensor without dispatching an operator."""

    def __init__(self, on_device: OnDevice) -> None:
        super().__init__()
        self.on_device, self.waits = on_device, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in COPIES_TO_HOST and self.on_device.has(args[0]):
            self.waits += 1
        return func(*args, **(kwargs or {}))


class Door:
    """Counts sent bytes."""

    def __init__(self, on_device: OnDevice) -> None:
        self.on_device, self.bytes = on_device, 0

    @contextmanager
    def watched(self, bench: Bench) -> Iterator[None]:
        send = bench.trainer.transfer.send

        def counted(tensors: Mapping[str, Tensor], fingerprints: Mapping[str, Tensor]) -> Any:
            self.bytes += sum(tensor.nbytes for part in (tensors, fingerprints) for tensor in part.values())
            arrived, clock = send(tensors, fingerprints)
            for tensor in arrived.values():
                self.on_device.add(tensor)
            return arrived, clock

        with replaced(bench.trainer.transfer, "send", counted):
            yield


def first_flops(bench: Bench) -> int:
    """Make the first step eagerly, and count its floating point operations as they are executed."""
    operators = Operators(OnDevice(bench.start.device))
    with torch.compiler.set_stance("force_eager"), operators:
        bench.make_steps(1)
    return operators.flops


def count_step(bench: Bench) -> tuple[Counts, Operators]:
    """Make two further steps: one is counted, and one records the tensors kept for the backward pass."""
    on_device = OnDevice(bench.start.device)
    for tensor in resident(bench):
        on_device.add(tensor, resident=True)
    operators, methods, door = Operators(on_device), Methods(on_device), Door(on_device)
    with ExitStack() as stack:
        for watching in (door.watched(bench), methods, operators):
            stack.enter_context(watching)
        bench.make_steps(1)
    counts = Counts(
        device_operators=operators.device.total(),
        host_operators=operators.host.total(),
        waits=operators.waits + methods.waits,
        door_bytes=door.bytes,
        flops=operators.flops,
        peak_bytes=on_device.peak,
        saved_bytes=_saved_bytes(bench),
    )
    return counts, operators


def resident(bench: Bench) -> Iterable[Tensor]:
    """Yield all identifiable tensors that a run holds on the device between two steps."""
    trainer = bench.trainer
    for component in trainer.model.components.values():
        yield from component.parameters()
        yield from component.buffers()
    yield trainer.transfer.bad
    yield from bench.artifacts.adapter.parameters.values()
    yield from trainer.optimizer.state().values()
    for holder in (trainer.optimizer, trainer.optimizer.weights):
        yield from (value for value in vars(holder).values() if isinstance(value, Tensor))


def _saved_bytes(bench: Bench) -> int:
    weights = {tensor.untyped_storage()._cdata for tensor in resident(bench)}
    seen: dict[int, tuple[weakref.ref[Any], int]] = {}
    total = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        storage = tensor.untyped_storage()
        known = seen.get(storage._cdata)
        if storage._cdata not in weights and (known is None or known[0]() is None):
            seen[storage._cdata] = weakref.ref(storage), storage.nbytes()
            total += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        bench.make_steps(1)
    return total
