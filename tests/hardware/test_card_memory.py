"""The counters of a card's memory, from a simulated sysfs."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_rocm.hardware.card_memory import CardMemory, Pool, read_card_memory
from lora_rocm.hardware.memory_budget import GIB
from tests.hardware.simulated_sysfs import ADDRESS, SimulatedCard


def test_what_all_programs_hold_is_read_anew_each_time(tmp_path: Path) -> None:
    card = SimulatedCard(tmp_path, total=24 * GIB, used=2 * GIB)
    assert read_card_memory(ADDRESS, tmp_path) == CardMemory(Pool(24 * GIB, 2 * GIB))
    card.hold(5 * GIB)
    found = read_card_memory(ADDRESS, tmp_path)
    assert found is not None and found.vram.free_bytes == 19 * GIB


def test_an_integrated_gpu_takes_tensors_from_its_larger_pool(tmp_path: Path) -> None:
    SimulatedCard(tmp_path, total=GIB // 2, used=GIB // 4, gtt_total=60 * GIB, gtt_used=10 * GIB)
    found = read_card_memory(ADDRESS, tmp_path)
    assert found is not None
    assert found.for_tensors(integrated=True).free_bytes == 50 * GIB
    assert found.for_tensors(integrated=False).free_bytes == GIB // 4
    carved = CardMemory(Pool(96 * GIB, GIB), Pool(16 * GIB, 0))
    assert carved.for_tensors(integrated=True) == carved.vram


def test_a_sleeping_card_is_not_read(tmp_path: Path) -> None:
    card = SimulatedCard(tmp_path, total=24 * GIB, used=0)
    card.put("power/runtime_status", "suspended")
    assert read_card_memory(ADDRESS, tmp_path) is None
    card.put("power/runtime_status", "active")
    assert read_card_memory(ADDRESS, tmp_path) is not None


@pytest.mark.parametrize("text", ["", "many", "-1", "9" * 40, "0x10", "1 2"])
def test_a_damaged_counter_is_unknown(tmp_path: Path, text: str) -> None:
    card = SimulatedCard(tmp_path, total=24 * GIB, used=0)
    card.put("mem_info_vram_used", text)
    assert read_card_memory(ADDRESS, tmp_path) is None


@pytest.mark.parametrize("address", [None, "", "0000:04:00.0", "../0000:03:00.0", "0000:03:00.0/x", "0000:03:00.0\0"])
def test_no_such_card_is_unknown(tmp_path: Path, address: str | None) -> None:
    SimulatedCard(tmp_path, total=24 * GIB, used=0)
    assert read_card_memory(address, tmp_path) is None


def test_more_in_use_than_there_is_leaves_nothing() -> None:
    assert Pool(GIB, 2 * GIB).free_bytes == 0
