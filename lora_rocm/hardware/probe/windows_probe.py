"""Reads a Windows machine from its registry, its DLLs and hipInfo.exe. Standard library only, importable everywhere.

On Windows, HIP ignores HSA_OVERRIDE_GFX_VERSION, so hipInfo's gcnArchName is the true architecture. Sources:
learn.microsoft.com (display class keys, TDR registry keys, GlobalMemoryStatusEx); TheRock
docs/development/windows_support.md (hipInfo in the environment's Scripts).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PureWindowsPath
from typing import Any, Literal

from lora_rocm.hardware.archs import arch_of
from lora_rocm.hardware.facts import NUMBERS, Gpu, HostFacts, Library, Vendor, Windows
from lora_rocm.hardware.pci import gfx_of_id, gfx_of_name
from lora_rocm.hardware.probe.sources import ProbeReads

DISPLAY_CLASS = r"SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}"
ADAPTER_VALUES = (
    "DriverDesc",
    "DriverVersion",
    "MatchingDeviceId",
    "HardwareInformation.qwMemorySize",
    "RadeonSoftwareVersion",
)
ADAPTERS_SCRIPT = (
    "[Console]::OutputEncoding = [Text.Encoding]::UTF8; "
    f"Get-ItemProperty 'HKLM:\\{DISPLAY_CLASS}\\0*' -ErrorAction SilentlyContinue | "
    "Select-Object " + ", ".join(f"'{name}'" for name in ADAPTER_VALUES) + " | ConvertTo-Json"
)
EVENTS_SCRIPT = (
    "@(Get-WinEvent -ErrorAction SilentlyContinue -FilterHashtable "
    "@{LogName='System'; Id=4101; StartTime=(Get-Date).AddDays(-7)}).Count"
)
VERSION_KEY = r"SOFTWARE\Microsoft\Windows NT\CurrentVersion"
VC_KEY = r"SOFTWARE\Microsoft\VisualStudio\14.0\VC\Runtimes\X64"
CPU_KEY = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
GRAPHICS_KEY = r"SYSTEM\CurrentControlSet\Control\GraphicsDrivers"
FILES_KEY = r"SYSTEM\CurrentControlSet\Control\FileSystem"
POLICY_KEY = r"SYSTEM\CurrentControlSet\Control\CI\Policy"
BOOT_KEY = r"SYSTEM\CurrentControlSet\Control\Session Manager\Memory Management\PrefetchParameters"
SMART_APP_CONTROL: dict[Any, Literal["off", "evaluation", "on"]] = {0: "off", 1: "on", 2: "evaluation"}
VENDORS: dict[str, Vendor] = {"1002": "amd", "10de": "nvidia", "8086": "intel"}
WINDOWS_11 = 22000
TOOL_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class DisplayAdapter:
    """A display adapter in the registry."""

    name: str
    pci_id: str
    driver: str | None = None
    product: str | None = None
    vram_bytes: int | None = None


@dataclass(frozen=True)
class Hip:
    """A GPU in the output of hipInfo, which lists GPUs in HIP's order."""

    name: str
    gfx: str
    integrated: bool | None = None


def read(reads: ProbeReads, base: HostFacts, deep: bool) -> HostFacts:
    """Return ``base`` extended by the facts of this Windows machine."""
    reads.boot = str(reads.values(BOOT_KEY).get("BootId", ""))
    adapters = _adapters(reads)
    gpus = gpus_of_adapters(adapters, _hip(reads, adapters))
    total, available, page_file = _memory(reads)
    cpu = str(reads.values(CPU_KEY).get("ProcessorNameString", "")).strip()
    return replace(
        base,
        cpu=cpu,
        memory_bytes=total,
        memory_available_bytes=available,
        swap_bytes=page_file,
        gpus=tuple(gpus),
        windows=_windows(reads, page_file, deep),
    )


def _windows(reads: ProbeReads, page_file_bytes: int | None, deep: bool) -> Windows:
    version = reads.values(VERSION_KEY)
    build = reads.parsed(str(version.get("CurrentBuildNumber", "")), "build number of Windows") or 0
    product = f"{version.get('ProductName', 'Windows')} {version.get('DisplayVersion', '')}".strip()
    if build >= WINDOWS_11:  # the registry of Windows 11 still has 10
        product = product.replace("Windows 10", "Windows 11")
    policy = reads.values(POLICY_KEY).get("VerifiedAndReputablePolicyState")
    delay, long_paths = reads.values(GRAPHICS_KEY).get("TdrDelay"), reads.values(FILES_KEY).get("LongPathsEnabled")
    return Windows(
        build=build,
        product=product,
        hip_libraries=tuple(_hip_libraries(reads)),
        hip_path=reads.sources.environ.get("HIP_PATH"),
        page_file_bytes=page_file_bytes,
        tdr_delay_s=delay if isinstance(delay, int) and delay in NUMBERS else None,
        tdr_events=_tdr_events(reads) if deep else None,
        smart_app_control=SMART_APP_CONTROL.get(policy) if isinstance(policy, int) else None,
        vc_runtime=_vc_runtime(reads),
        long_paths=bool(long_paths) if isinstance(long_paths, int) else None,
    )


def _memory(reads: ProbeReads) -> tuple[int | None, int | None, int | None]:
    try:
        total, available, with_page_file = reads.sources.memory_status()
    except OSError as error:
        reads.note("memory", error)
        return None, None, None
    return total, available, max(with_page_file - total, 0)


def _adapters(reads: ProbeReads) -> list[DisplayAdapter]:
    try:
        names = reads.sources.registry.keys(DISPLAY_CLASS)
    except OSError as error:
        reads.note("display adapters in the registry", error)
        return []
    keys = (rf"{DISPLAY_CLASS}\{name}" for name in sorted(names) if name.isdecimal())
    adapters = [adapter for key in keys if (adapter := _adapter(reads.values(key)))]
    product = reads.values(r"SOFTWARE\AMD\CN").get("RadeonSoftwareVersion")
    known = str(product) if product else None
    return [replace(one, product=one.product or known) if one.pci_id[:4] == "1002" else one for one in adapters]


def _adapter(values: Mapping[str, Any]) -> DisplayAdapter | None:
    r"""Return the display adapter that a registry key's values describe, or None if it is virtual.

    The value MatchingDeviceId contains its PCI id: "PCI\VEN_1002&DEV_744C&...".
    """
    found = re.search(r"VEN_([0-9A-F]{4})&DEV_([0-9A-F]{4})", str(values.get("MatchingDeviceId", "")), re.IGNORECASE)
    if found is None:
        return None
    size = values.get("HardwareInformation.qwMemorySize")
    if isinstance(size, bytes):
        size = int.from_bytes(size, "little")
    driver, product = values.get("DriverVersion"), values.get("RadeonSoftwareVersion")
    return DisplayAdapter(
        name=str(values.get("DriverDesc") or f"GPU {found.group(1)}:{found.group(2)}"),
        pci_id=f"{found.group(1)}:{found.group(2)}".lower(),
        driver=str(driver) if driver else None,
        product=str(product) if product else None,
        vram_bytes=size if isinstance(size, int) and size > 0 and size in NUMBERS else None,
    )


def adapters_from_json(reads: ProbeReads, text: str) -> list[DisplayAdapter]:
    """Return the adapters in the output of ``ADAPTERS_SCRIPT``, which is a JSON object or a list of objects."""
    try:
        found = json.loads(text.lstrip("\ufeff").strip() or "[]")  # json: a tool of the system prints it
    except (ValueError, RecursionError):
        reads.note("powershell", f"its output has an unexpected format: {text.strip()[:40]!r}")
        return []
    rows = found if isinstance(found, list) else [found]
    return [adapter for row in rows if isinstance(row, dict) and (adapter := _adapter(row))]


def _hip(reads: ProbeReads, adapters: Sequence[DisplayAdapter]) -> list[Hip]:
    """Return the GPUs in HIP's order; empty if hipInfo, which comes with AMD's wheels, is missing."""
    amd = [adapter for adapter in adapters if adapter.pci_id[:4] == "1002"]
    tool = Path(reads.sources.python).parent / "hipInfo.exe"
    if not amd or not tool.exists():
        return []
    said = reads.ask("hipInfo", [str(tool)], TOOL_TIMEOUT_S, " ".join(adapter.driver or "" for adapter in amd))
    found = hip_info(said or "")
    if said is not None and not found:
        reads.note("hipInfo", "its output has an unexpected format")
    return found


def hip_info(text: str) -> list[Hip]:
    """Return the GPUs in hipInfo's output."""
    gpus = []
    for block in re.split(r"^device#", text, flags=re.MULTILINE)[1:]:
        values = dict(re.findall(r"^\s*(\w+):[ \t]*(\S.*?)\s*$", block, re.MULTILINE))
        gfx = re.match(r"gfx[0-9a-f]{3,4}(?![0-9a-f])", values.get("gcnArchName", ""))
        integrated = values.get("isIntegrated", values.get("integrated"))
        if gfx:
            gpus.append(Hip(values.get("Name", ""), gfx.group(), integrated == "1" if integrated else None))
    return gpus


def gpus_of_adapters(adapters: Sequence[DisplayAdapter], hips: Sequence[Hip] = ()) -> list[Gpu]:
    """Return the GPUs of the adapters. AMD's are in HIP's order if hipInfo was read, else in the registry's order."""
    left = list(adapters)
    gpus = []
    for hip in hips:
        adapter = next((one for one in left if one.name == hip.name and one.pci_id[:4] == "1002"), None)
        if adapter is not None:
            left.remove(adapter)
        gpu = _gpu(adapter or DisplayAdapter(hip.name or "AMD GPU", ""), "amd")
        arch = arch_of(hip.gfx)
        integrated = hip.integrated if hip.integrated is not None else arch.integrated if arch else None
        gpus.append(replace(gpu, gfx=hip.gfx, gfx_source="hipinfo", integrated=integrated))
    gpus += [_gpu(adapter, VENDORS.get(adapter.pci_id[:4], "other")) for adapter in left]
    numbered: list[Gpu] = []
    for gpu in gpus:
        index = len([before for before in numbered if before.vendor == gpu.vendor])
        numbered.append(replace(gpu, index=index))
    return numbered


def _gpu(adapter: DisplayAdapter, vendor: Vendor) -> Gpu:
    by_id = gfx_of_id(adapter.pci_id) if vendor == "amd" else None
    gfx = by_id or (gfx_of_name(adapter.name) if vendor == "amd" else None)
    arch = arch_of(gfx)
    return Gpu(
        vendor=vendor,
        name=adapter.name,
        gfx=gfx,
        gfx_source=None if gfx is None else "pci" if by_id else "name",
        integrated=arch.integrated if arch else None,
        pci_id=adapter.pci_id or None,
        vram_bytes=adapter.vram_bytes,
        driver=adapter.driver,
        driver_product=adapter.product if vendor == "amd" else None,
    )


def _hip_libraries(reads: ProbeReads) -> list[Library]:
    """Return every amdhip64*.dll that Windows may load in place of the wheel's.

    Files in System32 come first, then files in the folders of PATH.
    """
    system_root = reads.sources.environ.get("SystemRoot") or reads.sources.environ.get("SYSTEMROOT") or r"C:\Windows"
    folders = [rf"{system_root}\System32"]
    folders += [part.strip('"') for part in reads.sources.environ.get("PATH", "").split(";") if part.strip('" ')]
    found: dict[str, Library] = {}
    for folder in folders:
        for name in reads.names(folder):
            path = str(PureWindowsPath(folder) / name)
            if re.fullmatch(r"amdhip64.*\.dll", name, re.IGNORECASE) and path.lower() not in found:
                found[path.lower()] = Library(path, reads.sources.file_version(reads.sources.path(path)))
    return list(found.values())


def _vc_runtime(reads: ProbeReads) -> str | None:
    values = reads.values(VC_KEY)
    if not values.get("Installed"):
        return None
    return str(values.get("Version", "")).lstrip("v") or "unknown"


def _tdr_events(reads: ProbeReads) -> int | None:
    command = ["powershell", "-NoProfile", "-NonInteractive", "-Command", EVENTS_SCRIPT]
    said = reads.run("powershell", command, TOOL_TIMEOUT_S)
    return None if said is None else reads.parsed(said.strip(), "events of the display driver")
