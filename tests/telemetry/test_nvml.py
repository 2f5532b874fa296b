"""NVIDIA GPUs, from a library in Python. ``reader_child --show`` runs the real one where there is one."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from lora_rocm.telemetry import nvml
from lora_rocm.telemetry.nvml import NvmlReader
from lora_rocm.telemetry.reader import ABSENT, OWN_MEMORY, POWER, TEMPERATURE, faults
from tests.telemetry.trees import GIB

LOST, NO_PERMISSION = 15, 4
OWN = {0: {4242: 5 * GIB, 7: GIB}, 1: {4243: GIB}, 2: {}}


class FakeNvml:
    """Three H100s, or fewer. ``codes``: function -> what it answers in place of 0."""

    def __init__(self, count: int = 1, codes: dict[str, int] | None = None, reasons: int = 0) -> None:
        self.count, self.codes, self.reasons = count, codes or {}, reasons
        self.unknown = False

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            code = self.codes.get(name, 0)
            if code == 0:
                getattr(self, f"_{name}", lambda *given: None)(*arguments)
            return code

        return call

    def nvmlErrorString(self, code: int) -> bytes:
        return {LOST: b"GPU is lost", NO_PERMISSION: b"Insufficient Permissions"}.get(code, b"Unknown Error")

    def _nvmlDeviceGetCount_v2(self, count: Any) -> None:
        count._obj.value = self.count

    def _nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> None:
        device._obj.value = index + 1

    def _nvmlDeviceGetPciInfo_v3(self, device: Any, info: Any) -> None:
        info._obj.busId = f"0000{device.value:04X}:1B:00.0".encode("ascii")

    def _nvmlDeviceGetTemperature(self, device: Any, sensor: int, value: Any) -> None:
        assert sensor == 0
        value._obj.value = 66

    def _nvmlDeviceGetTemperatureThreshold(self, device: Any, which: int, value: Any) -> None:
        assert which == 1
        value._obj.value = 92

    def _nvmlDeviceGetPowerUsage(self, device: Any, value: Any) -> None:
        value._obj.value = 412345

    def _nvmlDeviceGetEnforcedPowerLimit(self, device: Any, value: Any) -> None:
        value._obj.value = 700000

    def _nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> None:
        memory._obj.total, memory._obj.free, memory._obj.used = 80 * GIB, 60 * GIB, 20 * GIB

    def _nvmlDeviceGetCurrentClocksEventReasons(self, device: Any, value: Any) -> None:
        value._obj.value = self.reasons

    def _nvmlDeviceGetComputeRunningProcesses_v3(self, device: Any, count: Any, infos: Any) -> None:
        found = OWN[device.value - 1]
        for info, (pid, used) in zip(infos, found.items(), strict=False):
            info.pid, info.usedGpuMemory = pid, nvml.UNKNOWN_BYTES if self.unknown else used
        count._obj.value = len(found)


def read(fake: FakeNvml, count: int = 1, pids: tuple[int, ...] = (4242,)) -> Any:
    return NvmlReader(fake, count, lambda: pids).read()


def test_all_that_a_card_offers() -> None:
    (found,) = read(FakeNvml(reasons=0x04 | 0x40 | 0x01))
    assert found.gpu == "0001:1b:00.0" and found.temperatures_c == {"gpu": 66.0} and found.limits_c == {"gpu": 92.0}
    assert (found.power_w, found.power_cap_w) == (412.345, 700.0)
    assert (found.memory_bytes, found.memory_total_bytes, found.own_bytes) == (20 * GIB, 80 * GIB, 5 * GIB)
    assert found.slowed_by == ["heat (hardware)"] and not found.unread, "a power cap and idleness are usual"


def test_of_several_cards_those_with_a_process_of_the_run() -> None:
    assert [each.gpu[:4] for each in read(FakeNvml(3))] == ["0001"]
    assert [each.number for each in read(FakeNvml(3), 2, (4242, 4243))] == [0, 1]
    assert read(FakeNvml(3), 1, (1,)) == [] and len(read(FakeNvml(3), 0, (1,))) == 3
    (alone,) = read(FakeNvml(1), 1, (1,))  # in a container the driver gives other pids
    assert alone.own_bytes is None and alone.unread == {OWN_MEMORY: ABSENT}


def test_what_is_not_offered_is_absent_and_what_fails_is_a_fault() -> None:
    codes = {"nvmlDeviceGetPowerUsage": 3, "nvmlDeviceGetTemperature": NO_PERMISSION}
    (found,) = read(FakeNvml(codes=codes))
    assert found.power_w is None and found.unread[POWER] == ABSENT
    assert dict(faults(found)) == {TEMPERATURE: "Insufficient Permissions"} and found.memory_bytes == 20 * GIB
    fake = FakeNvml()
    fake.unknown = True  # Windows
    assert read(fake)[0].own_bytes == 0 and read(fake)[0].unread == {OWN_MEMORY: ABSENT}


@pytest.mark.parametrize("name", ["nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2"])
def test_a_card_that_is_lost_is_an_error_of_the_system(name: str) -> None:
    with pytest.raises(OSError, match="GPU is lost"):
        read(FakeNvml(codes={name: LOST}))


def test_the_structures_have_the_layout_of_the_header() -> None:
    assert ctypes.sizeof(nvml.NvmlMemory) == 24 and ctypes.sizeof(nvml.ProcessInfo) == 24
    assert ctypes.sizeof(nvml.PciInfo) == 68 and nvml.PciInfo.busId.offset == 36
    assert nvml.ProcessInfo.usedGpuMemory.offset == 8
