"""Facts about a machine as plain data, read by ``probe`` or loaded from a file that describes another machine.

Standard library only, because the installer uses it before anything is installed. Sizes are in bytes. A fact that could
not be read is None and is listed in ``unread``; no fact is guessed.
"""

from __future__ import annotations

import re
import types
import typing
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lora_rocm.errors import UserError
from lora_rocm.foundation.json_text import parse_json

EXPECTED: dict[Any, str] = {
    dict: "a table of texts",
    tuple: "a list",
    str: "a text",
    int: "a whole number from 0 to 2^63-1",
    bool: "a truth",
}

MAX_FILE_BYTES = 1 << 24
NUMBERS = range(2**63)
"""The range of valid numbers in facts."""

System = Literal["linux", "windows", "macos"]
Vendor = Literal["amd", "nvidia", "apple", "intel", "other"]


@dataclass(frozen=True)
class Unread:
    """A fact that could not be read, and the reason."""

    what: str
    why: str


@dataclass(frozen=True)
class Gpu:
    """One GPU. ``index`` is its number among the GPUs of its vendor, in the order of the vendor's runtime."""

    vendor: Vendor
    name: str
    index: int = 0
    gfx: str | None = None
    """AMD: the GPU's true architecture ("gfx1151"), never the one set by an override; None if unknown."""
    gfx_source: Literal["kfd", "hipinfo", "pci", "name"] | None = None
    integrated: bool | None = None
    pci_id: str | None = None
    """PCI vendor and device number: "1002:1586"."""
    pci_address: str | None = None
    node: int | None = None
    """Linux, AMD: number of the KFD topology node."""
    vram_bytes: int | None = None
    """Dedicated memory, or the carve-out of an APU."""
    vram_used_bytes: int | None = None
    """Linux, AMD: the part of ``vram_bytes`` that all programs together use now."""
    gtt_bytes: int | None = None
    """Linux, AMD: system memory that the GPU may map."""
    driver: str | None = None
    """Driver version: the display adapter's driver on Windows, or NVIDIA's driver for an NVIDIA GPU."""
    driver_product: str | None = None
    """Windows, AMD: version of the Adrenalin software ("26.6.2"), or None if it cannot be read."""
    pcie_atomics: bool | None = None
    mes_firmware: str | None = None
    """Linux, AMD: version of the scheduler firmware ("0x83"). Only root can read it."""


@dataclass(frozen=True)
class DeviceFile:
    """A device file and this user's access rights to it."""

    path: str
    exists: bool
    readable: bool = False
    writable: bool = False


@dataclass(frozen=True)
class Linux:
    """Facts that exist only on Linux. ``kernel`` is the output of ``uname -r``."""

    kernel: str
    distribution: str = ""
    """ID from os-release: "ubuntu", "fedora", "arch"."""
    distribution_version: str = ""
    wsl: bool = False
    container: bool = False
    kfd: DeviceFile | None = None
    render_nodes: tuple[DeviceFile, ...] = ()
    dxg: bool = False
    """Whether /dev/dxg exists, the GPU device of WSL."""
    groups: tuple[str, ...] = ()
    """Groups that give this user access to GPUs: "render" and "video" if the user is a member, "root" if the user is
    root.
    """
    boot_parameters: dict[str, str] = field(default_factory=dict)
    """Parameters of the kernel command line that concern the GPU: iommu, amd_iommu, ttm.*, amdttm.*, amdgpu.*."""
    amdgpu_loaded: bool = False
    amdgpu_version: str | None = None
    """Version of a separately installed amdgpu module (DKMS); None if the kernel's own module is used."""
    drm_version: str | None = None
    """Interface version of the amdgpu driver ("3.64"). Only the kernel log contains it."""
    ttm_pages_limit: int | None = None
    """Limit of the system memory that all GPUs together may map, in pages of 4 KiB."""
    ttm_module: Literal["ttm", "amdttm"] = "ttm"
    """Module that has ``ttm_pages_limit``: the kernel's own ttm, or amdttm of a separately installed amdgpu driver."""
    shm_bytes: int | None = None
    rocm_version: str | None = None
    """Version of the ROCm that is installed in /opt/rocm."""
    firmware_package: str | None = None
    """Version of the distribution's linux-firmware package; None if it cannot be read without root."""
    kernel_log: tuple[str, ...] | None = None
    """Lines about the GPU from this boot's kernel log; None if the log was not read or may not be read."""


@dataclass(frozen=True)
class Library:
    """A DLL that Windows may load in place of the one in the wheel."""

    path: str
    version: str | None = None


@dataclass(frozen=True)
class Windows:
    """Facts that exist only on Windows. ``build`` is the build number; 26100 is Windows 11 24H2."""

    build: int
    product: str = ""
    hip_libraries: tuple[Library, ...] = ()
    """All files amdhip64*.dll in System32 and in the folders of PATH."""
    hip_path: str | None = None
    page_file_bytes: int | None = None
    tdr_delay_s: int | None = None
    """Registry value TdrDelay, or None if it is not set and the default of 2 s holds."""
    tdr_events: int | None = None
    """Number of display driver resets in the System log (event 4101) in the last 7 days."""
    smart_app_control: Literal["off", "evaluation", "on"] | None = None
    vc_runtime: str | None = None
    """Version of the Visual C++ runtime; None if it is missing."""
    long_paths: bool | None = None


@dataclass(frozen=True)
class Torch:
    """An installed torch, read from its files without importing it."""

    version: str
    hip: str | None = None
    cuda: str | None = None
    arch_list: tuple[str, ...] | None = None
    """Architectures that this torch has kernels for; None if neither its files nor its metadata name them."""
    arch_source: Literal["files", "metadata", "asked"] | None = None
    aotriton: str | None = None
    """Version of the bundled attention library, AOTriton ("0.12.50")."""
    aotriton_images: dict[str, str] = field(default_factory=dict)
    """AOTriton version for which each folder of GPU images was built ("amd-gfx120x": "0.13")."""
    rocm: str | None = None
    """``torch.version.rocm`` ("10.1.0"), which exists since torch 2.13. ``rocm_version`` also covers older versions."""

    @property
    def rocm_version(self) -> str | None:
        """Return the ROCm version: torch's own value, else the number in "+rocm7.2", else the first two numbers of HIP.

        HIP's and ROCm's numbers are equal only up to 7.14: ROCm 10.0 has HIP 7.15, and 10.1 has HIP 7.16.
        """
        if self.hip is None:
            return None
        local, hip = re.search(r"\+rocm(\d+(?:\.\d+)+)", self.version), re.match(r"\d+(?:\.\d+)?", self.hip)
        return self.rocm or (local[1] if local else None) or (hip.group() if hip else None)

    @property
    def is_pytorch_org_rocm(self) -> bool:
        """Whether this is a ROCm build from download.pytorch.org ("+rocm7.2").

        The versions of AMD's own builds have three numbers ("+rocm7.2.1").
        """
        return re.search(r"\+rocm\d+\.\d+$", self.version) is not None


@dataclass(frozen=True)
class HostFacts:
    """All facts about a machine. ``origin`` is "probe", or describes where a recorded machine comes from."""

    origin: str
    system: System
    python: str
    """Version and word size of Python: "3.12.4 64-bit"."""
    cpu: str
    cpu_count: int
    memory_bytes: int | None = None
    memory_available_bytes: int | None = None
    swap_bytes: int | None = None
    disk_free_bytes: int | None = None
    gpus: tuple[Gpu, ...] = ()
    linux: Linux | None = None
    windows: Windows | None = None
    torch: Torch | None = None
    libraries: dict[str, str] = field(default_factory=dict)
    """Versions of other relevant packages by name: triton, bitsandbytes, flash_attn, torchvision, ..."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables that ROCm, HIP, MIOpen or torch read."""
    unread: tuple[Unread, ...] = ()

    @property
    def amd_gpus(self) -> tuple[Gpu, ...]:
        return tuple(gpu for gpu in self.gpus if gpu.vendor == "amd")

    @property
    def is_wsl(self) -> bool:
        return self.linux is not None and self.linux.wsl

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def facts_from_json(value: Any, where: str) -> HostFacts:
    """Build facts from parsed JSON.

    where: source of the JSON, for error messages.

    Raises:
        UserError: a key is unknown or missing, or a value has the wrong type. The message names the key.
    """
    found: HostFacts = _read(HostFacts, value, where)
    return replace(found, gpus=tuple(replace(gpu, gfx=_without_features(gpu.gfx)) for gpu in found.gpus))


def load_facts(path: Path) -> HostFacts:
    """Load facts from a file: the output of ``env --json`` or ``doctor --json``, or facts alone as in ``tests/hosts``.

    Raises:
        UserError: the file cannot be read, is not JSON, or does not describe a machine.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"it is larger than {MAX_FILE_BYTES >> 20} MiB")
        value = parse_json(content)  # UTF-8, or UTF-16 from a redirect in Windows PowerShell
    except OSError as error:
        what = f"The file of facts cannot be read: {error.strerror}."
        raise UserError("facts-unreadable", what, where=str(path), fix="Pass the path of an existing file.") from None
    except (ValueError, RecursionError) as error:
        what = f"The file of facts cannot be used: {error}."
        raise UserError(
            "facts-no-json", what, where=str(path), fix="Use a file written by lora-rocm env --json or doctor --json."
        ) from None
    if isinstance(value, dict) and isinstance(value.get("facts"), dict):
        return facts_from_json(value["facts"], f"{path}: facts")
    return facts_from_json(value, str(path))


def _without_features(gfx: str | None) -> str | None:
    """Return the architecture without its feature flags; torch may report "gfx90a:sramecc+:xnack-"."""
    return gfx.partition(":")[0] if gfx is not None else None


def _read(wanted: Any, value: Any, where: str) -> Any:
    """Convert ``value`` to the type of the annotation ``wanted``; lists become tuples.

    ``where`` locates it in errors.
    """
    if is_dataclass(wanted):
        return _read_fields(wanted, value, where)
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (types.UnionType, typing.Union):  # Literal["a"] | None is the second
        return None if value is None or value == "" else _read(arguments[0], value, where)  # X is always first
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_read(arguments[0], item, f"{where}[{number}]") for number, item in enumerate(value))
    if _fits(wanted, origin, arguments, value):
        return value
    allowed = " or ".join(map(repr, arguments)) if origin is Literal else EXPECTED[origin or wanted]
    raise UserError("facts-wrong", f"Expected {allowed}, found {value!r:.60}.", where=where, fix="Correct the file.")


def _fits(wanted: Any, origin: Any, arguments: tuple[Any, ...], value: Any) -> bool:
    if origin is Literal:
        return value in arguments
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())
    return origin is None and type(value) is wanted and (wanted is not int or value in NUMBERS)


def _read_fields(wanted: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        what = f"Expected a table of {wanted.__name__}, found {value!r:.60}."
        raise UserError("facts-wrong", what, where=where, fix="Correct the file.")
    hints, known = typing.get_type_hints(wanted), {item.name: item for item in fields(wanted)}
    unknown = sorted(set(value) - set(known))
    if unknown:
        what = f"Unknown key {unknown[0]!r}; known: {', '.join(known)}."
        raise UserError("facts-wrong", what, where=where, fix="Correct the file.")
    try:
        return wanted(**{name: _read(hints[name], item, f"{where}: {name}") for name, item in value.items()})
    except TypeError as error:
        what = f"A key is missing: {re.sub(r'^.*missing.*?: ', '', str(error))}."
        raise UserError("facts-wrong", what, where=where, fix="Correct the file.") from None
