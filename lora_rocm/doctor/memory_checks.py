"""Checks whether a training run fits: memory of APUs, main memory, swap, shared memory and disk.

Sources: TheRock docs/faq.md (torch uses the larger of carve-out and GTT; ttm.pages_limit); unsloth#7960 (amdgpu.gttsize
alone does not raise the limit). The thresholds are lora-rocm's own.
"""

from __future__ import annotations

from typing import Literal

from lora_rocm.doctor.cures import family, kernel_parameter
from lora_rocm.doctor.finding import Check, Finding, finding
from lora_rocm.foundation.units import size_text
from lora_rocm.hardware.facts import Gpu
from lora_rocm.hardware.memory_budget import GIB, PAGE_BYTES, host_reserve
from lora_rocm.hardware.selftest_result import MEMORY_TOTAL
from lora_rocm.rules.environment import EnvPlan
from lora_rocm.rules.rule import Situation

COMFORTABLE_BYTES = 16 * GIB
"""Approximate GPU memory for SDXL LoRA training without offloading or recomputation."""
WORTH_RAISING = 0.75
"""The limit of mapped memory is reported if it is below this share of the possible limit."""
SMALL_CARVE_OUT_BYTES = 4 * GIB
LEAST_MEMORY_BYTES = 20 * GIB
"""Smallest sum of main memory and swap that is not reported. A base model is read into it, in the worst case as
float32.
"""
FREE_MEMORY_BYTES = 8 * GIB
"""Smallest free main memory that is not reported. A base model such as SDXL is a file of 7 GB that is read into it."""
SHM_BYTES, DISK_BYTES = GIB, 20 * GIB
STRIX_HALO, MOST_DEDICATED_GIB = "gfx1151", 64
"""Architecture of Strix Halo, and the largest dedicated memory in GiB that is reported to work well on Windows.

Source: TheRock#3032.
"""


def _apu(situation: Situation, system: str) -> Gpu | None:
    """Return the run's GPU if it is an APU and the machine has this operating system, else None."""
    gpu, facts = situation.gpu, situation.facts
    return gpu if gpu is not None and gpu.integrated and facts.system == system and not facts.is_wsl else None


def _mappable(situation: Situation, gpu: Gpu) -> int | None:
    """Return the bytes of main memory that the APU may map: GTT, or the limit for all GPUs if that is lower."""
    linux = situation.facts.linux
    pages = linux.ttm_pages_limit if linux is not None else None
    known = [size for size in (gpu.gtt_bytes, pages * PAGE_BYTES if pages else None) if size]
    return min(known) if known else None


def _gtt(situation: Situation, plan: EnvPlan) -> Finding | None:
    gpu, memory = _apu(situation, "linux"), situation.facts.memory_bytes
    mapped = _mappable(situation, gpu) if gpu is not None else None
    if gpu is None or memory is None or mapped is None:
        return None
    could_gib = (memory - host_reserve(memory)) // GIB
    pool = max(mapped, gpu.vram_bytes or 0)
    if pool >= WORTH_RAISING * could_gib * GIB:
        return None
    linux = situation.facts.linux
    boot = linux.boot_parameters if linux is not None else {}
    evidence = f"mappable {size_text(mapped)} (GTT), main memory {size_text(memory)}, carve-out "
    evidence += size_text(gpu.vram_bytes) if gpu.vram_bytes is not None else "unknown"
    if "amdgpu.gttsize" in boot:
        evidence += f"; amdgpu.gttsize={boot['amdgpu.gttsize']} alone is deprecated and does not raise the limit"
    other = {"ttm": "amdttm.pages_limit", "amdttm": "ttm.pages_limit"}[_ttm(situation)]
    if other in boot:
        evidence += f"; {other}={boot[other]} is set, but the module that is loaded is {_ttm(situation)}"
    cure = kernel_parameter(situation.facts, _pages_limit(situation, could_gib))
    return finding(
        "gtt",
        situation,
        level="harms" if pool < COMFORTABLE_BYTES else "slows",
        cure=cure,
        pool=size_text(pool),
        could_gib=could_gib,
        evidence=evidence,
    )


def _ttm(situation: Situation) -> Literal["ttm", "amdttm"]:
    """Return the name of the loaded kernel module that limits mapped memory."""
    return situation.facts.linux.ttm_module if situation.facts.linux is not None else "ttm"


def _pages_limit(situation: Situation, gib: int) -> str:
    """Return the kernel parameter with which the GPUs may map ``gib`` GiB."""
    return f"{_ttm(situation)}.pages_limit={gib * GIB // PAGE_BYTES}"


def _carve_out(situation: Situation, plan: EnvPlan) -> Finding | None:
    gpu, memory = _apu(situation, "linux"), situation.facts.memory_bytes
    if gpu is None or gpu.vram_bytes is None or gpu.vram_bytes <= SMALL_CARVE_OUT_BYTES or memory is None:
        return None
    together = gpu.vram_bytes + memory
    could_gib = (together - host_reserve(together)) // GIB
    if memory >= COMFORTABLE_BYTES and (_mappable(situation, gpu) or 0) < gpu.vram_bytes:
        return None
    return finding(
        "carve-out",
        situation,
        level="harms" if memory < COMFORTABLE_BYTES else "slows",
        cure=kernel_parameter(situation.facts, _pages_limit(situation, could_gib)),
        vram=size_text(gpu.vram_bytes),
        main_memory=size_text(memory),
    )


def _dedicated(situation: Situation, plan: EnvPlan) -> Finding | None:
    """Report an unsuitable size of an APU's dedicated memory on Windows (Variable Graphics Memory)."""
    gpu, memory = _apu(situation, "windows"), situation.facts.memory_bytes
    if gpu is None or gpu.vram_bytes is None or memory is None:
        return None
    together = memory + gpu.vram_bytes
    beyond = gpu.gfx == STRIX_HALO and gpu.vram_bytes > MOST_DEDICATED_GIB * GIB
    if together < 24 * GIB or (COMFORTABLE_BYTES // 2 <= gpu.vram_bytes <= 0.8 * together and not beyond):
        return None
    too_much = gpu.vram_bytes > 0.8 * together
    good_gib = min(MOST_DEDICATED_GIB, max(8, int(together / GIB / 2) // 8 * 8))
    if too_much:
        effect = "little main memory is left: loading a base model swaps"
    elif beyond:
        effect = "with 96 GB, a model was reported to run out of shared memory; with 64 GB it did not"
    else:
        effect = "data that does not fit is silently moved to shared memory, which is reported to be slow"
    return finding(
        "dedicated-memory",
        situation,
        level="harms" if too_much else "slows",
        vram=size_text(gpu.vram_bytes),
        together=size_text(together),
        main_memory=size_text(memory),
        effect=effect,
        good_gib=good_gib,
    )


def _memory_seen(situation: Situation, plan: EnvPlan) -> Finding | None:
    """Report that torch found a different amount of memory in the self-test than the card has."""
    results = situation.verdict.results if situation.verdict is not None else ()
    seen = next((result.detail for result in results if result.name == MEMORY_TOTAL and result.status == "passed"), "")
    return finding("memory-seen", situation, seen=seen) if seen else None


def _main_memory(situation: Situation, plan: EnvPlan) -> Finding | None:
    facts = situation.facts
    if facts.memory_bytes is None or facts.memory_bytes + (facts.swap_bytes or 0) >= LEAST_MEMORY_BYTES:
        return None
    if facts.swap_bytes is None and facts.memory_bytes >= LEAST_MEMORY_BYTES // 2:
        return None
    swap = f", swap {size_text(facts.swap_bytes)}" if facts.swap_bytes is not None else ""
    return finding(
        "main-memory", situation, cure=_swap_cure(situation), main_memory=size_text(facts.memory_bytes), swap=swap
    )


def _memory_in_use(situation: Situation, plan: EnvPlan) -> Finding | None:
    """Report that other programs use most of the main memory."""
    facts = situation.facts
    total, free = facts.memory_bytes, facts.memory_available_bytes
    if total is None or free is None or total < 2 * FREE_MEMORY_BYTES or free >= FREE_MEMORY_BYTES:
        return None
    shared = situation.gpu is not None and situation.gpu.integrated
    return finding(
        "memory-in-use",
        situation,
        free=size_text(free),
        total=size_text(total),
        more=", and the GPU gets less of the memory that it shares" if shared else "",
    )


def _swap_cure(situation: Situation) -> tuple[str, ...]:
    linux = situation.facts.linux
    if situation.facts.system == "windows":
        return (
            "SystemPropertiesPerformance",
            "Advanced, Virtual memory, Change: custom size, initial and maximum 32768 MB.",
        )
    if linux is None:
        return ("Close other programs before a run.",)
    if linux.container:
        return ("Give the container more memory (docker run --memory).",)
    if linux.wsl:
        return (
            "In %UserProfile%\\.wslconfig on Windows, below [wsl2]: memory=24GB and swap=32GB.",
            "wsl.exe --shutdown",
        )
    if family(situation.facts).id in ("fedora", "ostree"):  # btrfs, which cannot swap to a plain file
        return ("sudo btrfs filesystem mkswapfile --size 32g /swapfile", "sudo swapon /swapfile")
    make = "sudo fallocate -l 32G /swapfile && sudo chmod 600 /swapfile && sudo mkswap /swapfile"
    return (make, "sudo swapon /swapfile")


def _shm(situation: Situation, plan: EnvPlan) -> Finding | None:
    linux = situation.facts.linux
    if linux is None or linux.shm_bytes is None or linux.shm_bytes >= SHM_BYTES:
        return None
    docker = "Start the container with: docker run --shm-size 8g ..."
    return finding(
        "shm",
        situation,
        cure=(docker,) if linux.container else ("sudo mount -o remount,size=8G /dev/shm",),
        shm=size_text(linux.shm_bytes),
    )


def _disk(situation: Situation, plan: EnvPlan) -> Finding | None:
    free = situation.facts.disk_free_bytes
    if free is None or free >= DISK_BYTES:
        return None
    return finding("disk", situation, free=size_text(free))


MEMORY_CHECKS: dict[str, Check] = {
    "carve-out": _carve_out,
    "dedicated-memory": _dedicated,
    "gtt": _gtt,
    "main-memory": _main_memory,
    "memory-in-use": _memory_in_use,
    "memory-seen": _memory_seen,
    "disk": _disk,
    "shm": _shm,
}
