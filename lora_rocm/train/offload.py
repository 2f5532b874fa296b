"""Frozen weights that wait in main memory, and come to the GPU block by block, one block ahead of the computing.

The blocks are recomputed in the backward pass (``families.recompute``), so each is used twice a pass: going forward,
and going back. A block's weights are one piece of pinned memory and travel in one copy on a stream of their own, into
one of two places on the GPU. A place is filled anew only when the device is past all that was queued before, which
includes what used it: the forward pass of a block is queued before the next block is entered, and so is its backward
pass, since autograd takes what came later in the forward pass first.

Every arrival is compared on the device with the fingerprint taken on the host, and a difference sets the door's sticky
verdict (``DeviceTransfer.bad``): nothing is waited for, and no update is made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lora_rocm.device.transfer import DeviceTransfer, position_table, whole_fingerprint
from lora_rocm.run.memory_plan import SLOTS

ARENA_BYTES = 2**30
ALIGNMENT_BYTES = 256
"""Each tensor begins at a multiple, as matrix products want it."""


@dataclass(frozen=True)
class _Piece:
    """A tensor of a block: a view of the block's bytes."""

    owner: Tensor
    offset_bytes: int
    num_bytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def in_memory(self, block_bytes: Tensor) -> Tensor:
        flat = block_bytes[self.offset_bytes : self.offset_bytes + self.num_bytes].view(self.dtype)
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())


@dataclass
class _Waiting:
    """A block whose weights wait in main memory. wanted: their fingerprint."""

    host: Tensor  # uint8
    pieces: list[_Piece]
    wanted: int

    def point_to(self, block_bytes: Tensor) -> None:
        for piece in self.pieces:
            piece.owner.data = piece.in_memory(block_bytes)


def copy_into(place: Tensor, source: Tensor) -> None:
    """One copy of bytes from main memory; from pinned memory it waits for nothing."""
    place.copy_(source, non_blocking=True)


class Offload:
    """Takes over the frozen weights of blocks, which are on the CPU still, or come back from the device by its door.

    Afterwards they may be used in these blocks' own forward passes only (elsewhere they are tensors on the CPU), and
    the blocks have to be recomputed in the backward pass.

    Args:
        blocks: in forward order.
        transfer: whose device and whose verdict.
        pin: the weights wait in pinned memory; without it, copies are not beside the computing.
        copy: copies bytes to a place.

    Attributes:
        host_bytes: of main memory. fetched_bytes: since the start.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        transfer: DeviceTransfer,
        pin: bool,
        copy: Callable[[Tensor, Tensor], None] = copy_into,
    ) -> None:
        self._transfer, self._copy = transfer, copy
        layouts = [_layout(block) for block in blocks]
        places = _main_memory([layout.num_bytes for layout in layouts], pin)
        self._waiting = [_pack(layout, host, transfer) for layout, host in zip(layouts, places, strict=True)]
        taken = {id(piece.owner) for waiting in self._waiting for piece in waiting.pieces}
        for name, (tensor, _) in list(transfer.frozen.items()):
            if id(tensor) in taken:
                del transfer.frozen[name]
        self.host_bytes, self.fetched_bytes = sum(waiting.host.numel() for waiting in self._waiting), 0
        device = transfer.device
        largest = max((waiting.host.numel() for waiting in self._waiting), default=0)
        self._places = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self._holds: list[int | None] = [None] * SLOTS  # which block; it may still be on its way
        wanted = torch.tensor([waiting.wanted for waiting in self._waiting], dtype=torch.int64)
        self._wanted_K = transfer.send_checked(wanted, "fingerprints of offloaded weights")
        self._found_K = torch.zeros_like(self._wanted_K)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arrived: list[torch.cuda.Event | None] = [None] * SLOTS
        self._now: int | None = None  # the block that was entered last
        self._back = False  # that was by the backward pass
        self._trained = [any(p.requires_grad for p in block.parameters()) for block in blocks]
        self._returns = [False] * len(blocks)  # whether the backward pass will come back to a block
        for place in self._places[:1]:
            whole_fingerprint(place)  # makes the table, which has to stay where a graph has captured it
        self._table = position_table(device)
        self._handles = [
            block.register_forward_pre_hook(partial(self._enter, index), with_kwargs=True)
            for index, block in enumerate(blocks)
        ]
        self._handles += [
            block.register_forward_hook(partial(self._left, index), with_kwargs=True)
            for index, block in enumerate(blocks)
        ]

    def close(self) -> None:
        """Blocks are left alone from now on; their weights are on the CPU."""
        for handle in self._handles:
            handle.remove()
        for index in range(len(self._waiting)):
            self._leave(index)

    def _enter(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before a block computes: its weights are there, and the next ones are on their way."""
        back = self._goes_back(index, tree_leaves((args, kwargs)))
        if index not in self._holds:
            self._fetch(index, spare=None)
        place = self._holds.index(index)
        self._check(index, place)
        self._waiting[index].point_to(self._places[place])
        following = index - 1 if back else index + 1
        wanted = following >= 0 and self._returns[following] if back else following < len(self._waiting)
        if wanted and following not in self._holds:
            self._fetch(following, spare=place)

    def _left(self, index: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """After a block's forward pass: fetch its weights again when the gradient of an output arrives.

        The backward pass of the block's last operation may need weights only, so it may come before recomputation.
        A block may return several tensors, in any structure. An input that it returns unchanged is not its own output.
        """
        if not torch.is_grad_enabled() or _goes_back_now():
            return
        given = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad and id(leaf) not in given:
                leaf.register_hook(lambda gradient: self._enter(index, module, (), {}))

    def _goes_back(self, index: int, inputs: Sequence[Any]) -> bool:
        """Whether a block is entered by the backward pass, which computes it again."""
        before, self._now = self._now, index
        was_back, self._back = self._back, _goes_back_now()
        if self._back:
            return True
        if before is None or was_back or index <= before:
            self._forget()  # a new pass owes nothing to the one before: either may be captured, and that one broken off
        self._returns[index] = torch.is_grad_enabled() and (
            self._trained[index] or any(isinstance(each, Tensor) and each.requires_grad for each in inputs)
        )
        return False

    def _forget(self) -> None:
        for held in self._holds:
            if held is not None:
                self._leave(held)
        self._holds = [None] * SLOTS
        self._arrived = [None] * SLOTS

    def _leave(self, index: int) -> None:
        self._waiting[index].point_to(self._waiting[index].host)

    def _fetch(self, index: int, spare: int | None) -> None:
        """Queue the copy of a block's weights into a place other than ``spare``, behind all that is queued now."""
        place = next(number for number in range(SLOTS) if number != spare)
        held = self._holds[place]
        if held is not None:
            self._leave(held)
        waiting = self._waiting[index]
        target = self._places[place][: waiting.host.numel()]
        if self._stream is None:
            self._copy(target, waiting.host)
            self._found_K[index] = whole_fingerprint(target)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._transfer.device))
            with torch.cuda.stream(self._stream):
                self._copy(target, waiting.host)
                self._found_K[index].copy_(whole_fingerprint(target))
                arrived = self._arrived[place] = torch.cuda.Event()
                arrived.record(self._stream)
        self._holds[place] = index
        self.fetched_bytes += waiting.host.numel()

    def _check(self, index: int, place: int) -> None:
        """The device waits for the copy, and compares; once for each arrival."""
        arrived, self._arrived[place] = self._arrived[place], None
        if arrived is not None:
            torch.cuda.current_stream(self._transfer.device).wait_event(arrived)
        elif self._stream is not None:
            return
        bad = self._transfer.bad
        torch.maximum(bad, (self._found_K[index] != self._wanted_K[index]).to(bad.dtype), out=bad)
        if arrived is not None:
            self._found_K[index].zero_()  # so that an answer of the time before is no answer
        self._transfer.checks += 1


def _goes_back_now() -> bool:
    """Whether a backward pass is under way; asked as torch.utils.checkpoint does."""
    return torch._C._current_graph_task_id() >= 0


def frozen_tensors(block: nn.Module) -> list[Tensor]:
    """A block's weights and buffers that are never trained, each once."""
    found = {id(tensor): tensor for tensor in [*block.parameters(), *block.buffers()] if not tensor.requires_grad}
    return list(found.values())


def _of_same_memory(block: nn.Module, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors that helpers of the modules hold (merged projections), which are of the same memory as the weights."""
    memories = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    helpers = [value for module in block.modules() for value in vars(module).values() if hasattr(value, "__dict__")]
    held = [each for helper in helpers if not isinstance(helper, nn.Module | Tensor) for each in vars(helper).values()]
    found = {id(each): each for each in held if isinstance(each, Tensor)}
    return [tensor for tensor in found.values() if tensor.untyped_storage().data_ptr() in memories]


@dataclass
class _Part:
    """The part of a memory that a block's tensors are in, and where it will lie; in bytes."""

    begin: int
    end: int
    place: int = 0


@dataclass
class _Layout:
    """How a block's frozen tensors will lie side by side; those that share memory share it afterwards."""

    tensors: list[Tensor]
    parts: dict[int, _Part]  # by the address of the memory
    num_bytes: int


def _layout(block: nn.Module) -> _Layout:
    tensors = frozen_tensors(block)
    tensors += _of_same_memory(block, tensors)
    parts: dict[int, _Part] = {}
    for tensor in tensors:
        begin, end = _extent(tensor)
        begin = begin // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        part = parts.setdefault(tensor.untyped_storage().data_ptr(), _Part(begin, end))
        part.begin, part.end = min(part.begin, begin), max(part.end, end)
    size = 0
    for part in parts.values():
        part.place = size
        size += -(-(part.end - part.begin) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return _Layout(tensors, parts, size)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """From where to where a tensor lies in its memory, in bytes."""
    last = int(sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True)))
    begin = int(tensor.storage_offset())
    return begin * tensor.element_size(), (begin + last + 1) * tensor.element_size()


def _main_memory(sizes: Sequence[int], pin: bool) -> Iterator[Tensor]:
    """Bytes of these sizes, one piece after the other. Pinned memory comes in powers of two, so pieces share some."""
    arena, used = torch.empty(0, dtype=torch.uint8), 0
    for number, size in enumerate(sizes):
        if used + size > arena.numel():
            wanted = max(size, min(ARENA_BYTES, sum(sizes[number:])))
            arena, used = torch.empty(wanted, dtype=torch.uint8, pin_memory=pin), 0
        yield arena[used : used + size].zero_()  # what lies between tensors is in the fingerprint, too
        used += size


@torch.no_grad()
def _pack(layout: _Layout, host: Tensor, transfer: DeviceTransfer) -> _Waiting:
    """Lay a block's frozen tensors into main memory, and make them views of it."""
    done: set[int] = set()
    pieces = []
    for tensor in layout.tensors:
        part = layout.parts[tensor.untyped_storage().data_ptr()]
        if part.place not in done:
            there = _bytes(tensor.untyped_storage(), tensor.device, transfer, part)
            host[part.place : part.place + len(there)].copy_(there)
            done.add(part.place)
        begin, end = _extent(tensor)
        offset = part.place + begin - part.begin
        pieces.append(_Piece(tensor, offset, end - begin, tensor.dtype, tensor.shape, tensor.stride()))
    waiting = _Waiting(host, pieces, int(whole_fingerprint(host)))
    waiting.point_to(host)
    return waiting


def _bytes(storage: torch.UntypedStorage, device: torch.device, transfer: DeviceTransfer, part: _Part) -> Tensor:
    """The bytes of a part of a memory, on the CPU."""
    whole = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    there: Tensor = whole[part.begin : part.end]
    return there if device.type == "cpu" else transfer.receive({"offloaded weights": there})["offloaded weights"]
