"""Counters of Windows, from a library in Python: no test runs the real one."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from lora_rocm.telemetry.reader import ABSENT, POWER, TEMPERATURE, faults
from lora_rocm.telemetry.windows_pdh import COUNTERS, INVALID_DATA, MORE_DATA, NO_DATA, CounterItem, PdhReader
from tests.telemetry.trees import GIB

DISCRETE, BUILT_IN = "luid_0x00000000_0x0000D1E5_phys_0", "luid_0x00000000_0x00011A2B_phys_0"
LUID = "0x00000000_0x0000d1e5"
Instances = dict[str, dict[str, int]]


class FakePdh:
    """The functions that the reader calls. Values come with the second sample, as on Windows."""

    def __init__(self, instances: Instances, codes: dict[str, int] | None = None) -> None:
        self.instances, self.codes = instances, codes or {}
        self.paths: list[str] = []
        self.queries = self.samples = 0
        self.status = 0
        self.late: dict[str, int] = {}

    def PdhOpenQueryW(self, source: None, data: int, query: Any) -> int:
        self.queries += 1
        query._obj.value = 1
        return self.codes.get("open", 0)

    def PdhAddEnglishCounterW(self, query: Any, path: str, data: int, counter: Any) -> int:
        self.paths.append(path)
        counter._obj.value = len(self.paths)
        return self.codes.get(path, 0)

    def PdhCollectQueryData(self, query: Any) -> int:
        self.samples += 1
        return self.codes.get("collect", 0)

    def PdhGetFormattedCounterArrayW(self, counter: Any, form: int, size: Any, count: Any, buffer: Any) -> int:
        assert form == 0x400
        if self.samples < 2:
            return INVALID_DATA
        name = next(name for name, path in COUNTERS.items() if path == self.paths[counter.value - 1])
        found = {**self.instances[name], **(self.late if buffer is not None else {})}
        needed = ctypes.sizeof(CounterItem) * len(found) + 64  # the names lie behind the items
        if not found:
            return NO_DATA
        if buffer is None or size._obj.value < needed:
            size._obj.value, self.late = needed, {} if buffer is not None else self.late
            return MORE_DATA
        self.kept = (CounterItem * len(found)).from_buffer(buffer)
        for item, (instance, value) in zip(self.kept, found.items(), strict=True):
            item.name, item.status, item.value = instance, self.status, value
        count._obj.value = len(found)
        self.late = {}
        return 0


def usual() -> Instances:
    return {
        "card": {DISCRETE: 15 * GIB, BUILT_IN: GIB},
        "own": {
            f"pid_4242_{DISCRETE}": 12 * GIB,
            f"pid_4243_{DISCRETE}": GIB,
            f"pid_4242_{BUILT_IN}": 0,
            f"pid_7_{DISCRETE}": 2 * GIB,
        },
        "main": {f"pid_4242_{DISCRETE}": GIB // 4, f"pid_4242_{BUILT_IN}": 4096, f"pid_7_{BUILT_IN}": 9 * GIB},
    }


def reader(pdh: FakePdh, count: int = 1) -> PdhReader:
    return PdhReader(pdh, count, 16 * GIB, lambda: (4242, 4243))


def test_the_card_on_which_the_run_has_its_memory() -> None:
    pdh = FakePdh(usual())
    made = reader(pdh)
    for _ in range(3):
        (found,) = made.read()
    assert pdh.queries == 1 and sorted(pdh.paths) == sorted(COUNTERS.values()), "one query for all readings"
    assert found.gpu == LUID and (found.memory_bytes, found.memory_total_bytes) == (15 * GIB, 16 * GIB)
    assert found.own_bytes == 13 * GIB and found.own_main_bytes == GIB // 4
    assert found.unread == {TEMPERATURE: ABSENT, POWER: ABSENT} and list(faults(found)) == []


def test_before_the_run_uses_a_gpu_there_is_no_reading() -> None:
    assert reader(FakePdh({"card": {DISCRETE: 1}, "own": {}, "main": {}})).read() == []
    assert reader(FakePdh(usual(), {"collect": NO_DATA})).read() == []
    assert len(reader(FakePdh(usual()), count=0).read()) == 2, "all that there are"


def test_instances_that_appear_between_two_calls_are_read_in_another_try() -> None:
    pdh = FakePdh(usual())
    pdh.late = {f"pid_{number}_{DISCRETE}": 1 for number in range(100, 110)}
    assert reader(pdh).read()[0].own_bytes == 13 * GIB


def test_an_instance_without_a_valid_value_does_not_count() -> None:
    pdh = FakePdh(usual())
    pdh.status = 0xC0000BC6
    assert reader(pdh).read() == []


@pytest.mark.parametrize("what", ["open", *COUNTERS.values()])
def test_a_windows_without_these_counters_is_an_error_of_the_system(what: str) -> None:
    with pytest.raises(OSError, match="0xC0000BB8"):
        reader(FakePdh(usual(), {what: 0xC0000BB8}))
    with pytest.raises(OSError, match="0x800007D0"):
        reader(FakePdh(usual(), {"collect": 0x800007D0})).read()


def test_the_items_have_the_layout_of_64_bit_windows() -> None:
    places = {name: getattr(CounterItem, name).offset for name in ("name", "status", "value")}
    assert places == {"name": 0, "status": 8, "value": 16} and ctypes.sizeof(CounterItem) == 24
