"""The limit of the allocator and the budget of a device, on properties that are made up."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from lora_rocm.device import allocator
from lora_rocm.hardware.memory_budget import GIB

GPU = torch.device("cuda", 0)


@pytest.fixture
def fractions(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A GPU of 16 GiB, 20 according to the driver; the fraction that was set."""
    found: list[float] = []
    properties = SimpleNamespace(total_memory=16 * GIB, is_integrated=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * GIB, 20 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: found.append(share))
    return found


def test_the_share_is_of_what_torch_counts(fractions: list[float]) -> None:
    """Since torch 2.10 of the properties' total, not of the driver's."""
    assert allocator.limit(GPU, 8 * GIB) == 8 * GIB
    assert fractions == [0.5]


def test_no_limit_where_none_is_meant(fractions: list[float]) -> None:
    assert allocator.limit(torch.device("cpu"), GIB) is None
    assert allocator.limit(GPU, None) is None
    assert allocator.limit(GPU, 62 * GIB) is None  # an APU that reports only a part in its properties
    assert fractions == []


def test_the_budget_is_the_smaller_total(fractions: list[float]) -> None:
    assert allocator.device_budget(GPU) == 16 * GIB


def test_an_apu_leaves_the_system_its_part(fractions: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(total_memory=60 * GIB, is_integrated=1)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 * GIB, 62 * GIB))
    free = SimpleNamespace(total=64 * GIB, available=20 * GIB)
    monkeypatch.setattr(allocator.psutil, "virtual_memory", lambda: free)
    assert allocator.device_budget(GPU) == 20 * GIB - int(0.2 * 64 * GIB)


@pytest.mark.parametrize(("held", "in_pieces"), [(100, False), (125, False), (126, True), (400, True)])
def test_memory_is_in_pieces_where_much_of_what_is_held_is_unused(held: int, in_pieces: bool) -> None:
    assert allocator.Usage(100 * GIB, held * GIB).fragmented is in_pieces


def test_the_cpu_keeps_no_pools() -> None:
    assert allocator.usage(torch.device("cpu")) is None
    allocator.empty_pools()


@pytest.mark.gpu
def test_gpu_pools_are_counted_and_emptied() -> None:
    gpu = torch.device("cuda", 0)
    allocator.empty_pools()
    before = allocator.usage(gpu)
    block = torch.empty(2**28, dtype=torch.uint8, device=gpu)
    during = allocator.usage(gpu)
    del block
    kept = allocator.usage(gpu)
    allocator.empty_pools()
    after = allocator.usage(gpu)
    assert before and during and kept and after
    assert during.allocated_bytes - before.allocated_bytes == 2**28
    assert kept.reserved_bytes - kept.allocated_bytes >= 2**28 > after.reserved_bytes - after.allocated_bytes
