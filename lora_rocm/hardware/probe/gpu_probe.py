"""Reads the GPUs of a Linux machine (AMD from KFD or PCI, NVIDIA, Intel), and the chip and memory of a Mac.

AMD GPUs are numbered by KFD node, as in ROCr. KFD's ``gfx_target_version`` is the true architecture; it does not depend
on HSA_OVERRIDE_GFX_VERSION. Standard library only.
"""

from __future__ import annotations

import re
from dataclasses import replace

from lora_rocm.hardware.archs import arch_of
from lora_rocm.hardware.facts import Gpu, HostFacts, Vendor
from lora_rocm.hardware.pci import AMD, gfx_of_id, product_name
from lora_rocm.hardware.probe.sources import ProbeReads

KFD_NODES = "/sys/class/kfd/kfd/topology/nodes"
PCI_DEVICES = "/sys/bus/pci/devices"
IDS_FILES = ("/usr/share/libdrm/amdgpu.ids", "/opt/amdgpu/share/libdrm/amdgpu.ids")
IDS_BYTES = 1 << 20
AMD_VENDOR_ID = 0x1002
NVIDIA = "10de"
VENDORS: dict[str, Vendor] = {AMD: "amd", NVIDIA: "nvidia", "8086": "intel"}
NO_ATOMICS = 0b1100  # CRAT_IOLINK_FLAGS_NO_ATOMICS_32_BIT and _64_BIT, kernel amdkfd/kfd_crat.h
VRAM_HEAPS = ("1", "2")  # HSA_MEM_HEAP_TYPE_FB_PUBLIC and _PRIVATE, kernel amdkfd/kfd_topology.h
MIB = 1 << 20
NUMBER = r"\d{1,15}"
SMI_TIMEOUT_S = 15.0
SMI_FIELDS = "index,name,memory.total,driver_version,pci.bus_id,pci.device_id"
NVIDIA_SIGNS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/usr/lib/wsl/lib/nvidia-smi")
WSL_POWERSHELL = "/mnt/c/Windows/System32/WindowsPowerShell/v1.0/powershell.exe"


def linux_gpus(reads: ProbeReads, wsl: bool) -> list[Gpu]:
    """Return all GPUs (AMD, NVIDIA, others). Each vendor's GPUs are numbered from 0."""
    on_bus = _display_devices(reads)
    unread_before = len(reads.unread)
    listed = kfd_gpus(reads)
    on_bus_amd = [_amd_on_bus(reads, address, device) for address, device in on_bus if device[0] == AMD]
    if listed and len(reads.unread) == unread_before:  # else a node is unreadable or belongs to another container
        known = {gpu.pci_address for gpu in listed}
        for gpu in on_bus_amd:  # a GPU that could compute, but is unknown to the runtime
            if gpu.gfx is not None and gpu.pci_address not in known:
                reads.note(f"{gpu.name} at {gpu.pci_address}", "the compute driver (KFD) does not list it")
    amd = listed or on_bus_amd
    if wsl and not amd:
        amd = _windows_gpus(reads)
    others = [
        Gpu(
            vendor=VENDORS.get(vendor, "other"),
            name=f"{VENDORS.get(vendor, 'other').capitalize()} GPU {vendor}:{device}",
            integrated=True if vendor == "8086" and address.startswith("0000:00:") else None,
            pci_id=f"{vendor}:{device}",
            pci_address=address,
        )
        for address, (vendor, device) in on_bus
        if vendor != AMD
    ]
    nvidia = nvidia_gpus(reads)
    rest = [gpu for gpu in others if not (nvidia and gpu.vendor == "nvidia")]
    return _numbered(amd) + nvidia + _numbered(rest)


def _numbered(gpus: list[Gpu]) -> list[Gpu]:
    seen: dict[str, int] = {}
    found = []
    for gpu in gpus:
        found.append(replace(gpu, index=seen.get(gpu.vendor, 0)))
        seen[gpu.vendor] = seen.get(gpu.vendor, 0) + 1
    return found


def gfx_of_version(version: int) -> str | None:
    """Return the architecture for KFD's gfx_target_version, or None for 0, which is a CPU.

    110501 is gfx1151, and 90010 is gfx90a.
    """
    major, minor, step = version // 10000, version // 100 % 100, version % 100
    return f"gfx{major}{minor:x}{step:x}" if 0 < major < 64 and minor < 16 and step < 16 else None


def kfd_gpus(reads: ProbeReads) -> list[Gpu]:
    """Return the AMD GPUs in the order of their KFD nodes, as in ROCr; empty if the system has no KFD."""
    numbers = sorted(int(name) for name in reads.names(KFD_NODES) if name.isdecimal() and len(name) < 6)
    nodes = [(number, _node(reads, number)) for number in numbers]
    cpus = {number for number, node in nodes if node.get("simd_count") == "0"}
    gpus = []
    for number, node in nodes:
        is_amd = node.get("vendor_id") == str(AMD_VENDOR_ID)
        if number not in cpus and (is_amd or node.get("gfx_target_version", "0") != "0"):
            gpus.append(_kfd_gpu(reads, number, node, cpus))
    return gpus


def _node(reads: ProbeReads, number: int) -> dict[str, str]:
    path = f"{KFD_NODES}/{number}/properties"
    text = reads.text(path)  # unreadable if the GPU is not given to this container; ROCr skips it too
    if text is None:
        return {}
    found = dict(re.findall(r"^(\w+) (.+)$", text, re.MULTILINE))
    if "simd_count" not in found:
        reads.note(path, "the line simd_count is missing")
    return found


def _kfd_gpu(reads: ProbeReads, number: int, node: dict[str, str], cpus: set[int]) -> Gpu:
    folder = f"{KFD_NODES}/{number}"

    def value(name: str) -> int | None:
        return reads.parsed(node[name], f"{folder}/properties: {name}") if name in node else None

    version, device_id, location = value("gfx_target_version"), value("device_id"), value("location_id")
    minor, domain = value("drm_render_minor"), value("domain") or 0
    device = f"/sys/class/drm/renderD{minor}/device" if minor is not None and 0 < minor < 1 << 20 else None
    pci_id = f"{AMD}:{device_id:04x}" if device_id is not None and 0 <= device_id < 1 << 16 else None
    gfx = gfx_of_version(version) if version is not None else None
    if version is not None and gfx is None:
        reads.note(f"{folder}/properties: gfx_target_version", f"unknown architecture: {version}")
    by_id = gfx_of_id(pci_id)
    gpu = Gpu(
        vendor="amd",
        name=_amd_name(reads, device, pci_id),
        gfx=gfx or by_id,
        gfx_source="kfd" if gfx else "pci" if by_id else None,
        pci_id=pci_id,
        pci_address=_address(domain, location) if location is not None else None,
        node=number,
        vram_bytes=(reads.number(f"{device}/mem_info_vram_total") if device else None) or _bank_bytes(reads, folder),
        vram_used_bytes=_used(reads, device) if device else None,
        gtt_bytes=reads.number(f"{device}/mem_info_gtt_total") if device else None,
    )
    arch = arch_of(gpu.gfx)
    integrated = arch.integrated if arch else True if node.get("cpu_cores_count", "0") != "0" else None
    atomics = None if integrated else _atomics(reads, folder, cpus)
    return replace(gpu, integrated=integrated, pcie_atomics=atomics)


def _address(domain: int, location: int) -> str:
    return f"{domain & 0xFFFFFFFF:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"


def _bank_bytes(reads: ProbeReads, folder: str) -> int | None:
    """Return a GPU's memory size from KFD's memory banks, which is used if the DRM file is missing."""
    total = 0
    for name in reads.names(f"{folder}/mem_banks"):
        text = reads.text(f"{folder}/mem_banks/{name}/properties") or ""
        bank = dict(re.findall(r"^(\w+) (\d{1,18})$", text, re.MULTILINE))
        total += int(bank.get("size_in_bytes", "0")) if bank.get("heap_type") in VRAM_HEAPS else 0
    return total or None


def _used(reads: ProbeReads, device: str) -> int | None:
    """Return the bytes in use on a card. Return None for a sleeping card, because reading its counter may wake it."""
    asleep = reads.line(f"{device}/power/runtime_status") == "suspended"
    return None if asleep else reads.number(f"{device}/mem_info_vram_used")


def _atomics(reads: ProbeReads, folder: str, cpus: set[int]) -> bool | None:
    """Whether the GPU's link to a CPU supports PCIe atomics; None if no link reports flags."""
    for name in reads.names(f"{folder}/io_links"):
        text = reads.text(f"{folder}/io_links/{name}/properties") or ""
        link = dict(re.findall(r"^(\w+) (\d{1,18})$", text, re.MULTILINE))
        if "flags" in link and int(link.get("node_to", "-1")) in cpus:
            return not int(link["flags"]) & NO_ATOMICS
    return None


def _amd_name(reads: ProbeReads, device: str | None, pci_id: str | None) -> str:
    if device is None or pci_id is None:
        return f"AMD GPU {pci_id}" if pci_id else "AMD GPU"
    revision = reads.line(f"{device}/revision").lower().removeprefix("0x")
    packages = reads.sources.site_packages
    bundled = tuple(str(folder / "torch" / "share" / "libdrm" / "amdgpu.ids") for folder in packages)
    for path in (*IDS_FILES, *(bundled if reads.sources.root is None else ())):
        text = reads.text(path, limit=IDS_BYTES)
        if text is not None:
            return product_name(text, pci_id[5:], revision) or f"AMD GPU {pci_id}"
    return f"AMD GPU {pci_id}"


def _display_devices(reads: ProbeReads) -> list[tuple[str, tuple[str, str]]]:
    """Return (address, (vendor, device)) of all display controllers, and of AMD accelerators without a display."""
    found = []
    for address in reads.names(PCI_DEVICES):
        kind = reads.line(f"{PCI_DEVICES}/{address}/class").lower()
        if not kind.startswith(("0x03", "0x1200")):
            continue
        vendor, device = (reads.line(f"{PCI_DEVICES}/{address}/{name}").lower()[2:6] for name in ("vendor", "device"))
        if kind.startswith("0x03") or vendor == AMD:
            found.append((address, (vendor, device)))
    return found


def _amd_on_bus(reads: ProbeReads, address: str, device: tuple[str, str]) -> Gpu:
    """Return an AMD GPU that KFD does not list, because its driver is missing or may not be accessed here."""
    folder, pci_id = f"{PCI_DEVICES}/{address}", f"{device[0]}:{device[1]}"
    gfx = gfx_of_id(pci_id)
    arch = arch_of(gfx)
    return Gpu(
        vendor="amd",
        name=_amd_name(reads, folder, pci_id),
        gfx=gfx,
        gfx_source="pci" if gfx else None,
        integrated=arch.integrated if arch else None,
        pci_id=pci_id,
        pci_address=address,
        vram_bytes=reads.number(f"{folder}/mem_info_vram_total"),
        vram_used_bytes=_used(reads, folder),
        gtt_bytes=reads.number(f"{folder}/mem_info_gtt_total"),
    )


def _windows_gpus(reads: ProbeReads) -> list[Gpu]:
    """Return the GPUs under WSL. They are read from Windows, because Linux lists no PCI devices there."""
    if not reads.exists(WSL_POWERSHELL):
        reads.note("GPUs of the Windows host", "powershell.exe was not found")
        return []
    from lora_rocm.hardware.probe.windows_probe import ADAPTERS_SCRIPT, adapters_from_json, gpus_of_adapters

    powershell = str(reads.sources.path(WSL_POWERSHELL))
    command = [powershell, "-NoProfile", "-NonInteractive", "-Command", ADAPTERS_SCRIPT]
    said = reads.ask("powershell", command, SMI_TIMEOUT_S, "adapters")
    adapters = adapters_from_json(reads, said) if said is not None else []
    return [gpu for gpu in gpus_of_adapters(adapters) if gpu.vendor == "amd"]


def nvidia_gpus(reads: ProbeReads) -> list[Gpu]:
    """Return the NVIDIA GPUs with a driver, read from nvidia-smi, or else from /proc."""
    if not any(reads.exists(path) for path in NVIDIA_SIGNS):
        return []
    about = reads.line("/proc/driver/nvidia/version")
    command = ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader,nounits"]
    said = reads.ask("nvidia-smi", command, SMI_TIMEOUT_S, about)
    rows = [[part.strip() for part in line.split(",")] for line in (said or "").splitlines() if line.strip()]
    gpus = [_smi_gpu(row) for row in rows if len(row) == 6 and re.fullmatch(NUMBER, row[0])]
    if said is not None and len(gpus) < len(rows):
        reads.note("nvidia-smi", "its output has an unexpected format")
    return gpus or _nvidia_of_proc(reads, about)


def _smi_gpu(row: list[str]) -> Gpu:
    index, name, mib, driver, address, device_id = row
    return Gpu(
        vendor="nvidia",
        name=name,
        index=int(index),
        integrated=False,
        pci_id=f"{NVIDIA}:{device_id.lower().removeprefix('0x')[:4]}",
        pci_address=address.lower()[-12:],
        vram_bytes=int(mib) * MIB if re.fullmatch(NUMBER, mib) else None,  # "[N/A]" if it shares the machine's memory
        driver=driver,
    )


def _nvidia_of_proc(reads: ProbeReads, version_text: str) -> list[Gpu]:
    version = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", version_text)
    gpus: list[Gpu] = []
    for address in reads.names("/proc/driver/nvidia/gpus"):
        model = re.search(r"^Model:\s*(.+)$", reads.text(f"/proc/driver/nvidia/gpus/{address}/information") or "", re.M)
        gpu = Gpu("nvidia", model.group(1).strip() if model else "NVIDIA GPU", len(gpus), integrated=False)
        gpus.append(replace(gpu, pci_address=address, driver=version.group(1) if version else None))
    return gpus


def read_macos(reads: ProbeReads, base: HostFacts, deep: bool) -> HostFacts:
    """Return ``base`` extended by the chip and memory of a Mac."""
    said = (
        reads.run("sysctl", ["/usr/sbin/sysctl", "machdep.cpu.brand_string", "hw.memsize", "vm.swapusage"], 5.0) or ""
    )
    values = dict(re.findall(r"^([\w.]+): (.*)$", said, re.MULTILINE))
    chip = values.get("machdep.cpu.brand_string", "")
    swap = re.search(rf"total = ({NUMBER}(?:\.\d+)?)M", values.get("vm.swapusage", ""))
    pages = reads.run("vm_stat", ["/usr/bin/vm_stat"], 5.0) or ""
    size = re.search(rf"page size of ({NUMBER}) bytes", pages)
    free = re.findall(rf"^Pages (?:free|inactive|speculative):\s+({NUMBER})\.", pages, re.MULTILINE)
    apple = (Gpu("apple", chip, integrated=True),) if chip.startswith("Apple") else ()
    return replace(
        base,
        cpu=chip,
        memory_bytes=reads.parsed(values["hw.memsize"], "hw.memsize") if "hw.memsize" in values else None,
        memory_available_bytes=int(size.group(1)) * sum(map(int, free)) if size and free else None,
        swap_bytes=int(float(swap.group(1)) * MIB) if swap else None,
        gpus=apple,
    )
