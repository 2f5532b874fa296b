"""Reads the installed torch and related packages from their files. It imports none of them.

Kernels in AMD wheels: Wheels of download.pytorch.org have rocBLAS's kernels in ``torch/lib/rocblas/library``, with the
architecture in each file name (TensileLibrary_lazy_gfx1100.dat). AMD's older wheels have the same files in a package
``_rocm_sdk_libraries_*``. AMD's multi-arch torch contains no kernels. They are in a package ``amd-torch-device-<gfx>``
for each architecture (TheRock RELEASES.md; packages like amd-torch-device-gfx11 have only attention kernels). MIOpen's
databases also name architectures for which the wheel has no kernels, so they prove nothing.

AOTriton, the attention library of ROCm's torch, has two parts: a library, with its version in
``torch/include/aotriton/config.h``, and folders of GPU images, each with a file ``__signature__``. This file is JSON
that contains the version of the Triton that built the images. That version ends in the AOTriton for which they were
built ("3.7.0+gitdb82b800.aotriton0.13"; aotriton python/write_image_signature.py). Images before 0.12 lack this ending.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from lora_rocm.foundation.safe_path import python_command
from lora_rocm.hardware.facts import Torch
from lora_rocm.hardware.probe.sources import ProbeReads

LIBRARIES = re.compile(
    r"triton|triton_rocm|pytorch_triton_rocm|triton_windows|bitsandbytes|flash_attn|xformers|torchvision|torchao"
    r"|rocm|rocm_sdk_\w+|amd_torch_device_\w+|amd_aiter|aiter|deepspeed|transformer_engine|liger_kernel"
)
DIST_INFO = re.compile(r"(?P<name>[A-Za-z0-9_.]+)-(?P<version>[^-]+)\.dist-info")
DEVICE_PACKAGE = re.compile(r"amd_torch_device_(gfx(?:9[0-9a-f]{2}|1[0-9]{3}))")
DEVICE_EXTRA = re.compile(r"^Provides-Extra: device[-_]gfx", re.MULTILINE)
KERNEL_FILE = re.compile(r"TensileLibrary_lazy_(gfx[0-9a-f]{3,4})\.dat|Kernels\.so-\d+-(gfx[0-9a-f]{3,4})\b.*\.hsaco")
AOTRITON = re.compile(r"libaotriton_v2\.so\.(\d+\.\d+(?:\.\d+)?)")
AOTRITON_DEFINE = re.compile(r"^\s*#\s*define\s+AOTRITON_VERSION_(MAJOR|MINOR|PATCH)\s+(\d+)[uU]?\b", re.MULTILINE)
AOTRITON_WHOLE = re.compile(r"^\s*#\s*define\s+AOTRITON_VERSION\s+\"?(\d+\.\d+(?:\.\d+)?)", re.MULTILINE)
AOTRITON_OF_IMAGES = re.compile(r"aotriton(\d+\.\d+(?:\.\d+)?)")
VERSION_FIELD = r"^{name}\s*(?::[^=\n]*)?=\s*['\"]([^'\"]+)['\"]"
FILE_BYTES = 1 << 20
ASK_TIMEOUT_S = 120.0
# torch.cuda.get_arch_list() is empty without a usable GPU; the function below it always answers.
ASK = "import torch; f = getattr(torch._C, '_cuda_getArchFlags', None); print('archs:', (f() if f else None) or '')"


def installed(reads: ProbeReads, deep: bool) -> tuple[Torch | None, dict[str, str]]:
    """Return the torch that ``import torch`` would find, or None, and the versions of related packages by name."""
    libraries: dict[str, str] = {}
    torch: Torch | None = None
    for folder in reads.sources.site_packages:
        packages = _packages(reads, folder)
        for name, version in packages.items():
            if LIBRARIES.fullmatch(name):
                libraries.setdefault(name if name == "flash_attn" else name.replace("_", "-"), version)
        if torch is None and (folder / "torch" / "version.py").exists():
            torch = _torch(reads, folder, packages, deep)
    return torch, dict(sorted(libraries.items()))


def _packages(reads: ProbeReads, folder: Path) -> dict[str, str]:
    """Return the versions of the packages in a folder, by package name as spelled in the file names."""
    try:
        names = os.listdir(folder)
    except OSError:  # sys.path often has entries that are not folders
        return {}
    found = (DIST_INFO.fullmatch(name) for name in names)
    return {one["name"].lower(): one["version"] for one in found if one}


def _torch(reads: ProbeReads, folder: Path, packages: dict[str, str], deep: bool) -> Torch | None:
    text = _text(reads, folder / "torch" / "version.py")
    version = _field(text, "__version__") or packages.get("torch")
    if version is None:
        reads.note("version of torch", f"{folder / 'torch' / 'version.py'} does not contain it")
        return None
    torch = Torch(version, hip=_field(text, "hip"), cuda=_field(text, "cuda"))
    if torch.hip is not None:
        images = _aotriton_images(folder)
        torch = replace(torch, aotriton=_aotriton(folder), aotriton_images=images, rocm=_field(text, "rocm"))
        metadata = _device_packages(reads, folder, packages)
        if metadata is not None:
            return replace(torch, arch_list=metadata, arch_source="metadata")
        files = _kernel_files(folder)
        if files:
            return replace(torch, arch_list=files, arch_source="files")
    if torch.hip is not None or (torch.cuda is not None and deep):
        asked = _ask(reads, folder, torch)
        if asked:
            return replace(torch, arch_list=asked, arch_source="asked")
    return torch


def _text(reads: ProbeReads, path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(FILE_BYTES).decode("utf-8", "replace")
    except OSError as error:
        reads.note(str(path), error)
        return ""


def _field(text: str, name: str) -> str | None:
    """Return the text that a Python file assigns to a name ("hip = '7.2.53211'"), or None if there is none."""
    found = re.search(VERSION_FIELD.format(name=name), text, re.MULTILINE)
    return found.group(1) if found else None


def _device_packages(reads: ProbeReads, folder: Path, packages: dict[str, str]) -> tuple[str, ...] | None:
    """Return the architectures with an installed kernel package, for AMD's multi-arch torch; None for another torch."""
    found = {one.group(1) for name in packages if (one := DEVICE_PACKAGE.fullmatch(name))}
    if found:
        return _sorted(found)
    metadata = folder / f"torch-{packages.get('torch', '')}.dist-info" / "METADATA"
    is_multi = metadata.exists() and DEVICE_EXTRA.search(_text(reads, metadata))
    return () if is_multi else None


def _kernel_files(folder: Path) -> tuple[str, ...]:
    """Return the architectures in the file names of rocBLAS's kernels, in torch itself or in AMD's library packages."""
    places = [folder / "torch" / "lib"]
    for package in folder.glob("_rocm_sdk_libraries*"):
        places += [package / "lib", package / "bin"]
    found: set[str] = set()
    for place in places:
        try:
            names = os.listdir(place / "rocblas" / "library")
        except OSError:
            continue
        found |= {one.group(1) or one.group(2) for name in names if (one := KERNEL_FILE.fullmatch(name))}
    return _sorted(found)


def _sorted(gfx: set[str]) -> tuple[str, ...]:
    return tuple(sorted(gfx, key=lambda name: (len(name), name)))


def _aotriton(folder: Path) -> str | None:
    """Return the version of the bundled attention library, or None if unknown.

    The version comes from the library's header, or else from its file name, which has no version on Windows.
    """
    header = _optional_text(folder / "torch" / "include" / "aotriton" / "config.h")
    parts = dict(AOTRITON_DEFINE.findall(header))
    if "MAJOR" in parts and "MINOR" in parts:
        return ".".join(parts[name] for name in ("MAJOR", "MINOR", "PATCH") if name in parts)
    if whole := AOTRITON_WHOLE.search(header):
        return whole.group(1)
    try:
        names = os.listdir(folder / "torch" / "lib")
    except OSError:
        return None
    versions = sorted((one.group(1) for name in names if (one := AOTRITON.match(name))), key=len)
    return versions[-1] if versions else None


def _aotriton_images(folder: Path) -> dict[str, str]:
    """Return the AOTriton version for which each folder of GPU images was built.

    Folders without this version are omitted.
    """
    images = folder / "torch" / "lib" / "aotriton.images"
    try:
        names = sorted(os.listdir(images))
    except OSError:  # a torch without AOTriton
        return {}
    built_for = {
        name: set(AOTRITON_OF_IMAGES.findall(_optional_text(images / name / "__signature__"))) for name in names
    }
    return {name: versions.pop() for name, versions in built_for.items() if len(versions) == 1}


def _optional_text(path: Path) -> str:
    """Return the text of a file that not every wheel has; empty if it is missing."""
    try:
        with path.open("rb") as file:
            return file.read(FILE_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _ask(reads: ProbeReads, folder: Path, torch: Torch) -> tuple[str, ...]:
    """Return the architectures that torch itself reports.

    torch is started once per installation; the answer is cached under the wheel's RECORD file, which each installation
    changes.
    """
    try:
        record = os.stat(folder / f"torch-{torch.version}.dist-info" / "RECORD")
        about = f"{folder} {torch.version} {record.st_size} {record.st_mtime_ns}"
    except OSError:
        about = f"{folder} {torch.version}"
    boot, reads.boot = reads.boot, ""  # the answer about a wheel outlives a reboot
    said = reads.ask("torch", python_command("-c", ASK, python=reads.sources.python), ASK_TIMEOUT_S, about)
    reads.boot = boot
    found = re.search(r"^archs: *(.*)$", said or "", re.MULTILINE)
    if said is not None and found is None:
        reads.note("architectures of torch", "its output has an unexpected format")
    return tuple(found.group(1).split()) if found else ()
