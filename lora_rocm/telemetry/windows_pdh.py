"""Reads GPU memory on Windows from its performance counters (PDH), which need no driver of the vendor.

These counters contain no temperature or power. AMD's own library (ADL) has them, but it is not used. Sources:
learn.microsoft.com, PdhAddEnglishCounterW and PdhGetFormattedCounterArrayW; winsiderss/systeminformer, ExtendedTools
(names and meaning of the counter sets).
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections import defaultdict
from typing import Any

from lora_rocm.rundir.event_types import TelemetryEvent
from lora_rocm.telemetry.reader import ABSENT, MEMORY, OWN_MEMORY, POWER, TEMPERATURE, Pids, reading

COUNTERS = {
    "card": r"\GPU Adapter Memory(*)\Dedicated Usage",
    "own": r"\GPU Process Memory(*)\Dedicated Usage",
    "main": r"\GPU Process Memory(*)\Shared Usage",
}
LARGE = 0x400  # PDH_FMT_LARGE
MORE_DATA, NO_DATA = 0x800007D2, 0x800007D5
INVALID_DATA = 0xC0000BC6  # an instance that ended between two samples; or the first sample
VALID = (0, 1)  # PDH_CSTATUS_VALID_DATA and _NEW_DATA
INSTANCE = re.compile(r"(?:pid_(\d+)_)?luid_(0x[0-9a-f]+_0x[0-9a-f]+)_phys_\d+", re.IGNORECASE)
MAX_TRIES = 5


class CounterItem(ctypes.Structure):
    """The C structure PDH_FMT_COUNTERVALUE_ITEM_W, with the 64-bit member of its union."""

    _fields_ = (("name", ctypes.c_wchar_p), ("status", ctypes.c_uint32), ("value", ctypes.c_int64))


class PdhReader:
    """Reads the GPUs on which the run's processes have memory.

    Args:
        pdh: the library's functions, as loaded by ``ctypes``.
        count: number of GPUs of the run; 0 means all.
        total_bytes: dedicated memory of each GPU, or None if unknown.
        pids: function that returns the run's process ids.

    Raises:
        OSError: this Windows has no such counters.
    """

    def __init__(self, pdh: Any, count: int, total_bytes: int | None, pids: Pids) -> None:
        self._pdh, self._count, self._total_bytes, self._pids = pdh, count, total_bytes, pids
        self._query, self._counters = ctypes.c_void_p(), dict[str, ctypes.c_void_p]()
        _check(pdh.PdhOpenQueryW(None, 0, ctypes.byref(self._query)), "PdhOpenQueryW")
        for name, path in COUNTERS.items():
            counter = ctypes.c_void_p()
            _check(pdh.PdhAddEnglishCounterW(self._query, path, 0, ctypes.byref(counter)), path)
            self._counters[name] = counter
        self._pdh.PdhCollectQueryData(self._query)  # the first sample is empty

    def read(self) -> list[TelemetryEvent]:
        code = self._pdh.PdhCollectQueryData(self._query)
        if code == NO_DATA:  # no process uses a GPU
            return []
        _check(code, "PdhCollectQueryData")
        pids, card, own, main = set(self._pids()), defaultdict[str, int](int), dict[str, int](), dict[str, int]()
        for _, luid, value in self._values("card"):
            card[luid] += value
        for name, sums in (("own", own), ("main", main)):
            for pid, luid, value in self._values(name):
                if pid in pids:
                    sums[luid] = sums.get(luid, 0) + value
        ours = sorted(own.keys() | main.keys(), key=lambda luid: (-own.get(luid, 0) - main.get(luid, 0), luid))
        shown = sorted(ours[: self._count]) if self._count else sorted(card)
        return [self._reading(number, luid, card, own, main) for number, luid in enumerate(shown)]

    def _reading(
        self, number: int, luid: str, card: dict[str, int], own: dict[str, int], main: dict[str, int]
    ) -> TelemetryEvent:
        unread = {TEMPERATURE: ABSENT, POWER: ABSENT}
        unread |= {} if luid in card else {MEMORY: ABSENT}
        unread |= {} if luid in own else {OWN_MEMORY: ABSENT}
        values = {"memory_total_bytes": self._total_bytes, "memory_bytes": card.get(luid)}
        return reading(luid, number, unread, **values, own_bytes=own.get(luid), own_main_bytes=main.get(luid))

    def _values(self, name: str) -> list[tuple[int, str, int]]:
        """Return (pid, adapter, bytes) for each instance of a counter; the pid is 0 in counters of a whole adapter.

        The size is queried first. If the instances no longer fit it, the query is repeated.
        """
        for _ in range(MAX_TRIES):
            size, count = ctypes.c_uint32(0), ctypes.c_uint32(0)
            get, counter = self._pdh.PdhGetFormattedCounterArrayW, self._counters[name]
            code = get(counter, LARGE, ctypes.byref(size), ctypes.byref(count), None)
            if code in (NO_DATA, INVALID_DATA) or (code == 0 and not size.value):
                return []
            if code != MORE_DATA:
                _check(code, COUNTERS[name])
            buffer = ctypes.create_string_buffer(size.value)
            code = get(counter, LARGE, ctypes.byref(size), ctypes.byref(count), buffer)
            if code == 0:
                return _instances((CounterItem * count.value).from_buffer(buffer))
        return []


def _instances(items: Any) -> list[tuple[int, str, int]]:
    found = []
    for item in items:
        match = INSTANCE.match(item.name or "")
        if match and item.status in VALID and item.value >= 0:
            found.append((int(match.group(1) or 0), match.group(2).lower(), int(item.value)))
    return found


def _check(code: int, what: str) -> None:
    if code:
        raise OSError(f"{what}: PDH answers 0x{code & 0xFFFFFFFF:08X}")


def load_pdh() -> Any:
    """Return the PDH library, with the types of its functions set.

    Raises:
        OSError: this system is not Windows.
    """
    if sys.platform != "win32":
        raise OSError("only Windows has performance counters")
    library = ctypes.WinDLL("pdh")
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    for name, arguments in (
        ("PdhOpenQueryW", [ctypes.c_wchar_p, ctypes.c_size_t, ctypes.POINTER(pointer)]),
        ("PdhAddEnglishCounterW", [pointer, ctypes.c_wchar_p, ctypes.c_size_t, ctypes.POINTER(pointer)]),
        ("PdhCollectQueryData", [pointer]),
        (
            "PdhGetFormattedCounterArrayW",
            [pointer, number, ctypes.POINTER(number), ctypes.POINTER(number), ctypes.c_void_p],
        ),
    ):
        call = getattr(library, name)
        call.argtypes, call.restype = arguments, number
    return library
