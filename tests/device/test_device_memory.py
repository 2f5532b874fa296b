"""Free memory of a device: the smaller of the runtime's answer and the driver's counters."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lora_rocm.device import allocator, device_memory
from lora_rocm.device.allocator import LimitFollower, limit_now, room_bytes
from lora_rocm.device.device_memory import card_bytes, free_bytes, read_memory
from lora_rocm.hardware.memory_budget import GIB, MIB, desktop_bytes
from lora_rocm.hardware.pci import address_of
from lora_rocm.hardware.settings import Settings
from tests.device.fake_card import GPU, KEPT_FREE, LIBRARIES, SETTINGS, TOTAL, FakeCard
from tests.hardware.simulated_sysfs import SimulatedCard


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCard:
    return FakeCard(tmp_path).install(monkeypatch)


def test_what_the_desktop_holds_is_not_free(card: FakeCard) -> None:
    card.changed(others=3 * GIB, reserved=2 * GIB, libraries=GIB)
    assert torch.cuda.mem_get_info(GPU)[0] == TOTAL - 3 * GIB, "HIP does not count the desktop"
    assert free_bytes(GPU) == TOTAL - 6 * GIB
    assert read_memory(GPU).computing_bytes == 3 * GIB


def test_the_smaller_answer_counts(card: FakeCard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, TOTAL))
    assert free_bytes(GPU) == GIB


def test_without_counters_the_runtime_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA, and AMD below WSL: there the answer is correct."""
    card = FakeCard(tmp_path, has_counters=False, others=3 * GIB, reserved=GIB).install(monkeypatch)
    assert free_bytes(GPU) == TOTAL - GIB
    assert card_bytes(GPU) is None
    card.has_counters = True
    assert free_bytes(card.sync() and GPU) == TOTAL - 4 * GIB  # the control


@pytest.mark.parametrize(("platform", "hip", "less"), [
    ("win32", "7.14.26221", True), ("win32", None, False), ("linux", "7.2.53211", False),
])  # fmt: skip
def test_hip_on_windows_says_too_much(
    platform: str, hip: str | None, less: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCard(tmp_path, has_counters=False).install(monkeypatch)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert free_bytes(GPU) == TOTAL - (desktop_bytes(TOTAL) if less else 0)


def test_a_measurement_replaces_the_estimate_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCard(tmp_path, others=2 * GIB).install(monkeypatch)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(torch.version, "hip", "7.14.26221")
    assert free_bytes(GPU) == TOTAL - 2 * GIB


def test_an_integrated_gpu_has_what_main_memory_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = FakeCard(tmp_path, integrated=True).install(monkeypatch)
    SimulatedCard(tmp_path, total=GIB // 2, used=GIB // 4, gtt_total=60 * GIB, gtt_used=45 * GIB)
    memory = SimpleNamespace(available=40 * GIB, total=64 * GIB)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(device_memory.psutil, "virtual_memory", lambda: memory)
    assert free_bytes(GPU) == 15 * GIB, "what may be mapped, and not the small carve-out"
    memory.available = 9 * GIB
    assert free_bytes(GPU) == 9 * GIB
    SimulatedCard(tmp_path, total=96 * GIB, used=90 * GIB, gtt_total=16 * GIB)
    assert free_bytes(GPU) == 6 * GIB, "a large carve-out is no part of main memory"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * GIB, 96 * GIB))
    assert free_bytes(GPU) == 2 * GIB, "HIP means the same pool"
    assert card_bytes(GPU) is None and card.fractions == []


@pytest.mark.parametrize(("counted", "limit_gib"), [(True, 40), (False, 50)])
def test_hip_that_means_the_carve_out_alone_does_not_limit_an_integrated_gpu(
    counted: bool, limit_gib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """512 MiB, where the driver may map 60 GiB: a limit by it would stop every run."""
    FakeCard(tmp_path, integrated=True, has_counters=False).install(monkeypatch)
    if counted:
        SimulatedCard(tmp_path, total=GIB // 2, used=GIB // 4, gtt_total=60 * GIB, gtt_used=20 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB // 4, GIB // 2))
    memory = SimpleNamespace(available=45 * GIB, total=64 * GIB)
    monkeypatch.setattr(device_memory.psutil, "virtual_memory", lambda: memory)
    assert limit_now(GPU, Settings(memory_limit_bytes=50 * GIB)) == limit_gib * GIB


def test_the_limit_is_what_others_libraries_and_the_margin_leave(card: FakeCard) -> None:
    """At each moment of a run, regardless of the amount that torch and the libraries hold already."""
    for others in (0, GIB, 3 * GIB + MIB):
        for reserved, libraries in ((0, 0), (0, 300 * MIB), (GIB, GIB), (17 * GIB, LIBRARIES)):
            card.changed(others=others, reserved=reserved, libraries=libraries)
            wanted = TOTAL - others - KEPT_FREE - LIBRARIES
            assert limit_now(GPU, SETTINGS) == room_bytes(GPU, SETTINGS) == wanted
    card.changed(others=0, reserved=GIB, libraries=LIBRARIES + 200 * MIB)
    assert limit_now(GPU, SETTINGS) == TOTAL - KEPT_FREE - LIBRARIES - 200 * MIB, "they took more than was counted"


def test_a_second_process_that_computes_is_counted_too(card: FakeCard, monkeypatch: pytest.MonkeyPatch) -> None:
    card.changed(reserved=GIB, libraries=LIBRARIES)
    alone = limit_now(GPU, SETTINGS)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (TOTAL - card.own - 4 * GIB, TOTAL))
    assert alone is not None and limit_now(GPU, SETTINGS) == alone - 4 * GIB


def test_no_limit_is_below_nothing(card: FakeCard) -> None:
    assert limit_now(GPU, SETTINGS) is not None
    assert limit_now(card.changed(others=TOTAL) and GPU, SETTINGS) == 0
    assert limit_now(GPU, Settings()) is None and limit_now(torch.device("cpu"), SETTINGS) is None


def test_a_card_whose_counters_cannot_be_read_may_show_a_desktop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCard(tmp_path, has_counters=False, libraries=LIBRARIES).install(monkeypatch)
    planned = SETTINGS.memory_limit_bytes
    assert planned is not None and limit_now(GPU, SETTINGS) == planned - desktop_bytes(TOTAL)
    below_wsl = replace(SETTINGS, kept_free_bytes=0)
    assert limit_now(GPU, below_wsl) == planned, "HIP's answer is right there"  # the control


def test_a_deterministic_run_has_the_same_room_beside_an_ordinary_desktop(card: FakeCard) -> None:
    """Else each start would plan another step."""
    steady = {room_bytes(card.changed(others=others) and GPU, SETTINGS, steady=True) for others in (0, GIB // 2, GIB)}
    loose = {room_bytes(card.changed(others=others) and GPU, SETTINGS) for others in (0, GIB // 2, GIB)}
    assert len(steady) == 1 and len(loose) == 3
    assert room_bytes(card.changed(others=5 * GIB) and GPU, SETTINGS, steady=True) < min(steady)


def test_a_desktop_that_grows_shrinks_the_limit_and_gives_it_back(card: FakeCard) -> None:
    said: list[str] = []
    follower = LimitFollower(GPU, SETTINGS, said.append)
    card.changed(libraries=GIB, reserved=10 * GIB, tensors=9 * GIB)
    for others, gib in ((GIB, 21), (6 * GIB, 16), (13 * GIB, 9), (GIB, 21)):
        card.changed(others=others)
        follower.renew()
        assert card.limit == limit_now(GPU, SETTINGS) and card.limit // GIB == gib
    assert said == []
    for _ in range(2):
        card.changed(others=13 * GIB, tensors=10 * GIB)
        follower.renew()
    assert len(said) == 1 and "9.3 GiB" in said[0] and "10.0 GiB" in said[0], "told once"


def test_the_counters_are_read_now_and_then(card: FakeCard, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(allocator.time, "monotonic", lambda: now[0])
    follower = LimitFollower(GPU, SETTINGS)
    for seconds, times in ((0.0, 1), (1.0, 1), (allocator.ASK_EVERY_S, 2), (0.5, 2)):
        now[0] += seconds
        follower.renew_if_due()
        assert len(card.fractions) == times
    follower.renew()
    assert len(card.fractions) == 3


def test_on_the_cpu_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(device: torch.device) -> None:
        raise AssertionError

    monkeypatch.setattr(torch.cuda, "mem_get_info", asked)
    assert LimitFollower(torch.device("cpu"), SETTINGS).renew() is None


@pytest.mark.gpu
def test_on_a_gpu_memory_that_others_take_ends_in_an_error_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real allocator, and counters of the driver that are simulated."""
    gpu = torch.device("cuda", 0)
    torch.zeros((), device=gpu)
    address = address_of(torch.cuda.get_device_properties(gpu))
    assert address is not None
    monkeypatch.setattr(device_memory, "DEVICES", tmp_path)
    free, total = torch.cuda.mem_get_info(gpu)
    sysfs = SimulatedCard(tmp_path, total=total, used=total - free, address=address)
    settings = Settings(memory_limit_bytes=total - 2 * GIB, kept_free_bytes=512 * MIB)
    follower = LimitFollower(gpu, settings)
    try:
        follower.renew()
        first = torch.empty(GIB, dtype=torch.uint8, device=gpu)
        sysfs.hold(total - GIB)  # a game starts
        follower.renew()
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * GIB, dtype=torch.uint8, device=gpu)
        again = torch.empty(256 * MIB, dtype=torch.uint8, device=gpu)  # what is left above the margin
        sysfs.hold(total - free + GIB)  # and ends
        follower.renew()
        more = torch.empty(2 * GIB, dtype=torch.uint8, device=gpu)
        assert len(first) + len(again) + len(more) == 3 * GIB + 256 * MIB
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
        allocator.empty_pools()
