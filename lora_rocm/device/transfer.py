"""Copies data between host and device, and checks it. No other module copies data between them.

A fingerprint is one int64 per sample: the wrap-around sum of the sample's integer words, each times an odd weight that
depends on its position. An odd weight times a changed power of two is never 0 mod 2**64, so one flipped bit is always
detected. The weights are hashes of the position, not linear, so moved tiles and shifted rows are detected too. Bytes
are compared, so NaN, -0 and all-zero tensors need no special case.

ROCm is known for copies that silently give zeros, old or garbled data: TheRock#8379, legacy-rocm-build#6123, ROCm#6603.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_rocm.errors import TransferError, resume_advice

UInt64s = npt.NDArray[np.uint64]
WORD_DTYPES = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
CHUNK_BYTES = 4 * 2**20
CHUNKS_AT_ONCE = 4  # of a weight being compared: 32 MiB of products
GROUP_BYTES = {False: CHUNK_BYTES, True: CHUNKS_AT_ONCE * CHUNK_BYTES}
"""Maximum number of bytes of tensors of one shape that are compared together. It is keyed by whether the tensors are
on a GPU.
"""
HOST_THREADS = 8  # compute fingerprints on the host
READS = 3  # attempts to read a tensor back from the device
METHODS = ("pinned", "unpinned", "clone", "chunked")
"""The copy methods in order of preference. A failed batch is sent again with the next method. Without pinned memory the
first method is "unpinned".
"""

_weights: dict[torch.device, Tensor] = {}


def fingerprint(tensor_B: Tensor) -> Tensor:
    """Return the fingerprint of each sample, computed on the tensor's device.

    Args:
        tensor_B: tensor of any dtype with B samples in the first dimension.

    Returns:
        int64 [B]. Equal bytes give equal fingerprints on every device.
    """
    words_BN = _words(tensor_B)
    weights_N = _position_weights(words_BN.shape[1], words_BN.device)
    if words_BN.device.type != "cpu":
        return (words_BN * weights_N).sum(dim=1)  # int64, as the weights
    # NumPy multiplies and adds in one call: no tensor of products, and threads do not wait for Python's lock
    weights: UInt64s = weights_N.numpy().view(np.uint64)
    sums_B: UInt64s = np.einsum("bn,n->b", words_BN.numpy(), weights, dtype=np.uint64, casting="unsafe")
    return torch.from_numpy(sums_B.view(np.int64))


def whole_fingerprint(tensor: Tensor) -> Tensor:
    """Return the fingerprint of one tensor of any shape as int64 0-d. It is computed in chunks, to limit memory."""
    row_1N = tensor.reshape(1, -1)
    if row_1N.nbytes <= CHUNK_BYTES:
        return fingerprint(row_1N)[0]
    words_N = _words(row_1N)[0]
    chunk = CHUNK_BYTES // words_N.element_size()
    full = words_N.numel() // chunk * chunk
    rows_RN = words_N[:full].view(-1, chunk)
    parts = [fingerprint(some_RN) for some_RN in (rows_RN.split(CHUNKS_AT_ONCE) if words_N.is_cuda else [rows_RN])]
    parts.append(fingerprint(words_N[full:][None]))
    return fingerprint(torch.cat(parts)[None])[0]


def whole_fingerprints(tensors: Sequence[Tensor], salt: int | Tensor) -> Tensor:
    """Return ``whole_fingerprint`` of K tensors, xor-ed with the salt (see ``salted``): int64 [K] on their device.

    Tensors of one shape are computed together, so that a few calls cover up to ``GROUP_BYTES`` of them.
    """
    found = dict[int, Tensor]()
    for group in groups_alike(tensors, GROUP_BYTES[tensors[0].is_cuda]):
        found |= zip(group, _alike_fingerprints([tensors[index] for index in group]).unbind(), strict=True)
    return torch.stack([found[index] for index in range(len(tensors))]) ^ salt


def groups_alike(tensors: Sequence[Tensor], most_bytes: int) -> Iterator[list[int]]:
    """Yield lists of indices into ``tensors``. The tensors of each list have the same shape and dtype.

    A group has at most ``most_bytes``. A tensor of more than ``CHUNK_BYTES`` is always a separate group.
    """
    waiting = dict[tuple[torch.Size, torch.dtype], list[int]]()
    for index, tensor in enumerate(tensors):
        key, size_bytes = (tensor.shape, tensor.dtype), tensor.numel() * tensor.element_size()
        group = waiting.setdefault(key, [])
        group.append(index)
        if size_bytes > CHUNK_BYTES or (len(group) + 1) * size_bytes > most_bytes:
            yield waiting.pop(key)
    yield from waiting.values()


def _alike_fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """Return ``whole_fingerprint`` of each of K tensors of one shape and dtype: int64 [K]."""
    if len(tensors) == 1:
        return whole_fingerprint(tensors[0])[None]
    return fingerprint(torch.stack([tensor.detach() for tensor in tensors]))


def salted(fingerprints_KB: Tensor, salt: int | Tensor) -> Tensor:
    """Return each fingerprint xor-ed with a number that depends on the salt and on the fingerprint's position.

    Args:
        fingerprints_KB: int64 fingerprints of K tensors with B samples each.
        salt: odd number; an int, or an int64 0-d tensor on the same device.
    """
    numbers_N = _position_weights(fingerprints_KB.numel(), fingerprints_KB.device) * salt
    return fingerprints_KB ^ numbers_N.view_as(fingerprints_KB)


def _words(tensor_B: Tensor) -> Tensor:
    """View the bytes of each sample as integer words: as wide as the sample's size allows, at most 4 bytes."""
    flat_BN = tensor_B.detach().contiguous().reshape(tensor_B.shape[0], -1)
    sample_bytes = flat_BN.shape[1] * flat_BN.element_size()
    word_bytes = next(size for size in WORD_DTYPES if sample_bytes % size == 0)
    return flat_BN.view(torch.uint8).view(WORD_DTYPES[word_bytes])


def _position_weights(count: int, device: torch.device) -> Tensor:
    """Return odd int64 weights [count] that hash the position (xor-shift and multiply, as in splitmix64).

    They are cached.
    """
    known = _weights.get(device)
    if known is None or known.numel() < count:
        mixed_N = torch.arange(1, count + 1, dtype=torch.int64, device=device) * -0x61C8864680B583EB
        mixed_N = (mixed_N ^ (mixed_N >> 30)) * -0x40A7B892E31B1A47
        mixed_N = (mixed_N ^ (mixed_N >> 27)) * -0x6B2FB644ECCEEE15
        known = _weights[device] = (mixed_N ^ (mixed_N >> 31)) | 1
    return known[:count]


def position_table(device: torch.device) -> Tensor:
    """Return the device's current table of position weights.

    Owners of a captured graph must keep it, as the graph reads it.
    """
    return _position_weights(1, device)


def copy_to_device(tensor: Tensor, device: torch.device, method: str) -> Tensor:
    """Copy a CPU tensor to the device by one of ``METHODS``."""
    if method == "pinned":
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(device, non_blocking=True)  # the host allocator keeps the buffer until the copy is done
    if method == "unpinned":
        return (tensor.clone() if tensor.is_pinned() else tensor).to(device)
    private = tensor.contiguous().clone()
    if method == "clone":
        arrived = private.to(device)
    else:
        arrived = torch.empty_like(private, device=device)
        rows = max(1, CHUNK_BYTES // max(1, private.element_size()))
        source, target = private.view(-1), arrived.view(-1)
        for start in range(0, source.numel(), rows):
            target[start : start + rows].copy_(source[start : start + rows])
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # some stacks still read the source after a blocking copy has returned
    return arrived


def copy_to_host(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in new main memory, even if the tensor is already on the CPU."""
    return tensor.detach().to("cpu", copy=True)


@dataclass
class Clock:
    """The durations of copy and check in one ``send``. Read them only after the device has finished both."""

    marks: list[torch.cuda.Event | float]

    def seconds(self) -> tuple[float, float]:
        """Return (copy_s, check_s).

        On a GPU they are times between device events, and include gaps between launches.
        """
        a, b, c = self.marks
        if isinstance(a, float):
            return b - a, c - b  # type: ignore[operator]
        return a.elapsed_time(b) / 1e3, b.elapsed_time(c) / 1e3  # type: ignore[arg-type,union-attr]


@dataclass(frozen=True)
class Sending:
    """Tensors of one shape that are being copied to the device.

    Attributes:
        tensors: on the host, by name.
        expected: their fingerprints.
        arrived: the same on the device. They may be read only after ``DeviceTransfer.end_alike``.
        found_K: their fingerprints there, int64 [K].
    """

    tensors: dict[str, Tensor]
    expected: Mapping[str, int]
    arrived: dict[str, Tensor]
    found_K: Tensor


class DeviceTransfer:
    """Sends batches to a device, records whether any arrived changed, and switches copy methods after failures.

    ``first``: the first copy method. "auto" means "pinned", or "unpinned" if ``pin`` is false.

    Attributes:
        bad: float32 0-d on the device; 1 if anything sent since ``clear`` arrived changed, else 0. It is always the
            same tensor, so that a captured graph may read it.
        extra: returns further tensors on the device for a batch, which it is given; None if there are none.
        checks, failures: number of checked tensors and number of failed checks since the start.
    """

    def __init__(
        self,
        device: torch.device,
        pin: bool,
        copy: Callable[[Tensor, torch.device, str], Tensor] = copy_to_device,
        read: Callable[[Tensor], Tensor] = copy_to_host,
        heap_copy: bool = False,
        first: Literal["auto", "unpinned", "clone"] = "auto",
    ) -> None:
        self.device, self._heap_copy = device, heap_copy
        begin = ("pinned" if pin else "unpinned") if first == "auto" else first
        self.methods = METHODS[METHODS.index(begin) :]
        self.bad = torch.zeros((), device=device)
        self.checks = self.failures = 0
        self.extra: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None = None
        self._read = read
        self._copy, self._rung, self._base_rung, self._sends = copy, 0, 0, 0
        self._failures_at_base = 0

    @property
    def method(self) -> str:
        return self.methods[self._rung]

    def send(
        self, tensors: Mapping[str, Tensor], fingerprints: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], Clock]:
        """Copy a micro-batch to the device, and compare its fingerprints there with the expected ones.

        The expected fingerprints are copied the same way, so both could be wrong in the same way. Therefore each
        fingerprint is xor-ed with a number that differs for every send and position, and that reaches the device as a
        kernel argument. Data and fingerprints that are both old, both zero, or both swapped with their neighbours then
        do not match.

        Args:
            tensors: CPU tensors by name, with B samples in the first dimension.
            fingerprints: int64 [B] for each tensor, computed when the sample was cached, not from this tensor.

        Returns:
            The tensors on the device, and the times of copy and check.
        """
        salt = self.next_salt()
        names = list(tensors)
        start = self._mark()
        arrived = {name: self._copy(tensors[name].contiguous(), self.device, self.method) for name in names}
        expected_KB = salted(torch.stack([fingerprints[name] for name in names]), salt)
        expected_KB = self._copy(expected_KB, self.device, self.method)
        copied = self._mark()
        self.compare(arrived.values(), expected_KB, salt)
        self.checks += expected_KB.numel()
        if self.extra is not None:
            arrived |= self.extra(tensors)
        return arrived, Clock([start, copied, self._mark()])

    def copied(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the device by the current method. The caller checks it with ``compare``."""
        return self._copy(tensor.contiguous(), self.device, self.method)

    def compare(self, arrived: Iterable[Tensor], expected_KB: Tensor, salt: int | Tensor) -> None:
        """Set ``bad`` if the tensors do not match. Does not synchronise, so a graph can capture it.

        Args:
            arrived: K tensors on the device, with B samples in the first dimension.
            expected_KB: fingerprints as ``salted`` returns them, on the device.
            salt: the salt of this send. For a graph it is a tensor that is refilled (``fill_``) before each replay.
        """
        found_KB = salted(torch.stack([fingerprint(tensor) for tensor in arrived]), salt)
        torch.maximum(self.bad, (found_KB != expected_KB).any().to(torch.float32), out=self.bad)

    def begin_alike(self, tensors: dict[str, Tensor], expected: Mapping[str, int]) -> Sending:
        """Begin to copy tensors of one shape to the device, and to compute their fingerprints there, without waiting.

        Args:
            tensors: tensors on the host, by name.
            expected: their fingerprints, computed on the host.
        """
        method = self._checked_methods[0]
        arrived = {name: self._copy(tensor, self.device, method) for name, tensor in tensors.items()}
        found_K = _alike_fingerprints(list(arrived.values())) if arrived else torch.empty(0, dtype=torch.int64)
        return Sending(tensors, expected, arrived, found_K)

    def end_alike(self, sending: Sending) -> dict[str, Tensor]:
        """Wait for tensors and their check, and return them on the device. Changed ones are sent again, one by one.

        Raises:
            TransferError: every copy method delivered a tensor with changed bytes.
        """
        arrived, expected = sending.arrived, sending.expected
        self.checks += len(arrived)
        for name, seen in zip(arrived, sending.found_K.tolist(), strict=True):  # one wait for the whole group
            if seen != expected[name]:
                self.failures += 1
                arrived[name] = self._sent(sending.tensors[name], name, expected[name], self._checked_methods[1:])
        return arrived

    def send_checked(self, tensor: Tensor, name: str) -> Tensor:
        """Copy one tensor (a weight or restored state) to the device, and wait for its check.

        If the check fails, the next method is tried at once. With ``heap_copy`` the tensor's memory may be a mapped
        file, so the device reads only a copy of it. One tensor is copied at a time, so that a model is never in memory
        twice.
        """
        return self._sent(tensor, name, int(whole_fingerprint(tensor)), self._checked_methods)

    @property
    def _checked_methods(self) -> tuple[str, ...]:
        """The copy methods for tensors that are checked at once.

        With ``heap_copy`` those that read the tensor's own memory are excluded.
        """
        return tuple(m for m in self.methods[self._base_rung :] if not (self._heap_copy and m == "unpinned"))

    def _sent(self, tensor: Tensor, name: str, wanted: int, methods: Sequence[str]) -> Tensor:
        for method in methods:
            arrived = self._copy(tensor, self.device, method)
            self.checks += 1
            if int(whole_fingerprint(arrived)) == wanted:
                return arrived
            self.failures += 1
        raise self._gave_up(f"{name} {tuple(tensor.shape)} {tensor.dtype}")

    def receive(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors from the device to the host, check each copy against its original, and repeat a bad copy.

        Raises:
            TransferError: no copy of a tensor arrived unchanged.
        """
        names, salt = list(tensors), self.next_salt()
        # The only wait for fingerprints on the device; the copies below wait for themselves
        wanted = dict(zip(names, whole_fingerprints(list(tensors.values()), salt).tolist(), strict=True))
        received: dict[str, Tensor] = {}
        for group in groups_alike(list(tensors.values()), GROUP_BYTES[False]):
            waiting = [names[index] for index in group]
            for _ in range(READS):
                copies = [self._read(tensors[name]) for name in waiting]
                self.checks += len(copies)
                received |= zip(waiting, copies, strict=True)
                found = zip(waiting, _alike_fingerprints(copies).tolist(), strict=True)
                waiting = [name for name, seen in found if seen ^ salt != wanted[name]]
                self.failures += len(waiting)
                if not waiting:
                    break
            else:
                tensor = tensors[waiting[0]]
                raise TransferError(
                    "read-failed",
                    "A tensor that was copied back from the device had changed. Files written before are intact.",
                    where=f"{waiting[0]} {tuple(tensor.shape)} {tensor.dtype}",
                    **resume_advice("Restart the machine and run the same command with --resume latest."),
                )
        return {name: received[name] for name in names}

    def clear(self) -> None:
        """Reset ``bad``, so that the next update starts clean."""
        self.bad.zero_()

    def succeeded(self) -> None:
        self._rung = self._base_rung

    def failed(self, what: str) -> None:
        """Handle a batch that arrived changed: reset ``bad`` and switch to the next method.

        After three failures of the first method, batches no longer start with it.

        Raises:
            TransferError: no method is left.
        """
        self.failures += 1
        self.clear()
        if self._rung == self._base_rung:
            self._failures_at_base += 1
            if self._failures_at_base >= 3 and self._base_rung + 1 < len(self.methods):
                self._base_rung, self._failures_at_base = self._base_rung + 1, 0
        if self._rung + 1 >= len(self.methods):
            raise self._gave_up(what)
        self._rung += 1

    def _gave_up(self, what: str) -> TransferError:
        return TransferError(
            "transfer-failed",
            f"Data arrived changed on the GPU with every method ({', '.join(self.methods)}). "
            "It was not used for training.",
            where=what,
            **resume_advice(
                "Restart the machine and run the same command with --resume latest; if it happens again, "
                "suspect the driver, the kernel or the memory."
            ),
        )

    def next_salt(self) -> int:
        """Return an odd number below 2**63 that was not used as a salt before."""
        self._sends += 1
        return ((2 * self._sends + 1) * 0x9E3779B97F4A7C15) % 2**63

    def _mark(self) -> torch.cuda.Event | float:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
