"""The facts of a Windows machine: adapters, HIP's own list, DLLs in the way, settings of the system."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lora_rocm.hardware.facts import Gpu, HostFacts, Library, Windows, load_facts
from lora_rocm.hardware.probe import windows_api
from lora_rocm.hardware.probe.detection import probe
from lora_rocm.hardware.probe.sources import Sources
from lora_rocm.hardware.probe.windows_probe import (
    DISPLAY_CLASS,
    FILES_KEY,
    GRAPHICS_KEY,
    POLICY_KEY,
    VC_KEY,
    VERSION_KEY,
    DisplayAdapter,
    Hip,
    gpus_of_adapters,
    hip_info,
)
from tests.golden import HOSTS
from tests.hardware.fake_machine import Registry, Tools, put, windows_machine
from tests.wording import worded


def host(name: str) -> HostFacts:
    return load_facts(HOSTS / f"{name}.json")


def machine(tmp_path: Path, name: str = "windows-rx9070xt") -> tuple[Sources, Tools, dict[str, dict[str, Any]]]:
    sources, tools = windows_machine(tmp_path, host(name))
    assert isinstance(sources.registry, Registry)
    return sources, tools, sources.registry.content


def windows_of(sources: Sources, deep: bool = False) -> Windows:
    windows = probe(deep=deep, sources=sources).windows
    assert windows is not None
    return windows


def test_without_hip_info_the_id_tells_the_architecture(tmp_path: Path) -> None:
    sources, tools, _ = machine(tmp_path)
    (tmp_path / "C/venv/Scripts/hipInfo.exe").unlink()
    gpu = probe(sources=sources).gpus[0]
    assert (gpu.gfx, gpu.gfx_source) == ("gfx1201", "pci")
    assert tools.asked == []


def test_an_unknown_id_leaves_the_name(tmp_path: Path) -> None:
    sources, _, content = machine(tmp_path)
    (tmp_path / "C/venv/Scripts/hipInfo.exe").unlink()
    content[rf"{DISPLAY_CLASS}\0000"]["MatchingDeviceId"] = r"PCI\VEN_1002&DEV_7FFF"
    gpu = probe(sources=sources).gpus[0]
    assert (gpu.gfx, gpu.gfx_source) == ("gfx1201", "name")
    content[rf"{DISPLAY_CLASS}\0000"]["DriverDesc"] = "AMD Radeon(TM) Graphics"
    gpu = probe(sources=sources).gpus[0]
    assert (gpu.gfx, gpu.gfx_source, gpu.integrated) == (None, None, None)


def test_the_id_counts_before_the_name(tmp_path: Path) -> None:
    """Two chips have products called 840M."""
    sources, _, content = machine(tmp_path, "windows-krackan")
    content[rf"{DISPLAY_CLASS}\0000"] |= {"DriverDesc": "AMD Radeon 840M", "MatchingDeviceId": r"PCI\VEN_1002&DEV_1902"}
    gpu = probe(sources=sources).gpus[0]
    assert (gpu.gfx, gpu.gfx_source) == ("gfx1153", "pci")


def test_hip_info_is_asked_anew_after_a_driver_change(tmp_path: Path) -> None:
    sources, tools, content = machine(tmp_path)
    probe(sources=sources)
    probe(sources=sources)
    assert tools.asked == ["hipInfo.exe"]
    content[rf"{DISPLAY_CLASS}\0000"]["DriverVersion"] = "32.0.99999.1"
    probe(sources=sources)
    assert tools.asked == ["hipInfo.exe"] * 2


def test_a_hip_info_that_hangs_leaves_the_id(tmp_path: Path) -> None:
    sources, tools, _ = machine(tmp_path)
    tools.answers["hipInfo.exe"] = TimeoutError("no answer within 15 s")
    facts = probe(sources=sources)
    assert facts.gpus[0].gfx_source == "pci"
    assert facts.unread[0].what == "hipInfo"
    tools.answers["hipInfo.exe"] = "something else"
    sources = replace(sources, app_dir=None)
    assert probe(sources=sources).unread[0].why == worded("hardware/it-writes-another-format")


def test_hips_order_is_kept() -> None:
    adapters = [
        DisplayAdapter("Same", "1002:744c", vram_bytes=1),
        DisplayAdapter("iGPU", "1002:164e", vram_bytes=2),
        DisplayAdapter("Same", "1002:744c", vram_bytes=3),
        DisplayAdapter("NVIDIA", "10de:2684"),
    ]
    hips = [Hip("Same", "gfx1100"), Hip("Same", "gfx1100"), Hip("New card", "gfx1299"), Hip("iGPU", "gfx1036", True)]
    found = gpus_of_adapters(adapters, hips)
    assert [(gpu.name, gpu.vendor, gpu.index, gpu.vram_bytes, gpu.gfx, gpu.integrated) for gpu in found] == [
        ("Same", "amd", 0, 1, "gfx1100", False),
        ("Same", "amd", 1, 3, "gfx1100", False),
        ("New card", "amd", 2, None, "gfx1299", None),
        ("iGPU", "amd", 3, 2, "gfx1036", True),
        ("NVIDIA", "nvidia", 0, None, None, None),
    ]


def test_hip_info_with_features_in_the_name() -> None:
    text = "device#   0\nName:   AMD Instinct MI210\n  gcnArchName:   gfx90a:sramecc+:xnack-\nintegrated: 0\n"
    assert hip_info(text) == [Hip("AMD Instinct MI210", "gfx90a", False)]
    assert hip_info("device# 0\nName: x\ngcnArchName: gfx11001\n") == []
    assert hip_info("") == []


@pytest.mark.parametrize(
    ("size", "expected"),
    [(17163091968, 17163091968), ((1 << 34).to_bytes(8, "little"), 1 << 34), (0, None), ("x", None)],
)
def test_memory_of_an_adapter(size: object, expected: int | None, tmp_path: Path) -> None:
    sources, _, content = machine(tmp_path)
    content[rf"{DISPLAY_CLASS}\0000"]["HardwareInformation.qwMemorySize"] = size
    assert probe(sources=sources).gpus[0].vram_bytes == expected


def test_adrenalin_may_be_known_elsewhere_or_nowhere(tmp_path: Path) -> None:
    sources, _, content = machine(tmp_path)
    del content[rf"{DISPLAY_CLASS}\0000"]["RadeonSoftwareVersion"]
    assert probe(sources=sources).gpus[0].driver_product is None
    content[r"SOFTWARE\AMD\CN"] = {"RadeonSoftwareVersion": "26.9.1"}
    assert probe(sources=sources).gpus[0].driver_product == "26.9.1"
    del content[rf"{DISPLAY_CLASS}\0000"]["DriverVersion"]
    assert probe(sources=sources).gpus[0].driver is None


def test_dlls_in_the_way_are_found_once_and_system32_first(tmp_path: Path) -> None:
    sources, _, _ = machine(tmp_path)
    put(tmp_path, r"D:\old\AMDHIP64.DLL", "")
    put(tmp_path, r"D:\old\amdhip64.txt", "")
    put(tmp_path, r"D:\OLD\amdhip64.dll", "")  # the same file, on a case-insensitive system
    environ = {"PATH": r'D:\old;"D:\OLD";;C:\WINDOWS\system32', "SystemRoot": r"C:\Windows"}
    found = windows_of(replace(sources, environ=environ)).hip_libraries
    assert found == (Library(r"C:\Windows\System32\amdhip64_7.dll", "10.0.3722.0"), Library(r"D:\old\AMDHIP64.DLL"))


def test_windows_10_stays_10(tmp_path: Path) -> None:
    sources, _, content = machine(tmp_path)
    content[VERSION_KEY] = {"CurrentBuildNumber": "19045", "ProductName": "Windows 10 Pro", "DisplayVersion": "22H2"}
    assert windows_of(sources).product == "Windows 10 Pro 22H2"
    content[VERSION_KEY] = {"CurrentBuildNumber": "none"}
    assert (windows_of(sources).build, windows_of(sources).product) == (0, "Windows")


def test_settings_that_are_not_there_are_unknown(tmp_path: Path) -> None:
    sources, _, content = machine(tmp_path)
    for key in (FILES_KEY, POLICY_KEY, GRAPHICS_KEY, VC_KEY):
        del content[key]
    windows = windows_of(sources)
    assert (windows.long_paths, windows.smart_app_control, windows.tdr_delay_s, windows.vc_runtime) == (None,) * 4


def test_settings_that_are_set(tmp_path: Path) -> None:
    sources, _, content = machine(tmp_path)
    content[GRAPHICS_KEY] = {"TdrDelay": 60}
    content[POLICY_KEY] = {"VerifiedAndReputablePolicyState": 1}
    content[VC_KEY] = {"Installed": 0, "Version": "v14.0"}
    windows = windows_of(sources)
    assert (windows.tdr_delay_s, windows.smart_app_control, windows.vc_runtime) == (60, "on", None)


def test_events_are_counted_on_request(tmp_path: Path) -> None:
    sources, tools, _ = machine(tmp_path, "windows-strix-halo")
    assert windows_of(sources).tdr_events is None
    assert windows_of(sources, deep=True).tdr_events == 3
    tools.answers["powershell"] = "Get-WinEvent : Access denied\r\n"
    facts = probe(deep=True, sources=sources)
    assert facts.windows is not None and facts.windows.tdr_events is None
    assert facts.unread[-1].what == worded("hardware/events-of-the-display-driver")


def test_other_vendors_are_seen(tmp_path: Path) -> None:
    sources, _, content = machine(tmp_path)
    values = {
        "DriverDesc": "NVIDIA GeForce RTX 4090",
        "DriverVersion": "32.0.15.8",
        "MatchingDeviceId": r"PCI\VEN_10DE&DEV_2684",
    }
    content[rf"{DISPLAY_CLASS}\0001"] = values
    assert probe(sources=sources).gpus[1] == Gpu(
        "nvidia", "NVIDIA GeForce RTX 4090", pci_id="10de:2684", driver="32.0.15.8"
    )


class FakeKernel:
    """GlobalMemoryStatusEx as documented: fills the structure, returns 0 where it fails."""

    answer = 1

    def GlobalMemoryStatusEx(self, reference: Any) -> int:
        status = reference._obj
        assert status.length == ctypes.sizeof(status) == 64
        status.total, status.available, status.with_page_file = 32 << 30, 20 << 30, 40 << 30
        return self.answer


@pytest.mark.skipif(sys.platform == "win32", reason="plays Windows' part")
def test_windows_own_memory_call(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FakeKernel()
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel), raising=False)
    monkeypatch.setattr(ctypes, "c_ulong", ctypes.c_uint32)  # a long has 32 bits there
    assert windows_api.memory_status() == (32 << 30, 20 << 30, 40 << 30)
    kernel.answer = 0
    with pytest.raises(OSError, match="GlobalMemoryStatusEx"):
        windows_api.memory_status()


class FakeVersion:
    """version.dll with one DLL of version 10.0.3551.7."""

    def __init__(self) -> None:
        fixed = [0xFEEF04BD, 0x10000, 10 << 16, 3551 << 16 | 7]
        self.block = ctypes.create_string_buffer(b"".join(word.to_bytes(4, "little") for word in fixed))
        self.size, self.answer = 16, 1

    def GetFileVersionInfoSizeW(self, path: str, handle: None) -> int:
        return self.size

    def GetFileVersionInfoW(self, path: str, handle: int, size: int, data: Any) -> int:
        return self.answer

    def VerQueryValueW(self, data: Any, name: str, found: Any, length: Any) -> int:
        assert name == "\\"
        found._obj.value = ctypes.addressof(self.block)
        return self.answer


@pytest.mark.skipif(sys.platform == "win32", reason="plays Windows' part")
def test_windows_own_version_call(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeVersion()
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(version=library), raising=False)
    assert windows_api.file_version(Path("amdhip64_7.dll")) == "10.0.3551.7"
    library.answer = 0
    assert windows_api.file_version(Path("amdhip64_7.dll")) is None
    library.size = 0
    assert windows_api.file_version(Path("amdhip64_7.dll")) is None


@pytest.mark.skipif(sys.platform == "win32", reason="plays Windows' part")
def test_windows_own_registry_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    class Key:
        def __enter__(self) -> Key:
            return self

        def __exit__(self, *error: object) -> None:
            pass

    fake = SimpleNamespace(
        HKEY_LOCAL_MACHINE="HKLM",
        OpenKey=lambda hive, key: Key(),
        QueryInfoKey=lambda key: (2, 1, 0),
        EnumValue=lambda key, number: ("BootId", 77, 4),
        EnumKey=lambda key, number: f"000{number}",
    )
    monkeypatch.setitem(sys.modules, "winreg", fake)  # type: ignore[arg-type]
    registry = windows_api.RealRegistry()
    assert registry.values("any") == {"BootId": 77}
    assert registry.keys("any") == ["0000", "0001"]
