"""Reads facts about this machine without torch, in milliseconds. It never fails.

Facts that cannot be read are listed in ``HostFacts.unread``. Standard library only.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace

from lora_rocm.hardware.facts import HostFacts
from lora_rocm.hardware.probe import gpu_probe, linux_probe, windows_probe
from lora_rocm.hardware.probe.sources import ProbeReads, Sources, this_machine
from lora_rocm.hardware.probe.torch_files import installed

Reader = Callable[[ProbeReads, HostFacts, bool], HostFacts]
READERS: Mapping[str, Reader] = {
    "linux": linux_probe.read,
    "windows": windows_probe.read,
    "macos": gpu_probe.read_macos,
}
VARIABLES = re.compile(
    r"(?:HIP|HSA|ROCR|ROCM|ROCBLAS|HIPBLASLT|MIOPEN|PYTORCH|TORCH|AMD|GPU|CUDA|NCCL|RCCL|FLASH_ATTENTION|MIGRAPHX"
    r"|TORCHDYNAMO|TORCHINDUCTOR|PAL)_\w+|DISABLE_ADDMM_HIP_LT"
)
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
LIBRARY_PATH = "LD_LIBRARY_PATH"
LIBRARY_PARTS = re.compile(r"rocm|hip|amdgpu", re.IGNORECASE)


def probe(deep: bool = False, sources: Sources | None = None) -> HostFacts:
    """Read all facts about this machine that can be read.

    Args:
        deep: also read the slow facts (kernel log, display driver events, rpm database), and retry tools that failed
            before.
        sources: replacement for the machine's own sources in tests.
    """
    look = ProbeReads(sources or this_machine(), again=deep)
    bits = struct.calcsize("P") * 8
    python = f"{'.'.join(map(str, sys.version_info[:3]))} {bits}-bit"
    facts = HostFacts("probe", look.sources.system, python, cpu="", cpu_count=look.sources.cpu_count)
    for what, part in (("machine", READERS[look.sources.system]), ("torch", _with_torch), ("disk", _with_disk)):
        try:
            facts = part(look, facts, deep)
        except (OSError, ValueError) as error:
            look.note(what, str(error))
    return replace(facts, variables=relevant(look.sources.environ), unread=tuple(look.unread))


def _with_torch(reads: ProbeReads, facts: HostFacts, deep: bool) -> HostFacts:
    torch, libraries = installed(reads, deep)
    return replace(facts, torch=torch, libraries=libraries)


def _with_disk(reads: ProbeReads, facts: HostFacts, deep: bool) -> HostFacts:
    return replace(facts, disk_free_bytes=reads.sources.disk(reads.sources.path("."))[1])


def relevant(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ROCm, HIP, MIOpen or torch read, except those with a name that suggests a secret."""
    found = {name: value for name, value in environ.items() if VARIABLES.fullmatch(name) and not SECRET.search(name)}
    found = {name: value.encode("utf-8", "replace").decode() for name, value in found.items()}
    parts = [part for part in environ.get(LIBRARY_PATH, "").split(":") if LIBRARY_PARTS.search(part)]
    return dict(sorted({**found, **({LIBRARY_PATH: ":".join(parts)} if parts else {})}.items()))
