"""Moves the inputs of recomputed blocks to main memory during the forward pass, and back for the recomputation.

A recomputed block keeps nothing but its input. With long samples and many blocks, these inputs take most of the
memory that activations still need. Here each is copied to pinned memory on a separate stream while the next blocks
compute. At most IN_FLIGHT inputs are on the device at once. In the backward pass each is copied back one block ahead,
into one of SLOTS places that are reused.

An input is freed only after the stream of computation has waited for its copy, and a place is overwritten only after
all work queued before is done. So neither depends on the allocator, and both hold in captured graphs too. The backward
pass of a block is queued before the next block is recomputed, because autograd runs in reverse order of the forward
pass. The last inputs of the forward pass are still on the device when the backward pass begins, and are not copied
back.

The device computes a fingerprint of each input before it leaves and after it has come back. A difference sets
``DeviceTransfer.bad``, which stays set: nothing synchronises, and no update uses the data.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.kernels.backend import Implementation
from lora_rocm.kernels.fingerprint import add_fingerprints, words_of
from lora_rocm.kernels.fingerprint_weights import WORDS_MULTIPLE
from lora_rocm.planning.step_plan import IN_FLIGHT, SLOTS

ALIGNMENT_BYTES = 256
SIZE_MULTIPLE, PLACE_MULTIPLE = 4 * WORDS_MULTIPLE, 16
"""Fingerprints need a size and an address that are multiples of these numbers of bytes."""
MOST_TENSORS = 4
"""Maximum number of tensors of one block that are moved."""
Copy = Callable[[Tensor, Tensor], None]


class _MovedView(NamedTuple):
    """A tensor argument, which is a view of a moved tensor. place: its position in the arguments."""

    place: int
    whole: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Whole(NamedTuple):
    """Layout of a moved tensor, and its offset in the memory of its block in bytes."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset_bytes: int
    num_bytes: int


@dataclass(eq=False)
class _Moved:
    """The moved inputs of a block in one pass. index: of the block."""

    index: int
    wholes: list[_Whole] = field(default_factory=list)
    views: list[_MovedView] = field(default_factory=list)
    num_bytes: int = 0
    live: list[Tensor] | None = None  # the arguments themselves, while they are on the device
    left: torch.cuda.Event | None = None  # after the copy to main memory


def copy_bytes(place: Tensor, source: Tensor) -> None:
    """Copy bytes between main memory and device, asynchronously if the main memory is pinned."""
    place.copy_(source, non_blocking=True)


def movable(args: Sequence[object], before: Sequence[weakref.ref[Tensor]] = ()) -> dict[int, Tensor]:
    """Return a block's arguments, by position, that only its recomputation needs: outputs of other blocks.

    ``before``: tensors that the previous block was given. A tensor that all blocks are given stays anyway.
    """
    known = {id(tensor) for ref in before if (tensor := ref()) is not None}
    found = [
        (place, each)
        for place, each in enumerate(args)
        if isinstance(each, Tensor) and each.grad_fn is not None and id(each) not in known and _is_plain(each)
    ]
    return dict(found[:MOST_TENSORS])


def tensors_in(args: Sequence[object]) -> list[weakref.ref[Tensor]]:
    """Return references to the tensors among a block's arguments, for ``movable`` of the next block."""
    return [weakref.ref(each) for each in args if isinstance(each, Tensor)]


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor fills a part of its memory without gaps, in units that fingerprints cover."""
    last = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin_bytes = int(tensor.storage_offset()) * tensor.element_size()
    return last + 1 == tensor.numel() and not (tensor.nbytes % SIZE_MULTIPLE or begin_bytes % PLACE_MULTIPLE)


class BlockInputs:
    """Keeps the inputs of blocks in main memory between forward pass and recomputation.

    Args:
        blocks: the blocks, in forward order.
        transfer: transfer to the device. It records failed checks.
        pin: keep the inputs in pinned memory; otherwise, copies do not overlap with computation.
        implementation: kernel backend of the fingerprints.
        copy: copies bytes between device and main memory.

    Attributes:
        marker: a tensor on the device.
        moved_bytes: bytes copied to main memory since the start.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        transfer: DeviceTransfer,
        pin: bool,
        implementation: Implementation = "eager",
        copy: Copy = copy_bytes,
    ) -> None:
        self._index = {id(block): index for index, block in enumerate(blocks)}
        self._transfer, self._pin, self._implementation, self._copy = transfer, pin, implementation, copy
        device = transfer.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.marker = torch.zeros((), device=device)
        self.moved_bytes = 0
        # Memory, taken at the first pass. Captured graphs may still use memory that was replaced by
        # larger memory.
        self._hosts: dict[int, Tensor] = {}
        self._places = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self._replaced: list[Tensor] = []
        # Fingerprints of what left, and of what came back, on the device.
        self._sent_NK = torch.zeros(len(blocks), MOST_TENSORS, dtype=torch.int64, device=device)
        self._found_NK = torch.zeros_like(self._sent_NK)
        # State of the current pass.
        self._pass: list[_Moved] = []
        self._before: list[weakref.ref[Tensor]] = []
        self._holds: list[int | None] = [None] * SLOTS  # position in the pass; its copy may be in flight
        self._arrived: list[torch.cuda.Event | None] = [None] * SLOTS
        self._back = False

    @property
    def host_bytes(self) -> int:
        """Main memory used, in bytes."""
        return sum(host.nbytes for host in self._hosts.values())

    @property
    def slot_bytes(self) -> int:
        """Device memory for the inputs that are copied back, in bytes."""
        return sum(place.nbytes for place in self._places)

    def taken(self, block: nn.Module, args: Sequence[object]) -> Callable[[], list[object]] | None:
        """Start moving the inputs of a block, which are among its arguments.

        Returns:
            A function that returns the arguments: at its first call these, and at its second call, in the backward
            pass, those from main memory. None if no argument can be moved.
        """
        index = self._index.get(id(block))
        if index is None:
            return None
        if self._back or (self._pass and index <= self._pass[-1].index):
            self._forget()  # a pass must not depend on the one before, which may be captured or interrupted
        chosen = movable(args, self._before)
        self._before = tensors_in(args)
        if not chosen:
            return None
        moved = self._send(index, chosen)
        rest = [None if place in chosen else each for place, each in enumerate(args)]
        first: list[object] = list(args)

        def given() -> list[object]:
            now = list(first) or self._restored(moved, rest)
            first.clear()
            return now

        return given

    def close(self) -> None:
        """Make the device wait for all copies, so that their memory can be freed."""
        self._forget()

    def _forget(self) -> None:
        """Forget the pass before. If it was interrupted, what follows waits for its copies.

        A captured pass cannot wait for work from before its capture, and need not: capturing waits for the device.
        """
        if self._stream is not None and torch.cuda.is_current_stream_capturing():
            self._arrived = [None] * SLOTS
            for moved in self._pass:
                moved.left = None
        self._free(self._pass)
        for place, arrived in enumerate(self._arrived):
            self._wait(arrived)
            self._holds[place] = self._arrived[place] = None
        self._pass, self._before, self._back = [], [], False

    def _free(self, several: Sequence[_Moved]) -> None:
        """Free inputs that are still on the device. Later work on the device waits for their copies."""
        for moved in several:
            if moved.live is not None:
                self._wait(moved.left)
                moved.live = moved.left = None

    def _wait(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream(self._transfer.device).wait_event(event)

    @contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        """Return a context in which work is queued on the separate stream, to run after all work queued so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._transfer.device))
        with torch.cuda.stream(self._stream):
            yield

    def _event(self) -> torch.cuda.Event | None:
        """Return an event of the separate stream that occurs when its work is done."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def _send(self, index: int, chosen: dict[int, Tensor]) -> _Moved:
        """Queue the copy of a block's inputs to main memory, and free inputs that should be copied by now."""
        moved, wholes = _described(index, chosen)
        self._free(self._pass[: max(0, len(self._pass) - IN_FLIGHT + 1)])
        self._pass.append(moved)
        moved.live = list(chosen.values())
        host = self._host(moved)
        if host is not None:
            with self._on_own_stream():
                for whole, layout in zip(wholes, moved.wholes, strict=True):
                    self._copy(_piece(host, layout), _flat(whole).view(torch.uint8))
                self._add_fingerprints(wholes, self._sent_NK[index])
            moved.left = self._event()
        self.moved_bytes += moved.num_bytes
        return moved

    def _restored(self, moved: _Moved, rest: Sequence[object]) -> list[object]:
        """Return the arguments of a block that is recomputed, and start to copy back the previous block's inputs."""
        self._back = True
        position = self._pass.index(moved)
        self._free(self._pass[position + 1 :])
        place = None
        if moved.live is None:
            place = self._ready(position)
            found = _views(moved, self._places[place])
        else:
            found = moved.live
            self._free([moved])
        waiting = next((at for at in range(position - 1, -1, -1) if self._pass[at].live is None), None)
        if waiting is not None and waiting not in self._holds:
            self._fetch(waiting, spare=place)
        given = list(rest)
        for view, tensor in zip(moved.views, found, strict=True):
            given[view.place] = tensor
        return given

    def _ready(self, position: int) -> int:
        """Wait on the device for the inputs at a position in the pass, check them, and return their slot."""
        if position not in self._holds:
            self._fetch(position, spare=None)
        place = self._holds.index(position)
        self._wait(self._arrived[place])
        self._arrived[place] = None
        moved, bad = self._pass[position], self._transfer.bad
        found_K, sent_K = (each_NK[moved.index, : len(moved.wholes)] for each_NK in (self._found_NK, self._sent_NK))
        torch.maximum(bad, (found_K != sent_K).any().to(bad.dtype), out=bad)
        found_K.sub_(found_K)  # so that an old fingerprint cannot pass the next check
        self._transfer.checks += len(moved.wholes)
        return place

    def _fetch(self, position: int, spare: int | None) -> None:
        """Queue the copy of the inputs at a position in the pass into a slot other than ``spare``."""
        place = next(number for number in range(SLOTS) if number != spare)
        moved = self._pass[position]
        if self._places[place].nbytes < moved.num_bytes:
            self._replaced.append(self._places[place])
            self._places[place] = self._places[place].new_empty(moved.num_bytes)
        host = self._hosts.get(moved.index)
        if host is not None:
            with self._on_own_stream():
                target = self._places[place][: moved.num_bytes]
                self._copy(target, host[: moved.num_bytes])
                pieces = [_piece(target, layout) for layout in moved.wholes]
                self._add_fingerprints(pieces, self._found_NK[moved.index])
            self._arrived[place] = self._event()
        self._holds[place] = position

    def _host(self, moved: _Moved) -> Tensor | None:
        """Return main memory for a block's inputs; None on the meta device, where only device memory is counted."""
        if self._transfer.device.type == "meta":
            return None
        host = self._hosts.get(moved.index)
        if host is None or host.nbytes < moved.num_bytes:
            self._replaced += [] if host is None else [host]
            host = self._hosts[moved.index] = torch.empty(moved.num_bytes, dtype=torch.uint8, pin_memory=self._pin)
        return host

    def _add_fingerprints(self, tensors: Sequence[Tensor], sums_K: Tensor) -> None:
        sums_K.sub_(sums_K)
        words = [words_of(_flat(tensor)) for tensor in tensors]
        add_fingerprints(words, sums_K[: len(words)], self._implementation)


def _described(index: int, chosen: dict[int, Tensor]) -> tuple[_Moved, list[Tensor]]:
    """Return the layout of a block's inputs, and the tensors to move. Views that fill one tensor move as this one."""
    moved, wholes = _Moved(index), dict[int, Tensor]()
    covered = Counter[int]()
    for tensor in chosen.values():
        covered[id(tensor._base)] += tensor.numel()
    for place, tensor in chosen.items():
        whole = tensor._base
        if whole is None or not _is_plain(whole) or covered[id(whole)] != whole.numel():
            whole = tensor
        if id(whole) not in wholes:
            layout = _Whole(whole.dtype, whole.shape, whole.stride(), moved.num_bytes, whole.nbytes)
            moved.num_bytes += -(-whole.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            moved.wholes.append(layout)
            wholes[id(whole)] = whole
        offset = int(tensor.storage_offset() - whole.storage_offset())
        moved.views.append(_MovedView(place, list(wholes).index(id(whole)), tensor.shape, tensor.stride(), offset))
    return moved, [whole.detach() for whole in wholes.values()]


def _flat(tensor: Tensor) -> Tensor:
    """View the memory of a tensor without gaps as one row, in the order of its addresses."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _piece(block_bytes: Tensor, layout: _Whole) -> Tensor:
    return block_bytes[layout.offset_bytes : layout.offset_bytes + layout.num_bytes]


def _views(moved: _Moved, block_bytes: Tensor) -> list[Tensor]:
    """Return the arguments as views of a slot. Arguments that were views of one tensor are so again."""
    memory, wholes = block_bytes.untyped_storage(), []
    for layout in moved.wholes:
        with torch.no_grad():
            whole = torch.empty(0, dtype=layout.dtype, device=block_bytes.device)
            whole.set_(memory, layout.offset_bytes // layout.dtype.itemsize, layout.size, layout.stride)
        wholes.append(whole.requires_grad_())
    found = []
    for view in moved.views:
        whole = wholes[view.whole]
        is_whole = (view.size, view.stride) == (whole.shape, whole.stride())
        offset = int(whole.storage_offset()) + view.offset
        found.append(whole if is_whole else whole.as_strided(view.size, view.stride, offset))
    return found
