"""Checks of Windows: other copies of HIP, page file, driver resets, Smart App Control, missing runtime.

Secure Boot is not checked, because AMD's signed driver works with it.
"""

from __future__ import annotations

import re
from pathlib import PureWindowsPath

from lora_rocm.doctor.finding import Check, Finding, finding
from lora_rocm.foundation.units import size_text
from lora_rocm.hardware.facts import Library, Windows
from lora_rocm.hardware.memory_budget import GIB
from lora_rocm.rules.environment import EnvPlan
from lora_rocm.rules.rule import Situation, release

DRIVER_PAGE = "https://www.amd.com/en/support/download/drivers.html"
OLDER_BY_MONTHS = 3
"""Months by which a driver must be older than the wheel to be reported. AMD has no table, so this is an estimate."""
COMMIT_SPARE_BYTES = 20 * GIB
"""Memory needed in addition to the GPU's memory, for loading the base model, for the program and for Windows."""
GOOD_TDR_DELAY_S = 60
RESTART = "Then restart Windows."


def _windows(situation: Situation) -> Windows | None:
    return situation.facts.windows if situation.gpu is not None else None


def _hip(situation: Situation) -> tuple[int, ...]:
    torch = situation.facts.torch
    return release(torch.hip) if torch is not None and torch.hip is not None else ()


def _in_system32(library: Library) -> bool:
    return PureWindowsPath(library.path).parent.name.lower() == "system32"


def _stale_dll(situation: Situation, plan: EnvPlan) -> Finding | None:
    """Report a driver with an old copy of HIP.

    The file version of this copy is not HIP's version. Therefore the month of the driver's version is compared with the
    build month in the wheel's HIP version.
    """
    windows, hip, gpu = _windows(situation), _hip(situation), situation.gpu
    if windows is None or gpu is None or not hip or situation.facts.torch is None:
        return None
    name = f"amdhip64_{hip[0]}.dll"
    copy = next((lib for lib in windows.hip_libraries if _in_system32(lib) and _file(lib) == name), None)
    built, driver = _built(hip), release(gpu.driver_product or "")
    if copy is None or built is None or len(driver) < 2:
        return None
    if (built[0] - driver[0]) * 12 + built[1] - driver[1] < OLDER_BY_MONTHS:
        return None
    return finding("stale-dll", situation, copy=copy, version=copy.version or "of unknown version", built=built)


def _file(library: Library) -> str:
    return PureWindowsPath(library.path).name.lower()


def _built(hip: tuple[int, ...]) -> tuple[int, int] | None:
    """Return (year, month) of the build from the last number of HIP's version, or None if it is not a date.

    26221 is day 221 of 2026.
    """
    year, day = divmod(hip[2], 1000) if len(hip) > 2 else (0, 0)
    return (year, 1 + min(day - 1, 364) * 12 // 365) if 25 <= year <= 40 and 1 <= day <= 366 else None


def _shadow(situation: Situation, plan: EnvPlan) -> Finding | None:
    windows, hip = _windows(situation), _hip(situation)
    if windows is None or not hip:
        return None
    name = f"amdhip64_{hip[0]}.dll"
    found = [lib for lib in windows.hip_libraries if not _in_system32(lib) and _file(lib) == name]
    other = [lib for lib in found if lib.version is None or release(lib.version)[:2] != hip[:2]]
    if not other:
        return None
    shown = ", ".join(f"{lib.path} {lib.version or '(version unknown)'}" for lib in other)
    return finding("shadowed-dll", situation, shown=shown, folder=PureWindowsPath(other[0].path).parent)


def _hip_sdk(situation: Situation, plan: EnvPlan) -> Finding | None:
    windows, hip = _windows(situation), _hip(situation)
    if windows is None or windows.hip_path is None or not hip:
        return None
    sdk = re.search(r"(\d+)\.(\d+)", windows.hip_path)
    if sdk is not None and (int(sdk[1]), int(sdk[2])) == hip[:2]:
        return None
    return finding("hip-sdk", situation, version=".".join(map(str, hip[:2])))


def _page_file(situation: Situation, plan: EnvPlan) -> Finding | None:
    windows, gpu, memory = _windows(situation), situation.gpu, situation.facts.memory_bytes
    if windows is None or gpu is None or windows.page_file_bytes is None or memory is None:
        return None
    needed = (gpu.vram_bytes or 0) + COMMIT_SPARE_BYTES
    if memory + windows.page_file_bytes >= needed:
        return None
    size_mb = -(-(needed - memory) // GIB) * 1024
    return finding(
        "page-file",
        situation,
        page_file=size_text(windows.page_file_bytes),
        main_memory=size_text(memory),
        vram=size_text(gpu.vram_bytes or 0),
        size_mb=size_mb,
    )


def _tdr(situation: Situation, plan: EnvPlan) -> Finding | None:
    windows = _windows(situation)
    if windows is None or not windows.tdr_events:
        return None
    delay = windows.tdr_delay_s
    cure: tuple[str, ...] = (
        r"reg add HKLM\SYSTEM\CurrentControlSet\Control\GraphicsDrivers /v TdrDelay /t REG_DWORD "
        f"/d {GOOD_TDR_DELAY_S} /f",
        f"(In a window opened as administrator.) {RESTART}",
    )
    if delay is not None and delay >= GOOD_TDR_DELAY_S:
        cure = (f"Install the newest Adrenalin driver: {DRIVER_PAGE}", "lora-rocm doctor")
    return finding("driver-resets", situation, cure=cure, delay=delay or "is the default, 2")


def _short_tdr(situation: Situation, plan: EnvPlan) -> Finding | None:
    windows = _windows(situation)
    if windows is None or windows.tdr_events or windows.tdr_delay_s is None or windows.tdr_delay_s >= 2:
        return None
    return finding("tdr-delay", situation)


def _smart_app_control(situation: Situation, plan: EnvPlan) -> Finding | None:
    windows = _windows(situation)
    is_on = windows is not None and windows.smart_app_control == "on"
    return finding("smart-app-control", situation) if is_on else None


def _vc_runtime(situation: Situation, plan: EnvPlan) -> Finding | None:
    windows = situation.facts.windows
    unread = any(
        "visual c++" in item.what.lower() or "vcruntime" in item.what.lower() for item in situation.facts.unread
    )
    if windows is None or windows.vc_runtime is not None or unread:
        return None
    return finding("vc-runtime", situation)


def _long_paths(situation: Situation, plan: EnvPlan) -> Finding | None:
    windows = situation.facts.windows
    return finding("long-paths", situation) if windows is not None and windows.long_paths is False else None


WINDOWS_CHECKS: dict[str, Check] = {
    "vc-runtime": _vc_runtime,
    "smart-app-control": _smart_app_control,
    "stale-dll": _stale_dll,
    "shadowed-dll": _shadow,
    "hip-sdk": _hip_sdk,
    "driver-resets": _tdr,
    "tdr-delay": _short_tdr,
    "page-file": _page_file,
    "long-paths": _long_paths,
}
