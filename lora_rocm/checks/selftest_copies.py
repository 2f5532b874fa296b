"""Self-test of copies between host and device, which must be bit-exact, and of memory, which must keep its contents.

The copied data is random bytes. Each case uses another window of these bytes, so that the previous case's bytes are
wrong for it. The device computes the fingerprint of the received bytes, which shows whether the copy to the device was
at fault. Then the bytes are read back and compared one by one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
from torch import Tensor

from lora_rocm.checks.selftest_base import Check, NotHereError, WrongAnswerError, poison, synchronize
from lora_rocm.device.device_memory import card_bytes
from lora_rocm.device.transfer import whole_fingerprint
from lora_rocm.foundation.files import temporary_folder
from lora_rocm.foundation.units import size_text
from lora_rocm.hardware.selftest_result import MEMORY_TOTAL

KIB, MIB = 2**10, 2**20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int64": torch.int64}
METHODS = ("pageable", "pinned", "pinned-async", "mapped")
WINDOW_BYTES = 4096
LIVE, ROUNDS = 48, 400
"""Number of tensors in memory at the same time, and number of tensors in total."""

TOTAL_SHARE = 0.1
"""If torch's and the driver's total memory differ by more than this share, the difference is reported."""

Send = Callable[[Tensor, torch.device, str], Tensor]
Read = Callable[[Tensor, str], Tensor]


def send(tensor: Tensor, device: torch.device, method: str) -> Tensor:
    """Copy a tensor to the device.

    For the method "mapped" the tensor is a mapped file, and is sent like pageable memory.
    """
    pinned = method.startswith("pinned")
    if pinned and not torch.cuda.is_available():
        raise NotHereError("pinned memory needs a GPU")
    arrived = (tensor.pin_memory() if pinned else tensor).to(device, non_blocking=method == "pinned-async", copy=True)
    synchronize(device)
    return arrived


def read(tensor: Tensor, method: str) -> Tensor:
    """Copy a tensor to the host, into memory that contained other bytes before."""
    received = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=method.startswith("pinned"))
    received.view(torch.uint8).fill_(0xFF)
    received.copy_(tensor, non_blocking=method == "pinned-async")
    synchronize(tensor.device)
    return received


def copy_checks(device: torch.device, send: Send = send, read: Read = read) -> Iterator[Check]:
    """Yield one check for each copy method and size."""
    large = {"64MiB": 64 * MIB, "256MiB": 256 * MIB} if device.type == "cuda" else {}
    sizes = {"4KiB": 4 * KIB, "1MiB": MIB, **large}
    for method in METHODS:
        for name, size in sizes.items():
            yield Check(f"copies.{method}.{name}", partial(_copies, device, method, size, send, read))


def memory_checks(device: torch.device) -> Iterator[Check]:
    """Yield two checks: torch detects all of a card's memory, and tensors keep their values while others are freed.

    Sources: pytorch#184880; ROCm#6603.
    """
    if device.type == "cuda":
        yield Check(MEMORY_TOTAL, partial(_total, device))
    largest = 16 * MIB if device.type == "cuda" else 64 * KIB
    yield Check("memory.reuse", partial(_reuse, device, largest))


def _total(device: torch.device) -> str | None:
    """Compare the total memory that torch reports with the driver's counter. Return a remark if they differ.

    A difference is not an error, because training may still be correct.
    """
    card, seen = card_bytes(device), int(torch.cuda.get_device_properties(device).total_memory)
    if card is None or abs(card - seen) <= TOTAL_SHARE * card:
        return None
    return f"torch finds {size_text(seen)} of memory, but the driver {size_text(card)}"


@cache
def _random_bytes(count: int) -> Tensor:
    words = torch.randint(-(2**63), 2**63 - 1, (count // 8,), generator=torch.Generator().manual_seed(12))
    return words.view(torch.uint8)


def _copies(device: torch.device, method: str, size_bytes: int, send: Send, read: Read) -> None:
    for name, dtype in DTYPES.items():
        what = f"{name} {size_bytes} bytes"
        window, fingerprint = _window(size_bytes, name)
        if method != "mapped":
            _there_and_back(window.view(dtype), fingerprint, device, method, what, send, read)
            continue
        with temporary_folder() as folder:
            path = folder / "bytes"
            # writes: in its own folder among the system's temporary files
            path.write_bytes(window.numpy().tobytes())
            mapped = torch.from_file(str(path), size=size_bytes // dtype.itemsize, dtype=dtype)
            _there_and_back(mapped, fingerprint, device, method, what, send, read)
            del mapped  # Windows cannot remove a mapped file


@cache
def _window(size_bytes: int, dtype: str) -> tuple[Tensor, int]:
    """Return random bytes and their fingerprint. The bytes for different dtypes differ at every position."""
    start = list(DTYPES).index(dtype) * WINDOW_BYTES
    window = _random_bytes(size_bytes + len(DTYPES) * WINDOW_BYTES)[start : start + size_bytes]
    return window, int(whole_fingerprint(window.view(DTYPES[dtype])))


def _there_and_back(
    tensor: Tensor, fingerprint: int, device: torch.device, method: str, what: str, send: Send, read: Read
) -> None:
    poison(device, tensor.numel() * tensor.element_size())
    arrived = send(tensor, device, method)
    if int(whole_fingerprint(arrived)) != fingerprint:
        raise WrongAnswerError(f"copy to the device, {method}, {what}: {_difference(arrived.cpu(), tensor)}")
    returned = read(arrived, method)
    if not torch.equal(returned.view(torch.uint8), tensor.view(torch.uint8)):
        raise WrongAnswerError(f"copy to the host, {method}, {what}: {_difference(returned, tensor)}")


def _difference(found: Tensor, wanted: Tensor) -> str:
    """Return a text with the number of bytes that differ, and how many of them are zero."""
    found_N, wanted_N = found.contiguous().view(torch.uint8), wanted.view(torch.uint8)
    if found_N.shape != wanted_N.shape:
        return f"{found_N.numel()} bytes arrived instead of {wanted_N.numel()}"
    wrong = found_N != wanted_N
    count, zeros = int(wrong.sum()), int((found_N[wrong] == 0).sum())
    if not count:
        return "the fingerprints differ, but the bytes that were read back are equal"
    return f"{count} of {wanted_N.numel()} bytes differ ({zeros} are zero), the first at {int(wrong.nonzero()[0])}"


def _reuse(device: torch.device, largest_bytes: int) -> None:
    chance = random.Random(13)
    live: dict[int, Tensor] = {}
    for number in range(1, ROUNDS + 1):
        if len(live) >= LIVE:
            _intact(live.popitem() if chance.random() < 0.3 else _oldest(live))
        words = chance.choice((128, 1000, 65_536, 1_000_001, largest_bytes // 4))
        words = min(words, largest_bytes // 4) + chance.randrange(64)
        live[number] = torch.full((words,), number, dtype=torch.int32, device=device)
    for item in live.items():
        _intact(item)


def _oldest(live: dict[int, Tensor]) -> tuple[int, Tensor]:
    number = next(iter(live))
    return number, live.pop(number)


def _intact(item: tuple[int, Tensor]) -> None:
    number, tensor = item
    for place, there in (("on the device", tensor), ("read back", tensor.cpu())):
        wrong = int((there != number).sum())
        if wrong:
            zeros = int((there == 0).sum())
            raise WrongAnswerError(
                f"{place}, {wrong} of {tensor.numel()} words of a tensor changed while it was in use ({zeros} are zero)"
            )
