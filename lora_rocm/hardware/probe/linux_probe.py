"""Reads a Linux machine from /proc, /sys and text files: kernel, distribution, memory, rights, firmware.

It uses no ioctl and needs no root. A file that is missing, or that only root may read (debugfs), is not an error. A
file that exists but cannot be parsed is listed as unread. Sources of the file formats: kernel
Documentation/admin-guide, drivers/gpu/drm/amd/amdkfd/kfd_topology.c.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Literal

from lora_rocm.hardware.facts import DeviceFile, Gpu, HostFacts, Linux
from lora_rocm.hardware.probe.gpu_probe import linux_gpus
from lora_rocm.hardware.probe.sources import ProbeReads, tool_lines

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
"""Pattern of the kernel messages to keep. It is broad on purpose, because the doctor interprets the messages."""
LOG_ABOUT = re.compile(r"amdgpu|kfd|drm|svm_range|restore_userptr", re.IGNORECASE)
DRM_VERSION = re.compile(r"Initialized amdgpu (\d+\.\d+)\.\d+")


def read(reads: ProbeReads, base: HostFacts, deep: bool) -> HostFacts:
    """Return ``base`` extended by the facts of this Linux machine."""
    reads.boot = reads.line("/proc/sys/kernel/random/boot_id")
    kernel = reads.line("/proc/sys/kernel/osrelease")
    if not kernel:
        reads.note("version of the kernel", "/proc/sys/kernel/osrelease is empty or missing")
    wsl = "microsoft" in kernel.lower() or reads.exists("/dev/dxg")
    log = _log(reads) if deep else None
    gpus = tuple(_with_firmware(reads, gpu) for gpu in linux_gpus(reads, wsl))
    memory, available, swap = _memory(reads)
    return replace(
        base,
        cpu=_cpu(reads),
        memory_bytes=memory,
        memory_available_bytes=available,
        swap_bytes=swap,
        gpus=gpus,
        linux=_linux(reads, kernel, wsl, log, deep),
    )


def _linux(reads: ProbeReads, kernel: str, wsl: bool, log: list[str] | None, deep: bool) -> Linux:
    release = _os_release(reads)
    drm = next((found.group(1) for line in log or () if (found := DRM_VERSION.search(line))), None)
    ttm: Literal["ttm", "amdttm"] = "amdttm" if reads.exists("/sys/module/amdttm") else "ttm"
    return Linux(
        kernel=kernel or "unknown",
        distribution=release.get("ID", ""),
        distribution_version=release.get("VERSION_ID", ""),
        wsl=wsl,
        container=_in_container(reads),
        kfd=_device(reads, "/dev/kfd"),
        render_nodes=tuple(
            _device(reads, f"/dev/dri/{name}") for name in reads.names("/dev/dri") if name.startswith("renderD")
        ),
        dxg=reads.exists("/dev/dxg"),
        groups=_groups(reads),
        boot_parameters=_boot_parameters(reads),
        amdgpu_loaded=reads.exists("/sys/module/amdgpu"),
        amdgpu_version=reads.line("/sys/module/amdgpu/version") or None,
        drm_version=drm,
        ttm_pages_limit=reads.number(f"/sys/module/{ttm}/parameters/pages_limit"),
        ttm_module=ttm,
        shm_bytes=_shm(reads),
        rocm_version=_rocm(reads),
        firmware_package=_firmware_package(reads, deep),
        kernel_log=None if log is None else tuple(_relevant(log)),
    )


def _cpu(reads: ProbeReads) -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", reads.text("/proc/cpuinfo", limit=4096) or "", re.MULTILINE)
    return found.group(1).strip() if found else ""


def _memory(reads: ProbeReads) -> tuple[int | None, int | None, int | None]:
    """Return (total, available, swap) memory in bytes. A container's memory limit replaces the machine's values."""
    text = reads.text("/proc/meminfo", expected=True) or ""
    found = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d{1,15}) kB", text, re.MULTILINE)}
    total, available, swap = found.get("MemTotal"), found.get("MemAvailable"), found.get("SwapTotal")
    if text and total is None:
        reads.note("/proc/meminfo", "the line MemTotal is missing")
    container = container_memory(reads)
    if container is None or total is None or container[0] >= total:
        return total, available, swap
    limit, free = container
    return limit, min(free, available if available is not None else free), swap


def container_memory(reads: ProbeReads) -> tuple[int, int] | None:
    """Return (limit, free) memory of this container in bytes, or None if it has no limit."""
    text = reads.line("/sys/fs/cgroup/memory.max")  # "max" means no limit
    if not re.fullmatch(r"\d{1,18}", text):
        return None
    limit, used = int(text), reads.number("/sys/fs/cgroup/memory.current") or 0
    cache = re.search(r"^inactive_file (\d{1,18})$", reads.text("/sys/fs/cgroup/memory.stat") or "", re.MULTILINE)
    return limit, min(max(limit - used + (int(cache.group(1)) if cache else 0), 0), limit)


def container_cores(reads: ProbeReads) -> int | None:
    """Return the processor time that this container may use, in cores, rounded up; None if it has no limit.

    The file of cgroup v2 has microseconds of processor time, and of the period in which they may be used.
    """
    found = re.fullmatch(r"(\d{1,18}) ([1-9]\d{0,17})", reads.line("/sys/fs/cgroup/cpu.max"))  # "max" means no limit
    return None if found is None else -(-int(found[1]) // int(found[2]))


def _os_release(reads: ProbeReads) -> dict[str, str]:
    text = reads.text("/etc/os-release") or reads.text("/usr/lib/os-release") or ""
    return {name: value.strip().strip("\"'") for name, value in re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)}


def _in_container(reads: ProbeReads) -> bool:
    named = {"container", "KUBERNETES_SERVICE_HOST"} & set(reads.sources.environ)
    groups = re.search(r"docker|kubepods|containerd|lxc|libpod", reads.line("/proc/1/cgroup"))
    return bool(named or groups or any(reads.exists(path) for path in CONTAINER_FILES))


def _device(reads: ProbeReads, path: str) -> DeviceFile:
    real = reads.sources.path(path)
    if not reads.exists(path):
        return DeviceFile(path, exists=False)
    access = reads.sources.access
    return DeviceFile(path, exists=True, readable=access(real, os.R_OK), writable=access(real, os.W_OK))


def _groups(reads: ProbeReads) -> tuple[str, ...]:
    """Return the GPU groups of this process.

    A group that the user was added to takes effect only after the next login.
    """
    status = reads.text("/proc/self/status", expected=True) or ""
    ids = dict(re.findall(r"^(Uid|Groups):[ \t]*([\d \t]*)$", status, re.MULTILINE))
    mine = set(ids.get("Groups", "").split())
    lines = (line.split(":") for line in (reads.text("/etc/group") or "").splitlines())
    names = {parts[0] for parts in lines if len(parts) > 2 and parts[2] in mine}
    is_root = ids.get("Uid", "").split()[:1] == ["0"]
    return tuple(name for name in GPU_GROUPS if name in names) + (("root",) if is_root else ())


def _boot_parameters(reads: ProbeReads) -> dict[str, str]:
    words = (reads.text("/proc/cmdline") or "").split()
    return {found.group(1): found.group(2) or "" for word in words if (found := BOOT_PARAMETERS.fullmatch(word))}


def _shm(reads: ProbeReads) -> int | None:
    if not reads.exists("/dev/shm"):
        return None
    try:
        return reads.sources.disk(reads.sources.path("/dev/shm"))[0]
    except OSError as error:
        reads.note("/dev/shm", error)
        return None


def _rocm(reads: ProbeReads) -> str | None:
    found = re.match(r"\d+(?:\.\d+)+", reads.line("/opt/rocm/.info/version"))
    return found.group() if found else None


def _firmware_package(reads: ProbeReads, deep: bool) -> str | None:
    """Return the version of the package with the GPU's firmware, from dpkg, pacman or rpm.

    rpm is slow, so it is run only if ``deep`` is set.
    """
    status = reads.text("/var/lib/dpkg/status", limit=DPKG_BYTES)
    if status is not None:
        return next((version for name in DPKG_NAMES if (version := _dpkg_version(status, name))), None)
    for name in reads.names("/var/lib/pacman/local"):
        found = PACMAN.fullmatch(name)
        if found:
            return found.group(1)
    if deep and (reads.exists("/var/lib/rpm") or reads.exists("/usr/lib/sysimage/rpm")):
        return next((version for name in RPM_NAMES if (version := _rpm_version(reads, name))), None)
    return None


def _rpm_version(reads: ProbeReads, package: str) -> str | None:
    said = tool_lines(reads.sources.run, ["rpm", "-q", "--qf", "%{VERSION}-%{RELEASE}\n", package], TOOL_TIMEOUT_S)
    return next((line for line in said if re.match(r"\d", line)), None)


def _dpkg_version(status: str, package: str) -> str | None:
    start = status.find(f"Package: {package}\n")
    if start < 0:
        return None
    stanza = status[start : start + 4096].split("\n\n")[0]
    found = re.search(r"^Version: (\S+)$", stanza, re.MULTILINE)
    return found.group(1) if found and "\nStatus: install ok" in stanza else None


def _with_firmware(reads: ProbeReads, gpu: Gpu) -> Gpu:
    """Return the GPU, with the version of its scheduler firmware added if this process is root."""
    if gpu.pci_address is None or not reads.sources.access(reads.sources.path(DEBUG_DRI), os.R_OK | os.X_OK):
        return gpu
    for folder in reads.names(DEBUG_DRI):  # named by card, render node or address, depending on the kernel
        if gpu.pci_address not in f"{folder} {reads.line(f'{DEBUG_DRI}/{folder}/name')}":
            continue
        text = reads.text(f"{DEBUG_DRI}/{folder}/amdgpu_firmware_info") or ""
        found = re.search(r"^MES feature version: \d+, firmware version: 0x([0-9a-f]{1,16})", text, re.M | re.I)
        if found and int(found.group(1), 16):
            return replace(gpu, mes_firmware=f"{int(found.group(1), 16):#x}")
    return gpu


def _log(reads: ProbeReads) -> list[str] | None:
    """Return the kernel log of this boot, or None if this user may not read it."""
    for command in (["journalctl", "-k", "-b", "-o", "cat", "--no-pager", "-q"], ["dmesg"]):
        lines = tool_lines(reads.sources.run, command, TOOL_TIMEOUT_S)
        if len(lines) > 1:  # a kernel log is never empty; an empty answer means no access
            return lines
    return None


def _relevant(lines: list[str]) -> list[str]:
    wanted = (line.strip() for line in lines if LOG.search(line) and LOG_ABOUT.search(line))
    return [re.sub(r"^\[\s*\d+\.\d+\] ", "", line)[:300] for line in wanted][-LOG_LINES:]
