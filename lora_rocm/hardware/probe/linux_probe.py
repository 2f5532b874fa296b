"""Reads a Linux machine from /proc, /sys and text files: kernel, distribution, memory, rights, firmware.

It uses no ioctl and needs no root. It is not a fault if only root may read a file (debugfs) or if a machine lacks it. A
file that exists but cannot be parsed is noted. Sources of the file formats: kernel Documentation/admin-guide,
drivers/gpu/drm/amd/amdkfd/kfd_topology.c.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Literal

from lora_rocm.hardware.facts import DeviceFile, Gpu, HostFacts, Linux
from lora_rocm.hardware.probe.gpu_probe import linux_gpus
from lora_rocm.hardware.probe.sources import Look, tool_lines

BOOT_PARAMETERS = re.compile(r"((?:iommu|amd_iommu|ttm\.\w+|amdttm\.\w+|amdgpu\.\w+))(?:=(\S*))?")
CONTAINER_FILES = ("/.dockerenv", "/run/.containerenv")
GPU_GROUPS = ("render", "video")
DEBUG_DRI = "/sys/kernel/debug/dri"
DPKG_BYTES = 1 << 26
RPM_NAMES = ("amd-gpu-firmware", "linux-firmware")
PACMAN = re.compile(r"linux-firmware(?:-amdgpu)?-(\d[^-]*(?:-[^-]+)?)")
DPKG_NAMES = ("linux-firmware", "firmware-amd-graphics")
TOOL_TIMEOUT_S = 10.0
LOG_LINES = 50
LOG = re.compile(
    r"hogged CPU|failed to resume kfd|page fault|L2_PROTECTION_FAULT|ring \S+ timeout|\bMES\b.*(?:fail|might be)"
    r"|GPU reset|device wedged|job.timedout|sdma.*(?:fault|timeout|hang|fail)|(?:fault|timeout|hang)\w*\b.*sdma"
    r"|PCI.{0,16}atomic|firmware.*fail|fail.*firmware",
    re.IGNORECASE,
)
"""Kernel messages kept for the doctor, which interprets them. The pattern is generous on purpose."""
LOG_ABOUT = re.compile(r"amdgpu|kfd|drm|svm_range|restore_userptr", re.IGNORECASE)
DRM_VERSION = re.compile(r"Initialized amdgpu (\d+\.\d+)\.\d+")


def read(look: Look, base: HostFacts, deep: bool) -> HostFacts:
    """``base`` with the facts of this Linux machine."""
    look.boot = look.line("/proc/sys/kernel/random/boot_id")
    kernel = look.line("/proc/sys/kernel/osrelease")
    if not kernel:
        look.note("version of the kernel", "/proc/sys/kernel/osrelease is empty or not there")
    wsl = "microsoft" in kernel.lower() or look.exists("/dev/dxg")
    log = _log(look) if deep else None
    gpus = tuple(_with_firmware(look, gpu) for gpu in linux_gpus(look, wsl))
    memory, available, swap = _memory(look)
    return replace(
        base,
        cpu=_cpu(look),
        memory_bytes=memory,
        memory_available_bytes=available,
        swap_bytes=swap,
        gpus=gpus,
        linux=_linux(look, kernel, wsl, log, deep),
    )


def _linux(look: Look, kernel: str, wsl: bool, log: list[str] | None, deep: bool) -> Linux:
    release = _os_release(look)
    drm = next((found.group(1) for line in log or () if (found := DRM_VERSION.search(line))), None)
    ttm: Literal["ttm", "amdttm"] = "amdttm" if look.exists("/sys/module/amdttm") else "ttm"
    return Linux(
        kernel=kernel or "unknown",
        distribution=release.get("ID", ""),
        distribution_version=release.get("VERSION_ID", ""),
        wsl=wsl,
        container=_in_container(look),
        kfd=_device(look, "/dev/kfd"),
        render_nodes=tuple(
            _device(look, f"/dev/dri/{name}") for name in look.names("/dev/dri") if name.startswith("renderD")
        ),
        dxg=look.exists("/dev/dxg"),
        groups=_groups(look),
        boot_parameters=_boot_parameters(look),
        amdgpu_loaded=look.exists("/sys/module/amdgpu"),
        amdgpu_version=look.line("/sys/module/amdgpu/version") or None,
        drm_version=drm,
        ttm_pages_limit=look.number(f"/sys/module/{ttm}/parameters/pages_limit"),
        ttm_module=ttm,
        shm_bytes=_shm(look),
        rocm_version=_rocm(look),
        firmware_package=_firmware_package(look, deep),
        kernel_log=None if log is None else tuple(_relevant(log)),
    )


def _cpu(look: Look) -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", look.text("/proc/cpuinfo", limit=4096) or "", re.MULTILINE)
    return found.group(1).strip() if found else ""


def _memory(look: Look) -> tuple[int | None, int | None, int | None]:
    """(total, available, swap) in bytes; in a container with a memory limit, its values."""
    text = look.text("/proc/meminfo", expected=True) or ""
    found = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d{1,15}) kB", text, re.MULTILINE)}
    total, available, swap = found.get("MemTotal"), found.get("MemAvailable"), found.get("SwapTotal")
    if text and total is None:
        look.note("/proc/meminfo", "no line MemTotal")
    limit = look.line("/sys/fs/cgroup/memory.max")  # "max" means no limit
    if not re.fullmatch(r"\d{1,18}", limit) or total is None or int(limit) >= total:
        return total, available, swap
    used = look.number("/sys/fs/cgroup/memory.current") or 0
    cache = re.search(r"^inactive_file (\d{1,18})$", look.text("/sys/fs/cgroup/memory.stat") or "", re.MULTILINE)
    free = max(int(limit) - used + (int(cache.group(1)) if cache else 0), 0)
    return int(limit), min(free, int(limit), available if available is not None else free), swap


def _os_release(look: Look) -> dict[str, str]:
    text = look.text("/etc/os-release") or look.text("/usr/lib/os-release") or ""
    return {name: value.strip().strip("\"'") for name, value in re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)}


def _in_container(look: Look) -> bool:
    named = {"container", "KUBERNETES_SERVICE_HOST"} & set(look.sources.environ)
    groups = re.search(r"docker|kubepods|containerd|lxc|libpod", look.line("/proc/1/cgroup"))
    return bool(named or groups or any(look.exists(path) for path in CONTAINER_FILES))


def _device(look: Look, path: str) -> DeviceFile:
    real = look.sources.path(path)
    if not look.exists(path):
        return DeviceFile(path, exists=False)
    access = look.sources.access
    return DeviceFile(path, exists=True, readable=access(real, os.R_OK), writable=access(real, os.W_OK))


def _groups(look: Look) -> tuple[str, ...]:
    """GPU groups of this process. A group that was added to the user takes effect only after the next login."""
    status = look.text("/proc/self/status", expected=True) or ""
    ids = dict(re.findall(r"^(Uid|Groups):[ \t]*([\d \t]*)$", status, re.MULTILINE))
    mine = set(ids.get("Groups", "").split())
    lines = (line.split(":") for line in (look.text("/etc/group") or "").splitlines())
    names = {parts[0] for parts in lines if len(parts) > 2 and parts[2] in mine}
    is_root = ids.get("Uid", "").split()[:1] == ["0"]
    return tuple(name for name in GPU_GROUPS if name in names) + (("root",) if is_root else ())


def _boot_parameters(look: Look) -> dict[str, str]:
    words = (look.text("/proc/cmdline") or "").split()
    return {found.group(1): found.group(2) or "" for word in words if (found := BOOT_PARAMETERS.fullmatch(word))}


def _shm(look: Look) -> int | None:
    if not look.exists("/dev/shm"):
        return None
    try:
        return look.sources.disk(look.sources.path("/dev/shm"))[0]
    except OSError as error:
        look.note("/dev/shm", error)
        return None


def _rocm(look: Look) -> str | None:
    found = re.match(r"\d+(?:\.\d+)+", look.line("/opt/rocm/.info/version"))
    return found.group() if found else None


def _firmware_package(look: Look, deep: bool) -> str | None:
    """Version of the package with the GPU's firmware, from dpkg, pacman or (slow, so only if ``deep``) rpm."""
    status = look.text("/var/lib/dpkg/status", limit=DPKG_BYTES)
    if status is not None:
        return next((version for name in DPKG_NAMES if (version := _dpkg_version(status, name))), None)
    for name in look.names("/var/lib/pacman/local"):
        found = PACMAN.fullmatch(name)
        if found:
            return found.group(1)
    if deep and (look.exists("/var/lib/rpm") or look.exists("/usr/lib/sysimage/rpm")):
        return next((version for name in RPM_NAMES if (version := _rpm_version(look, name))), None)
    return None


def _rpm_version(look: Look, package: str) -> str | None:
    said = tool_lines(look.sources.run, ["rpm", "-q", "--qf", "%{VERSION}-%{RELEASE}\n", package], TOOL_TIMEOUT_S)
    return next((line for line in said if re.match(r"\d", line)), None)


def _dpkg_version(status: str, package: str) -> str | None:
    start = status.find(f"Package: {package}\n")
    if start < 0:
        return None
    stanza = status[start : start + 4096].split("\n\n")[0]
    found = re.search(r"^Version: (\S+)$", stanza, re.MULTILINE)
    return found.group(1) if found and "\nStatus: install ok" in stanza else None


def _with_firmware(look: Look, gpu: Gpu) -> Gpu:
    """The GPU with the version of its scheduler firmware, if this process is root."""
    if gpu.pci_address is None or not look.sources.access(look.sources.path(DEBUG_DRI), os.R_OK | os.X_OK):
        return gpu
    for folder in look.names(DEBUG_DRI):  # named by card, render node or address, depending on the kernel
        if gpu.pci_address not in f"{folder} {look.line(f'{DEBUG_DRI}/{folder}/name')}":
            continue
        text = look.text(f"{DEBUG_DRI}/{folder}/amdgpu_firmware_info") or ""
        found = re.search(r"^MES feature version: \d+, firmware version: 0x([0-9a-f]{1,16})", text, re.M | re.I)
        if found and int(found.group(1), 16):
            return replace(gpu, mes_firmware=f"{int(found.group(1), 16):#x}")
    return gpu


def _log(look: Look) -> list[str] | None:
    """The kernel log of this boot; None if this user may not read it."""
    for command in (["journalctl", "-k", "-b", "-o", "cat", "--no-pager", "-q"], ["dmesg"]):
        lines = tool_lines(look.sources.run, command, TOOL_TIMEOUT_S)
        if len(lines) > 1:  # a kernel log is never empty; an empty answer means no access
            return lines
    return None


def _relevant(lines: list[str]) -> list[str]:
    wanted = (line.strip() for line in lines if LOG.search(line) and LOG_ABOUT.search(line))
    return [re.sub(r"^\[\s*\d+\.\d+\] ", "", line)[:300] for line in wanted][-LOG_LINES:]
