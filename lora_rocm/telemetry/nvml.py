"""Reads NVIDIA GPUs with NVML, a library of the driver. Source: NVIDIA's NVML API reference and nvml.h."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

from lora_rocm.rundir.event_types import TelemetryEvent
from lora_rocm.telemetry import reader

SUCCESS, NOT_SUPPORTED, INSUFFICIENT_SIZE, NO_FUNCTION = 0, 3, 7, 13
GPU_SENSOR, SLOWDOWN_LIMIT = 0, 1  # NVML_TEMPERATURE_GPU, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
UNKNOWN_BYTES = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE, always so under Windows' WDDM
SLOWED_BY = {0x08: "hardware slowdown", 0x20: "heat (driver)", 0x40: "heat (hardware)", 0x80: "power brake"}
"""Names of the bits in NVML's clocks event reasons that indicate a problem. A power cap is not one; it is usual under
load.
"""
MAX_PROCESSES = 1024


class NvmlMemory(ctypes.Structure):
    """The C structure nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class PciInfo(ctypes.Structure):
    """The C structure nvmlPciInfo_t."""

    _fields_ = (
        ("busIdLegacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pciDeviceId", ctypes.c_uint),
        ("pciSubSystemId", ctypes.c_uint),
        ("busId", ctypes.c_char * 32),
    )


class ProcessInfo(ctypes.Structure):
    """The C structure nvmlProcessInfo_t, in the version of the functions that end in _v3."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("usedGpuMemory", ctypes.c_ulonglong),
        ("gpuInstanceId", ctypes.c_uint),
        ("computeInstanceId", ctypes.c_uint),
    )


class NvmlReader:
    """Reads the GPUs that the run's processes use. If the run uses all GPUs, it reads all.

    Args:
        nvml: the library's functions, as loaded by ``ctypes``.
        count: number of GPUs of the run; 0 means all.
        pids: function that returns the run's process ids.

    Raises:
        OSError: the driver does not respond.
    """

    def __init__(self, nvml: Any, count: int, pids: reader.Pids) -> None:
        self._nvml, self._count, self._pids = nvml, count, pids
        self._check(nvml.nvmlInit_v2(), "nvmlInit_v2")

    def read(self) -> list[TelemetryEvent]:
        number = ctypes.c_uint()
        self._check(self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(number)), "nvmlDeviceGetCount_v2")
        pids, found = set(self._pids()), list[TelemetryEvent]()
        for index in range(number.value):
            device = ctypes.c_void_p()
            self._check(
                self._nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)), "nvmlDeviceGetHandleByIndex_v2"
            )
            unread: dict[str, str] = {}
            own = self._own(device, pids, unread)
            if not self._count or self._count >= number.value or own is not None:
                found.append(self._reading(device, len(found), own, unread))
        return found

    def _reading(self, device: ctypes.c_void_p, number: int, own: int | None, unread: dict[str, str]) -> TelemetryEvent:
        nvml, temperature, limit = self._nvml, ctypes.c_uint(), ctypes.c_uint()
        power, cap, memory, pci = ctypes.c_uint(), ctypes.c_uint(), NvmlMemory(), PciInfo()
        reasons = ctypes.c_ulonglong()
        why = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)  # since driver 535
        why = why or nvml.nvmlDeviceGetCurrentClocksThrottleReasons

        def asked(call: Callable[..., int], into: Any, what: str, *arguments: int) -> bool:
            return self._answers(call(device, *arguments, ctypes.byref(into)), what, unread)

        has_temperature = asked(nvml.nvmlDeviceGetTemperature, temperature, reader.TEMPERATURE, GPU_SENSOR)
        limits = "temperature limit"
        has_limit = asked(nvml.nvmlDeviceGetTemperatureThreshold, limit, limits, SLOWDOWN_LIMIT) and limit.value > 0
        has_memory = asked(nvml.nvmlDeviceGetMemoryInfo, memory, reader.MEMORY)
        has_power = asked(nvml.nvmlDeviceGetPowerUsage, power, reader.POWER)
        has_cap = asked(nvml.nvmlDeviceGetEnforcedPowerLimit, cap, reader.POWER_CAP)
        slowed = reasons.value if asked(why, reasons, "reasons for lower clocks") else 0
        known = asked(nvml.nvmlDeviceGetPciInfo_v3, pci, reader.CARD)
        return reader.reading(
            pci.busId.decode("ascii", "replace").lower()[-12:] if known else f"NVIDIA {number}",
            number,
            unread,
            temperatures_c={"gpu": float(temperature.value)} if has_temperature else {},
            limits_c={"gpu": float(limit.value)} if has_temperature and has_limit else {},
            power_w=power.value / 1e3 if has_power else None,
            power_cap_w=cap.value / 1e3 if has_cap else None,
            memory_bytes=float(memory.used) if has_memory else None,
            memory_total_bytes=float(memory.total) if has_memory else None,
            own_bytes=own,
            slowed_by=[name for bit, name in SLOWED_BY.items() if slowed & bit],
        )

    def _own(self, device: ctypes.c_void_p, pids: set[int], unread: dict[str, str]) -> int | None:
        """Return the memory of the run's processes on this GPU, in bytes.

        It is None if NVML lists none of them, as in a container with its own process ids.
        """
        infos, count = (ProcessInfo * MAX_PROCESSES)(), ctypes.c_uint(MAX_PROCESSES)
        code = self._nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), infos)
        if not self._answers(code, reader.OWN_MEMORY, unread):
            return None
        used = [int(info.usedGpuMemory) for info in infos[: count.value] if info.pid in pids]
        if not used or UNKNOWN_BYTES in used:
            unread[reader.OWN_MEMORY] = reader.ABSENT
        return sum(0 if one == UNKNOWN_BYTES else one for one in used) if used else None

    def _answers(self, code: int, what: str, unread: dict[str, str]) -> bool:
        if code != SUCCESS:
            unread[what] = reader.ABSENT if code in (NOT_SUPPORTED, NO_FUNCTION) else self._error(code)
        return code == SUCCESS

    def _check(self, code: int, what: str) -> None:
        if code != SUCCESS:
            raise OSError(f"{what}: {self._error(code)}")

    def _error(self, code: int) -> str:
        said = self._nvml.nvmlErrorString(code)
        return said.decode("utf-8", "replace") if isinstance(said, bytes) else f"NVML error {code}"


def load_nvml() -> Any:
    """Return the NVML library. Its functions return an ``int``, and devices are pointers.

    Raises:
        OSError: the library is not installed.
    """
    library = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    library.nvmlErrorString.restype = ctypes.c_char_p
    return library
