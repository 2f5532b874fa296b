"""Machines that are not here: a tree of files, a registry and tools that answer as a recorded machine's would."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_rocm.hardware.facts import Gpu, HostFacts, Linux, Torch
from lora_rocm.hardware.probe.gpu_probe import KFD_NODES, WSL_POWERSHELL
from lora_rocm.hardware.probe.sources import Sources
from lora_rocm.hardware.probe.windows_probe import (
    BOOT_KEY,
    CPU_KEY,
    DISPLAY_CLASS,
    FILES_KEY,
    GRAPHICS_KEY,
    POLICY_KEY,
    SMART_APP_CONTROL,
    VC_KEY,
    VERSION_KEY,
)

REVISION = "c8"
NO_NODE = 1 << 30


def kfd_version(gfx: str) -> int:
    """KFD's number for an architecture, written from the kernel's documentation and not from the code under test."""
    digits = gfx.removeprefix("gfx")
    return int(digits[:-2]) * 10000 + int(digits[-2], 16) * 100 + int(digits[-1], 16)


@dataclass
class Tools:
    """Tools: the simulated answer of each tool, by name, and a record of the tools asked."""

    answers: dict[str, str | OSError] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def run(self, command: Sequence[str], timeout_s: float) -> str:
        name = Path(command[0].replace("\\", "/")).name
        self.asked.append(name)
        answer = self.answers.get(name, FileNotFoundError(2, "No such file or directory"))
        if isinstance(answer, OSError):
            raise answer
        return answer


class Registry:
    """A registry built from dictionaries."""

    def __init__(self, content: dict[str, dict[str, Any]]) -> None:
        self.content = content

    def values(self, key: str) -> dict[str, Any]:
        if key not in self.content:
            raise FileNotFoundError(2, "not there", key)
        return self.content[key]

    def keys(self, key: str) -> list[str]:
        found = {name[len(key) + 1 :].split("\\")[0] for name in self.content if name.startswith(key + "\\")}
        if not found:
            raise FileNotFoundError(2, "not there", key)
        return sorted(found)


def put(root: Path, path: str, text: str) -> Path:
    drive, path = (path[0], path[2:]) if path[1:2] == ":" else ("", path)
    file = root / drive / path.replace("\\", "/").lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def put_torch(folder: Path, torch: Torch | None, libraries: dict[str, str]) -> Path:
    """A site-packages folder with this torch and these packages, as far as file names show them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, version in libraries.items():
        (folder / f"{name.replace('-', '_')}-{version}.dist-info").mkdir()
    if torch is None:
        return folder
    put(folder, f"torch-{torch.version}.dist-info/METADATA", "Name: torch\n")
    put(folder, f"torch-{torch.version}.dist-info/RECORD", "torch/version.py,,\n")
    fields = "".join(f"{name}: Optional[str] = {getattr(torch, name)!r}\n" for name in ("cuda", "hip", "rocm"))
    put(folder, "torch/version.py", f"__version__ = {torch.version!r}\n{fields}")
    if torch.aotriton:
        put_aotriton(folder, torch.aotriton)
    for images, version in torch.aotriton_images.items():
        put(folder, f"torch/lib/aotriton.images/{images}/__signature__", signature(version))
    if torch.arch_source == "files":
        for gfx in torch.arch_list or ():
            put(folder, f"torch/lib/rocblas/library/TensileLibrary_lazy_{gfx}.dat", "")
    return folder


def put_aotriton(folder: Path, version: str) -> None:
    """The attention library: Linux's file name has its version; a version of three numbers is in the header as well."""
    put(folder, f"torch/lib/libaotriton_v2.so.{version}", "")
    if version.count(".") == 2:
        numbers = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
        put(
            folder,
            "torch/include/aotriton/config.h",
            "".join(f"#define AOTRITON_VERSION_{n} {v}u\n" for n, v in numbers),
        )


def signature(version: str) -> str:
    """The signature file that AOTriton writes next to its images, without the hashes of its tuning databases."""
    sha1 = {"AOTRITON_GIT_SHA1": "6e00ef3e335b45dfb49065259533b59c68995bfe", "DB_SHA256": {"primary": {}}}
    return json.dumps({**sha1, "TRITON_VERSION": f"3.7.0+gitdb82b800.aotriton{version}"}, indent=2) + "\n"


def linux_machine(root: Path, facts: HostFacts) -> tuple[Sources, Tools]:
    """A Linux machine with these facts: files below ``root``, and tools."""
    linux = facts.linux
    assert linux is not None
    tools = Tools()
    amd = [gpu for gpu in facts.amd_gpus if gpu.node is not None]
    first = min((gpu.node or 0 for gpu in amd), default=NO_NODE)
    for number in range(first if amd else 0):
        put(root, f"{KFD_NODES}/{number}/properties", "cpu_cores_count 16\nsimd_count 0\nvendor_id 0\n")
    for place, gpu in enumerate(amd):
        put_amd(root, gpu, 128 + place)
    for gpu in facts.gpus:
        put_pci(root, gpu)
    put_kernel(root, facts, linux)
    put_system(root, linux)
    put_tools(root, facts, linux, tools)
    devices = {str(root / file.path.lstrip("/")): file for file in (linux.kfd, *linux.render_nodes) if file}

    def access(path: Path, mode: int) -> bool:
        device = devices.get(str(path))
        if device is not None:
            return device.readable if mode == os.R_OK else device.writable
        return path.exists()

    sources = Sources(
        "linux",
        environ=dict(facts.variables),
        root=root,
        site_packages=(put_torch(root / "site-packages", facts.torch, facts.libraries),),
        app_dir=root / "app",
        run=tools.run,
        access=access,
        disk=lambda path: (linux.shm_bytes or 0, 0) if path.name == "shm" else (0, facts.disk_free_bytes or 0),
        cpu_count=facts.cpu_count,
    )
    return sources, tools


def put_amd(root: Path, gpu: Gpu, minor: int) -> None:
    """A GPU in KFD's topology, and its DRM device."""
    node = f"{KFD_NODES}/{gpu.node}"
    device = int((gpu.pci_id or "1002:0")[5:], 16)
    domain, bus, slot = (gpu.pci_address or "0000:00:00.0").split(":")
    location = int(bus, 16) << 8 | int(slot[:2], 16) << 3 | int(slot[3:])
    version = kfd_version(gpu.gfx) if gpu.gfx else 0
    lines = {
        "cpu_cores_count": 0,
        "simd_count": 96,
        "gfx_target_version": version,
        "vendor_id": 4098,
        "device_id": device,
        "location_id": location,
        "domain": int(domain, 16),
        "drm_render_minor": minor,
    }
    put(root, f"{node}/properties", "".join(f"{name} {value}\n" for name, value in lines.items()))
    flags = {True: 1, False: 1 | 4 | 8}.get(gpu.pcie_atomics) if gpu.pcie_atomics is not None else None  # type: ignore[arg-type]
    if flags is not None:
        put(root, f"{node}/io_links/0/properties", f"type 2\nnode_from {gpu.node}\nnode_to 0\nflags {flags}\n")
    drm = f"/sys/class/drm/renderD{minor}/device"
    put(root, f"{drm}/revision", f"0x{REVISION}\n")
    put_memory(root, drm, gpu)
    if not gpu.name.startswith("AMD GPU "):
        ids = root / "usr/share/libdrm/amdgpu.ids"
        before = ids.read_text(encoding="utf-8") if ids.exists() else "# ids\n1.0.0\n"
        put(root, "/usr/share/libdrm/amdgpu.ids", f"{before}{device:04X},\t{REVISION.upper()},\t{gpu.name}\n")
    if gpu.mes_firmware:
        put(root, f"/sys/kernel/debug/dri/{minor}/name", f"amdgpu dev={gpu.pci_address} unique={gpu.pci_address}\n")
        version_line = f"MES feature version: 1, firmware version: {int(gpu.mes_firmware, 16):#010x}\n"
        info = f"MES_KIQ feature version: 6, firmware version: 0x0000006c\n{version_line}"
        put(root, f"/sys/kernel/debug/dri/{minor}/amdgpu_firmware_info", info)


def put_memory(root: Path, folder: str, gpu: Gpu) -> None:
    for name, value in (("vram", gpu.vram_bytes), ("gtt", gpu.gtt_bytes)):
        if value is not None:
            put(root, f"{folder}/mem_info_{name}_total", f"{value}\n")
    if gpu.vram_used_bytes is not None:
        put(root, f"{folder}/mem_info_vram_used", f"{gpu.vram_used_bytes}\n")


def put_pci(root: Path, gpu: Gpu) -> None:
    if gpu.pci_address is None or gpu.pci_id is None:
        return
    folder = f"/sys/bus/pci/devices/{gpu.pci_address}"
    vendor, device = gpu.pci_id.split(":")
    put(root, f"{folder}/class", "0x120000\n" if "MI300" in gpu.name else "0x030000\n")
    put(root, f"{folder}/vendor", f"0x{vendor}\n")
    put(root, f"{folder}/device", f"0x{device}\n")


def put_kernel(root: Path, facts: HostFacts, linux: Linux) -> None:
    put(root, "/proc/sys/kernel/random/boot_id", "6f1c-boot\n")
    put(root, "/proc/sys/kernel/osrelease", f"{linux.kernel}\n")
    put(root, "/proc/cpuinfo", f"processor\t: 0\nmodel name\t: {facts.cpu}\n")
    memory = {
        "MemTotal": facts.memory_bytes,
        "MemAvailable": facts.memory_available_bytes,
        "SwapTotal": facts.swap_bytes,
    }
    put(root, "/proc/meminfo", "".join(f"{name}:  {(value or 0) // 1024} kB\n" for name, value in memory.items()))
    words = [f"{name}={value}" for name, value in linux.boot_parameters.items()]
    put(root, "/proc/cmdline", f"BOOT_IMAGE=/vmlinuz root=UUID=0000 {' '.join(words)} quiet\n")
    user = 0 if "root" in linux.groups else 1000
    ids = {"render": "105", "video": "44"}
    mine = " ".join(ids[name] for name in linux.groups if name in ids)
    put(root, "/proc/self/status", f"Name:\tpython\nUid:\t{user}\t{user}\t{user}\t{user}\nGroups:\t{mine} 1000\n")
    put(root, "/etc/group", "root:x:0:\nvideo:x:44:user\nrender:x:105:\nuser:x:1000:\n")
    if linux.amdgpu_loaded:
        (root / "sys/module/amdgpu").mkdir(parents=True)
    if linux.amdgpu_version:
        put(root, "/sys/module/amdgpu/version", f"{linux.amdgpu_version}\n")
    if linux.ttm_pages_limit is not None:
        put(root, f"/sys/module/{linux.ttm_module}/parameters/pages_limit", f"{linux.ttm_pages_limit}\n")


def put_system(root: Path, linux: Linux) -> None:
    release = f'NAME="A name"\nID={linux.distribution}\n'
    release += f'VERSION_ID="{linux.distribution_version}"\n' if linux.distribution_version else ""
    put(root, "/etc/os-release", release)
    (root / "dev/shm").mkdir(parents=True)
    for device in (linux.kfd, *linux.render_nodes):
        if device is not None and device.exists:
            put(root, device.path, "")
    if linux.container:
        put(root, "/.dockerenv", "")
    if linux.dxg:
        put(root, "/dev/dxg", "")
    if linux.rocm_version:
        put(root, "/opt/rocm/.info/version", f"{linux.rocm_version}-63\n")
    version = linux.firmware_package
    if version and linux.distribution in ("ubuntu", "debian"):
        name = "linux-firmware" if linux.distribution == "ubuntu" else "firmware-amd-graphics"
        stanza = f"Package: {name}\nStatus: install ok installed\nVersion: {version}\n"
        put(root, "/var/lib/dpkg/status", f"Package: apt\nStatus: install ok installed\nVersion: 3\n\n{stanza}\n")
    elif version and linux.distribution == "arch":
        put(root, f"/var/lib/pacman/local/linux-firmware-whence-{version}/desc", "")
        put(root, f"/var/lib/pacman/local/linux-firmware-{version}/desc", "")
    elif version:
        (root / "usr/lib/sysimage/rpm").mkdir(parents=True)


def put_tools(root: Path, facts: HostFacts, linux: Linux, tools: Tools) -> None:
    if linux.distribution == "fedora" and linux.firmware_package:
        tools.answers["rpm"] = f"{linux.firmware_package}\n{linux.firmware_package}\n"
    if linux.kernel_log is not None:
        drm = f"[drm] Initialized amdgpu {linux.drm_version}.0 for 0000:03:00.0 on minor 1"
        lines = ["Linux version 6", "usb 1-1: new device", *([drm] if linux.drm_version else []), *linux.kernel_log]
        tools.answers["journalctl"] = "\n".join(lines) + "\n"
    nvidia = [gpu for gpu in facts.gpus if gpu.vendor == "nvidia"]
    if nvidia:
        put(root, "/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.105.08  Sun\n")
        tools.answers["nvidia-smi"] = "".join(
            f"{gpu.index}, {gpu.name}, {(gpu.vram_bytes or 0) >> 20}, {gpu.driver}, 0000{gpu.pci_address}, "
            f"0x{(gpu.pci_id or '')[5:].upper()}10DE\n"
            for gpu in nvidia
        )
    if linux.wsl:
        put(root, WSL_POWERSHELL, "")
        rows = [adapter_values(gpu) for gpu in facts.gpus]
        tools.answers["powershell.exe"] = "\ufeff" + json.dumps(rows if len(rows) > 1 else rows[0])
    if facts.torch is not None and facts.torch.arch_source == "asked":
        tools.answers[Path(Sources("linux").python).name] = f"archs: {' '.join(facts.torch.arch_list or ())}\n"


def adapter_values(gpu: Gpu) -> dict[str, Any]:
    """A GPU as the display class of the Windows registry has it."""
    vendor, device = (gpu.pci_id or ":").upper().split(":")
    return {
        "DriverDesc": gpu.name,
        "DriverVersion": gpu.driver,
        "MatchingDeviceId": rf"PCI\VEN_{vendor}&DEV_{device}&SUBSYS_12345678&REV_C8",
        "HardwareInformation.qwMemorySize": gpu.vram_bytes,
        "RadeonSoftwareVersion": gpu.driver_product,
    }


def hip_info_text(gpus: Sequence[Gpu]) -> str:
    return "".join(
        f"{'-' * 40}\ndevice#                           {gpu.index}\nName:                             {gpu.name}\n"
        f"pciBusID:                         3\nisIntegrated:                     {int(bool(gpu.integrated))}\n"
        f"gcnArchName:                      {gpu.gfx}\npeers:\nnon-peers:                        device#0\n\n"
        for gpu in gpus
    )


def windows_machine(root: Path, facts: HostFacts) -> tuple[Sources, Tools]:
    """A Windows machine with these facts: registry, DLLs below ``root``, and tools."""
    windows = facts.windows
    assert windows is not None
    tools = Tools(answers={"powershell": f"{windows.tdr_events}\r\n"})
    content: dict[str, dict[str, Any]] = {
        BOOT_KEY: {"BootId": 77},
        CPU_KEY: {"ProcessorNameString": f"{facts.cpu}  "},
        VERSION_KEY: {
            "CurrentBuildNumber": str(windows.build),
            "ProductName": windows.product.rsplit(" ", 1)[0].replace("Windows 11", "Windows 10"),
            "DisplayVersion": windows.product.rsplit(" ", 1)[1],
        },
        FILES_KEY: {"LongPathsEnabled": int(bool(windows.long_paths))},
        GRAPHICS_KEY: {} if windows.tdr_delay_s is None else {"TdrDelay": windows.tdr_delay_s},
        POLICY_KEY: {
            "VerifiedAndReputablePolicyState": {name: key for key, name in SMART_APP_CONTROL.items()}[
                windows.smart_app_control or "off"
            ]
        },
        VC_KEY: {"Installed": int(windows.vc_runtime is not None), "Version": f"v{windows.vc_runtime}"},
        rf"{DISPLAY_CLASS}\0099": {"DriverDesc": "Virtual display", "MatchingDeviceId": r"ROOT\VirtualDisplay"},
    }
    content |= {rf"{DISPLAY_CLASS}\{place:04d}": adapter_values(gpu) for place, gpu in enumerate(facts.gpus)}
    versions = {}
    for library in windows.hip_libraries:
        versions[str(put(root, library.path, ""))] = library.version
    python = put(root, r"C:\venv\Scripts\python.exe", "")
    listed = [gpu for gpu in facts.amd_gpus if gpu.gfx_source == "hipinfo"]
    if listed:
        put(root, r"C:\venv\Scripts\hipInfo.exe", "")
        tools.answers["hipInfo.exe"] = hip_info_text(listed)
    path = [str(library.path).rsplit("\\", 1)[0] for library in windows.hip_libraries]
    memory = (facts.memory_bytes or 0, facts.memory_available_bytes or 0)
    sources = Sources(
        "windows",
        environ={**facts.variables, "PATH": ";".join([r'"C:\nowhere"', *path]), "SystemRoot": r"C:\Windows"},
        root=root,
        site_packages=(put_torch(root / "site-packages", facts.torch, facts.libraries),),
        app_dir=root / "app",
        run=tools.run,
        registry=Registry(content),
        disk=lambda path: (0, facts.disk_free_bytes or 0),
        memory_status=lambda: (*memory, memory[0] + (windows.page_file_bytes or 0)),
        file_version=lambda path: versions.get(str(path)),
        cpu_count=facts.cpu_count,
        python=str(python),
    )
    return sources, tools
