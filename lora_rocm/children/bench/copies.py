"""Benchmarks copies: between host and GPU (each direction, and both at once), within one GPU, and between GPUs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lora_rocm.checks.timing import Call, MeasuredRow, measure, wall_seconds_of
from lora_rocm.hardware.pci import address_of
from lora_rocm.rundir.event_types import LinkEvent
from lora_rocm.rundir.events import emit

SIZES = tuple(2**power for power in (12, 16, 20, 24, 28))  # 4 KiB to 256 MiB
CPU = torch.device("cpu")
SYSFS = Path("/sys/bus/pci/devices")
GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""Generation of PCIe, keyed by the transfer rate of a lane in GT/s (PCI-SIG base specifications)."""


def run(device: torch.device, start: int) -> None:
    """Measure all copies from row ``start`` on and emit events. Without a GPU, copies in main memory are measured."""
    if device.type == "cuda":
        gpus = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
        emit(LinkEvent(links=_links(gpus)))
        works = gpu_works(gpus)
    else:
        gpus = []
        works = host_works()
    measure(works, start, partial(wall_seconds_of, devices=gpus))


def gpu_works(gpus: list[torch.device]) -> list[MeasuredRow]:
    """Return the rows to measure on a machine with GPUs. Copies from and to the host use only the first GPU."""
    first = gpus[0]
    works = []
    for memory in ("pageable", "pinned"):
        pinned = memory == "pinned"
        for copy, prepare in (("host to device", to_device), ("device to host", to_host)):
            works += [_work(copy, memory, size, partial(prepare, first, pinned), size) for size in SIZES]
    # A copy from pageable memory blocks the host until it is done, so only pinned copies can run in parallel.
    works += [_work("both at once", "pinned", size, partial(both_directions, first), 2 * size) for size in SIZES]
    works += [_work("device to device", "one GPU", size, partial(between, first, first), size) for size in SIZES]
    for other in gpus[1:]:
        name = f"GPU {first.index} to GPU {other.index}"
        works += [_work(name, "other GPU", size, partial(between, first, other), size) for size in SIZES]
    return works


def host_works() -> list[MeasuredRow]:
    """Return the rows to measure on a machine without a GPU."""
    return [_work("host to host", "main memory", size, partial(between, CPU, CPU), size) for size in SIZES]


def to_device(device: torch.device, pinned: bool, size: int) -> Call:
    """Return a function that copies ``size`` bytes from the host to a device."""
    source, target = _host(size, pinned), torch.empty(size, dtype=torch.uint8, device=device)
    return lambda: target.copy_(source, non_blocking=pinned)


def to_host(device: torch.device, pinned: bool, size: int) -> Call:
    """Return a function that copies ``size`` bytes from a device to the host."""
    source, target = torch.ones(size, dtype=torch.uint8, device=device), _host(size, pinned)
    return lambda: target.copy_(source, non_blocking=pinned)


def both_directions(device: torch.device, size: int) -> Call:
    """Return a function that starts copies of ``size`` bytes in both directions at once, on two streams."""
    down, up = to_device(device, True, size), to_host(device, True, size)
    first, second = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def call() -> None:
        with torch.cuda.stream(first):
            down()
        with torch.cuda.stream(second):
            up()

    return call


def between(source_device: torch.device, target_device: torch.device, size: int) -> Call:
    """Return a function that copies ``size`` bytes within a device's memory or from one device to another."""
    source = torch.ones(size, dtype=torch.uint8, device=source_device)
    target = torch.empty(size, dtype=torch.uint8, device=target_device)
    return lambda: target.copy_(source, non_blocking=True)


def _host(size: int, pinned: bool) -> Tensor:
    """Return host memory that has been written. Memory that was never written has no physical pages to copy from."""
    tensor = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    return tensor.fill_(1)


def _work(copy: str, memory: str, size: int, prepare: partial[Call], num_bytes: int) -> MeasuredRow:
    return MeasuredRow({"copy": copy, "memory": memory, "size_bytes": size}, num_bytes, partial(prepare, size))


def _links(gpus: list[torch.device]) -> list[dict[str, object] | None]:
    """Return the PCIe link of each GPU. It is read while copies are running, so that the GPU does not save power."""
    found: list[dict[str, object] | None] = []
    for gpu in gpus:
        copy = to_device(gpu, True, SIZES[-1])
        for _ in range(4):
            copy()
        address = address_of(torch.cuda.get_device_properties(gpu))
        link = link_to(address) if address else None
        # The copies must end before the next GPU is measured
        torch.cuda.synchronize(gpu)
        found.append(asdict(link) if link else None)
    return found


@dataclass(frozen=True)
class Link:
    """The slowest PCIe link between a GPU and the processor.

    gb_per_s: raw rate of one direction in 10^9 bytes per second.
    """

    address: str
    generation: int
    width: int
    gb_per_s: float


def link_to(address: str, devices: Path = SYSFS) -> Link | None:
    """Return the link to the device at a PCI address ("0000:03:00.0"); None if it cannot be read.

    A Radeon contains a switch with a wide inner link. So all links up to the processor are compared, and the
    slowest is returned. The device has to be busy during the call, because an idle link runs at a lower rate.
    """
    try:
        device = (devices / address).resolve(strict=True)
    except OSError:
        return None
    found = [link for folder in (device, *device.parents) if (link := _link(folder, address)) is not None]
    return min(found, key=lambda link: link.gb_per_s, default=None)


def _link(folder: Path, address: str) -> Link | None:
    try:
        speed = (folder / "current_link_speed").read_text(encoding="utf-8")
        width = int((folder / "current_link_width").read_text(encoding="utf-8"))
        rate = float(speed.split()[0])  # "16.0 GT/s PCIe"
    except (OSError, ValueError, IndexError):
        return None
    generation = GENERATIONS.get(rate)
    if generation is None or width < 1:
        return None
    coded = 8 / 10 if generation <= 2 else 128 / 130 if generation <= 5 else 1.0
    return Link(address, generation, width, round(rate * width * coded / 8, 2))
