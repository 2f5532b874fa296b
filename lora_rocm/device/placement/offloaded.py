"""A placement that keeps blocks' frozen weights in main memory, and fetches each block's weights one block ahead.

Blocks are recomputed in the backward pass (``families.common.recompute``), so each is used twice: forward and backward.
A block's weights are one piece of pinned memory, copied as a whole on a separate stream into one of two slots on the
GPU. A slot is overwritten only after the device has finished all work queued before, including the work that used it.
That is enough: the forward pass of a block is queued before the next block is entered. The same holds for its backward
pass, because autograd runs in reverse order of the forward pass.

After every fetch, the device compares the weights' fingerprint with the one taken on the host. A difference sets
``DeviceTransfer.bad``, which stays set: nothing synchronises, and no update uses the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lora_rocm.device.placement.base import Ask, Resident, frozen_tensors
from lora_rocm.device.placement.embedding_rows import EmbeddingRows, TokenTable
from lora_rocm.device.transfer import DeviceTransfer, position_table, whole_fingerprint, whole_fingerprints
from lora_rocm.planning.step_plan import SLOTS

ARENA_BYTES = 2**30
ALIGNMENT_BYTES = 256
"""Alignment of each tensor in bytes, required by matrix products."""


@dataclass(frozen=True)
class _Piece:
    """The position and layout of one tensor in the memory of its block."""

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
    """A block with weights in main memory. wanted: the fingerprint of these weights."""

    host: Tensor  # uint8
    pieces: list[_Piece]
    wanted: int

    def point_to(self, block_bytes: Tensor) -> None:
        for piece in self.pieces:
            piece.owner.data = piece.in_memory(block_bytes)


def copy_into(place: Tensor, source: Tensor) -> None:
    """Copy bytes from main memory into ``place``. The copy is asynchronous if ``source`` is in pinned memory."""
    place.copy_(source, non_blocking=True)


class Offloaded(Resident):
    """Keeps the weights of some blocks in main memory, and all others on the device. Implements ``Placement``.

    Fusing modules may merge weights into new memory, so the weights move to main memory in two steps: ``place`` does
    not send them, and ``hold`` packs them once the modules are fused.

    Args:
        transfer: transfer to the device.
        blocks: returns the blocks in forward order. ``place`` and ``hold`` both call it, because fusing may replace
            modules and the memory plan may change.
        pin, copy: see ``Offload``.
        table: returns the embedding to keep in main memory, or None to treat it as every other weight.

    Attributes:
        rows: sends the rows of an embedding in main memory, or None if no embedding is there.
        offload: fetches the blocks in main memory, or None if no block is there.
    """

    def __init__(
        self,
        transfer: DeviceTransfer,
        blocks: Callable[[], Sequence[nn.Module]],
        pin: bool,
        copy: Callable[[Tensor, Tensor], None] = copy_into,
        table: Callable[[], TokenTable | None] = lambda: None,
    ) -> None:
        super().__init__(transfer)
        self.offload: Offload | None = None
        self.rows: EmbeddingRows | None = None
        self._table = table
        self._blocks, self._pin, self._copy = blocks, pin, copy

    def place(self, module: nn.Module, component: str) -> None:
        staying, table = frozen_tensors(self._blocks()), self._table()
        staying += [] if table is None else [table.module.weight]
        self.send(module, component, {id(tensor) for tensor in staying})

    def hold(self) -> None:
        """Move the weights of the blocks to main memory. Weights that are on the device are copied back from it."""
        self.close()  # its slots must be free before new ones are allocated on a full device
        if blocks := self._blocks():
            self.offload = Offload(blocks, self, self._pin, self._copy)
        self._hold_rows(self._table())

    def _hold_rows(self, table: TokenTable | None) -> None:
        """Keep the rows of a token embedding in main memory; send an embedding back that is to be there no longer."""
        if table is not None and self.rows is None:
            sent = self._sent.get(table.name)
            self.rows = EmbeddingRows(table, None if sent is None else sent.fingerprint, self.transfer)
            self.give_up({id(table.module.weight)})
        elif table is None and self.rows is not None:
            before = self.rows.table
            self.rows.close()
            self.rows, weight = None, before.module.weight
            weight.data = self.transfer.send_checked(weight.data, before.name)
            self._here[before.name] = weight

    def close(self) -> None:
        """Stop fetching blocks' weights; they stay in main memory."""
        if self.offload is not None:
            self.offload.close()
            self.offload = None

    def fetch(self, block: nn.Module) -> None:
        if self.offload is not None:
            self.offload.fetch(block)

    def release(self, block: nn.Module) -> None:
        if self.offload is not None:
            self.offload.release(block)

    def changed(self, ask: Ask = whole_fingerprints) -> list[str]:
        return super().changed(ask) + ([] if self.rows is None else self.rows.changed())

    def bytes_on_device(self) -> int:
        return super().bytes_on_device() + (0 if self.offload is None else self.offload.slot_bytes)


class Offload:
    """Moves the frozen weights of blocks to main memory and fetches them for use.

    The weights may be on the CPU or on the device. Afterwards only these blocks' own forward passes may use them,
    because elsewhere they are CPU tensors. The blocks must be recomputed in the backward pass.

    Args:
        blocks: the blocks, in forward order.
        rest: placement of all other weights. It stops tracking those that move; its transfer records failed checks.
        pin: keep the weights in pinned memory; otherwise, copies do not overlap with computation.
        copy: copies bytes from main memory into a slot.

    Attributes:
        host_bytes: bytes of main memory used.
        fetched_bytes: bytes fetched since the start.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        rest: Resident,
        pin: bool,
        copy: Callable[[Tensor, Tensor], None] = copy_into,
    ) -> None:
        transfer = rest.transfer
        self._transfer, self._copy = transfer, copy
        self._index = {id(block): index for index, block in enumerate(blocks)}
        # Move the weights to main memory; they are no longer frozen tensors on the device.
        layouts = [_layout(block) for block in blocks]
        places = _main_memory([layout.num_bytes for layout in layouts], pin)
        self._waiting = [_pack(layout, host, transfer) for layout, host in zip(layouts, places, strict=True)]
        rest.give_up({id(piece.owner) for waiting in self._waiting for piece in waiting.pieces})
        self.host_bytes, self.fetched_bytes = sum(waiting.host.numel() for waiting in self._waiting), 0
        # Slots on the device, each large enough for any block.
        device = transfer.device
        largest = max((waiting.host.numel() for waiting in self._waiting), default=0)
        self._places = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self._holds: list[int | None] = [None] * SLOTS  # block per slot; its copy may be in flight
        # Expected and found fingerprints, on the device.
        wanted = torch.tensor([waiting.wanted for waiting in self._waiting], dtype=torch.int64)
        self._wanted_K = transfer.send_checked(wanted, "fingerprints of offloaded weights")
        self._found_K = torch.zeros_like(self._wanted_K)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arrived: list[torch.cuda.Event | None] = [None] * SLOTS
        # State of the current pass.
        self._now: int | None = None  # the block that was entered last
        self._back = False  # whether the backward pass entered it
        self._trained = [any(p.requires_grad for p in block.parameters()) for block in blocks]
        self._returns = [False] * len(blocks)  # whether the backward pass will enter a block
        for place in self._places[:1]:
            whole_fingerprint(place)  # creates the table: captured graphs keep its address
        self._table = position_table(device)
        # Hooks that fetch and check the weights.
        self._handles = [
            block.register_forward_pre_hook(partial(self._enter, index), with_kwargs=True)
            for index, block in enumerate(blocks)
        ]
        self._handles += [
            block.register_forward_hook(partial(self._left, index), with_kwargs=True)
            for index, block in enumerate(blocks)
        ]

    def close(self) -> None:
        """Remove the hooks. The weights are CPU tensors afterwards."""
        for handle in self._handles:
            handle.remove()
        for index in range(len(self._waiting)):
            self._leave(index)

    @property
    def slot_bytes(self) -> int:
        """Device memory for fetched weights, in bytes."""
        return sum(place.nbytes for place in self._places)

    def fetch(self, block: nn.Module) -> None:
        """Make a block's weights available on the device, without prefetching any others.

        Ignores modules that are not offloaded.
        """
        if id(block) in self._index:
            self._ready(self._index[id(block)])

    def release(self, block: nn.Module) -> None:
        """Replace a block's weights by their copies in main memory."""
        if id(block) in self._index:
            self._leave(self._index[id(block)])

    def _enter(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Make a block's weights available before it computes, and prefetch the weights of the block that follows."""
        back = self._goes_back(index, tree_leaves((args, kwargs)))
        place = self._ready(index)
        following = index - 1 if back else index + 1
        wanted = following >= 0 and self._returns[following] if back else following < len(self._waiting)
        if wanted and following not in self._holds:
            self._fetch(following, spare=place)

    def _ready(self, index: int) -> int:
        """Turn a block's weights into views of the slot that contains their copy. Return the slot's index.

        If no slot has a copy, fetch the weights first.
        """
        if index not in self._holds:
            self._fetch(index, spare=None)
        place = self._holds.index(index)
        self._check(index, place)
        self._waiting[index].point_to(self._places[place])
        return place

    def _left(self, index: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Prepare for the backward pass: fetch the block's weights again when the gradient of an output arrives.

        The backward pass of the block's last operation may need only weights, so it may run before recomputation. A
        block may return several tensors, in any structure. An input that it returns unchanged does not count as an
        output.
        """
        if not torch.is_grad_enabled() or _goes_back_now():
            return
        given = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad and id(leaf) not in given:
                leaf.register_hook(lambda gradient: self._enter(index, module, (), {}))

    def _goes_back(self, index: int, inputs: Sequence[Any]) -> bool:
        """Whether a block is entered in the backward pass, to recompute it. Also records the state of the pass."""
        before, self._now = self._now, index
        was_back, self._back = self._back, _goes_back_now()
        if self._back:
            return True
        if before is None or was_back or index <= before:
            self._forget()  # a pass must not depend on the one before, which may be captured or interrupted
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
        """Queue the copy of a block's weights into a slot other than ``spare``, to run after all work queued so far."""
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
            # The device waits, not the host: queued work may still use the weights in this slot
            self._stream.wait_stream(torch.cuda.current_stream(self._transfer.device))
            with torch.cuda.stream(self._stream):
                self._copy(target, waiting.host)
                self._found_K[index].copy_(whole_fingerprint(target))
                arrived = self._arrived[place] = torch.cuda.Event()
                arrived.record(self._stream)
        self._holds[place] = index
        self.fetched_bytes += waiting.host.numel()

    def _check(self, index: int, place: int) -> None:
        """Queue the wait for the copy of a block's weights and the check of their fingerprint, once per fetch."""
        arrived, self._arrived[place] = self._arrived[place], None
        if arrived is not None:
            torch.cuda.current_stream(self._transfer.device).wait_event(arrived)  # on the device: use after the copy
        elif self._stream is not None:
            return
        bad = self._transfer.bad
        torch.maximum(bad, (self._found_K[index] != self._wanted_K[index]).to(bad.dtype), out=bad)
        if arrived is not None:
            self._found_K[index].zero_()  # so that an old fingerprint cannot pass the next check
        self._transfer.checks += 1


def _goes_back_now() -> bool:
    """Whether a backward pass is running, by the same test as in torch.utils.checkpoint."""
    return torch._C._current_graph_task_id() >= 0


def _of_same_memory(block: nn.Module, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of the modules' helper objects (merged projections) that share memory with the weights."""
    memories = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    helpers = [value for module in block.modules() for value in vars(module).values() if hasattr(value, "__dict__")]
    held = [each for helper in helpers if not isinstance(helper, nn.Module | Tensor) for each in vars(helper).values()]
    found = {id(each): each for each in held if isinstance(each, Tensor)}
    return [tensor for tensor in found.values() if tensor.untyped_storage().data_ptr() in memories]


@dataclass
class _Part:
    """The part of a storage that a block's tensors use, and its offset in the block's memory; all in bytes."""

    begin: int
    end: int
    place: int = 0


@dataclass
class _Layout:
    """The layout of a block's frozen tensors in main memory. Tensors that shared memory still share it there."""

    tensors: list[Tensor]
    parts: dict[int, _Part]  # by the storage's address
    num_bytes: int


def _layout(block: nn.Module) -> _Layout:
    tensors = frozen_tensors([block])
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
    """Return the first byte of a tensor in its storage, and the byte after its last."""
    last = int(sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True)))
    begin = int(tensor.storage_offset())
    return begin * tensor.element_size(), (begin + last + 1) * tensor.element_size()


def _main_memory(sizes: Sequence[int], pin: bool) -> Iterator[Tensor]:
    """Yield byte buffers of these sizes.

    They share large allocations, because each pinned allocation is rounded up to a power of two.
    """
    arena, used = torch.empty(0, dtype=torch.uint8), 0
    for number, size in enumerate(sizes):
        if used + size > arena.numel():
            wanted = max(size, min(ARENA_BYTES, sum(sizes[number:])))
            arena, used = torch.empty(wanted, dtype=torch.uint8, pin_memory=pin), 0
        yield arena[used : used + size].zero_()  # the fingerprint includes the gaps between tensors
        used += size


@torch.no_grad()
def _pack(layout: _Layout, host: Tensor, transfer: DeviceTransfer) -> _Waiting:
    """Copy a block's frozen tensors into ``host`` (main memory) and turn them into views of that memory."""
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
    """Return the bytes of a part of a storage as a CPU tensor."""
    whole = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    there: Tensor = whole[part.begin : part.end]
    return there if device.type == "cpu" else transfer.receive({"offloaded weights": there})["offloaded weights"]
