"""Checks whether a training run fits: memory of APUs, main memory, swap, shared memory and disk.

Sources: TheRock docs/faq.md (torch takes the larger of carve-out and GTT; ttm.pages_limit); unsloth#7960
(amdgpu.gttsize alone does not raise the limit). The thresholds are our own.
"""

from __future__ import annotations

from lora_rocm.doctor.cures import family, kernel_parameter
from lora_rocm.doctor.finding import Check, Finding
from lora_rocm.foundation.units import size_text
from lora_rocm.hardware.facts import Gpu
from lora_rocm.hardware.memory_budget import GIB, PAGE_BYTES, host_reserve
from lora_rocm.rules.environment import EnvPlan
from lora_rocm.rules.rule import Situation

COMFORTABLE_BYTES = 16 * GIB
"""Rough GPU memory of SDXL LoRA training with everything kept."""
WORTH_RAISING = 0.75
"""A limit below this share of the possible one is reported."""
SMALL_CARVE_OUT_BYTES = 4 * GIB
LEAST_MEMORY_BYTES = 20 * GIB
"""Main memory plus swap: a base model is read into it, at worst in float32."""
FREE_MEMORY_BYTES = 8 * GIB
"""A base model such as SDXL is a file of 7 GB that is read into main memory."""
SHM_BYTES, DISK_BYTES = GIB, 20 * GIB
OURS = "the limit is our estimate"
TTM_SOURCE = f"TheRock docs/faq.md; unsloth#7960; {OURS}"


def _apu(situation: Situation, system: str) -> Gpu | None:
    """The run's GPU if it is an APU on this operating system, else None."""
    gpu, facts = situation.gpu, situation.facts
    return gpu if gpu is not None and gpu.integrated and facts.system == system and not facts.is_wsl else None


def _mappable(situation: Situation, gpu: Gpu) -> int | None:
    """Bytes of main memory that the APU may map: GTT, or the limit for all GPUs if that is lower."""
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
    boot = situation.facts.linux.boot_parameters if situation.facts.linux is not None else {}
    evidence = f"mappable {size_text(mapped)} (GTT), main memory {size_text(memory)}, carve-out "
    evidence += size_text(gpu.vram_bytes) if gpu.vram_bytes is not None else "unknown"
    if "amdgpu.gttsize" in boot:
        evidence += f"; amdgpu.gttsize={boot['amdgpu.gttsize']} alone is deprecated and does not raise the limit"
    cure = kernel_parameter(situation.facts, f"ttm.pages_limit={could_gib * GIB // PAGE_BYTES}")
    return Finding(
        "gtt",
        "harms" if pool < COMFORTABLE_BYTES else "slows",
        f"The GPU may map {size_text(pool)} of memory, where {could_gib} GiB are possible",
        evidence,
        "a run that needs more is refused or has to save memory, which is slower",
        (*cure, "It is a limit: memory that the GPU does not use stays free for other programs."),
        TTM_SOURCE,
    )


def _carve_out(situation: Situation, plan: EnvPlan) -> Finding | None:
    gpu, memory = _apu(situation, "linux"), situation.facts.memory_bytes
    if gpu is None or gpu.vram_bytes is None or gpu.vram_bytes <= SMALL_CARVE_OUT_BYTES or memory is None:
        return None
    together = gpu.vram_bytes + memory
    could_gib = (together - host_reserve(together)) // GIB
    if memory >= COMFORTABLE_BYTES and (_mappable(situation, gpu) or 0) < gpu.vram_bytes:
        return None
    parameter = f"ttm.pages_limit={could_gib * GIB // PAGE_BYTES}"
    return Finding(
        "carve-out",
        "harms" if memory < COMFORTABLE_BYTES else "slows",
        "The BIOS sets more memory aside for the GPU than is good",
        f"carve-out {size_text(gpu.vram_bytes)}, main memory that is left {size_text(memory)}",
        "torch uses the larger of carve-out and mapped memory; the other lies idle, and loading a model may swap",
        (
            "In the BIOS: set UMA frame buffer (dedicated graphics memory) to the smallest, 512 MB.",
            *kernel_parameter(situation.facts, parameter),
        ),
        TTM_SOURCE,
    )


def _dedicated(situation: Situation, plan: EnvPlan) -> Finding | None:
    """Windows: the division of an APU's memory by Variable Graphics Memory."""
    gpu, memory = _apu(situation, "windows"), situation.facts.memory_bytes
    if gpu is None or gpu.vram_bytes is None or memory is None:
        return None
    together = memory + gpu.vram_bytes
    if together < 24 * GIB or COMFORTABLE_BYTES // 2 <= gpu.vram_bytes <= 0.8 * together:
        return None
    too_much = gpu.vram_bytes > 0.8 * together
    good_gib = min(64, max(8, int(together / GIB / 2) // 8 * 8))
    effect = (
        "little main memory is left: loading a base model swaps"
        if too_much
        else "what does not fit goes to shared memory without a word, which is reported to be slow"
    )
    return Finding(
        "dedicated-memory",
        "harms" if too_much else "slows",
        f"The GPU has {size_text(gpu.vram_bytes)} of dedicated memory, of {size_text(together)} in all",
        f"dedicated {size_text(gpu.vram_bytes)} (driver), main memory {size_text(memory)}",
        effect,
        (
            f"AMD Software: Adrenalin, Performance, Tuning, Variable Graphics Memory: about {good_gib} GB.",
            "Then restart Windows. Without that page: UMA frame buffer in the BIOS.",
        ),
        f"Lemonade FAQ; radeon-ryzen documentation, limitations of Windows; {OURS}",
    )


def _main_memory(situation: Situation, plan: EnvPlan) -> Finding | None:
    facts = situation.facts
    if facts.memory_bytes is None or facts.memory_bytes + (facts.swap_bytes or 0) >= LEAST_MEMORY_BYTES:
        return None
    if facts.swap_bytes is None and facts.memory_bytes >= LEAST_MEMORY_BYTES // 2:
        return None
    swap = f", swap {size_text(facts.swap_bytes)}" if facts.swap_bytes is not None else ""
    return Finding(
        "main-memory",
        "harms",
        "Main memory is small for loading a base model",
        f"main memory {size_text(facts.memory_bytes)}{swap}",
        "a model such as SDXL is read into main memory first: the system may kill the run",
        _swap_cure(situation),
        OURS,
    )


def _memory_in_use(situation: Situation, plan: EnvPlan) -> Finding | None:
    """Most memory is in use by other programs."""
    facts = situation.facts
    total, free = facts.memory_bytes, facts.memory_available_bytes
    if total is None or free is None or total < 2 * FREE_MEMORY_BYTES or free >= FREE_MEMORY_BYTES:
        return None
    shared = situation.gpu is not None and situation.gpu.integrated
    return Finding(
        "memory-in-use",
        "slows",
        "Other programs hold most of the main memory",
        f"{size_text(free)} are free of {size_text(total)}",
        "loading a base model swaps" + (", and the GPU gets less of the memory that it shares" if shared else ""),
        ("Close other programs, browsers first, then look again: lora-rocm doctor",),
        OURS,
    )


def _swap_cure(situation: Situation) -> tuple[str, ...]:
    linux = situation.facts.linux
    if situation.facts.system == "windows":
        return ("SystemPropertiesPerformance", "Advanced, Virtual memory, Change: custom size, 32768 MB for both.")
    if linux is None:
        return ("Close other programs before a run.",)
    if linux.container:
        return ("Give the container more memory (docker run --memory).",)
    if linux.wsl:
        return (
            "In %UserProfile%\\.wslconfig on Windows, below [wsl2]: memory=24GB and swap=32GB.",
            "wsl.exe --shutdown",
        )
    if family(situation.facts) in ("fedora", "ostree"):  # btrfs, which cannot swap to a plain file
        return ("sudo btrfs filesystem mkswapfile --size 32g /swapfile", "sudo swapon /swapfile")
    make = "sudo fallocate -l 32G /swapfile && sudo chmod 600 /swapfile && sudo mkswap /swapfile"
    return (make, "sudo swapon /swapfile")


def _shm(situation: Situation, plan: EnvPlan) -> Finding | None:
    linux = situation.facts.linux
    if linux is None or linux.shm_bytes is None or linux.shm_bytes >= SHM_BYTES:
        return None
    docker = "Start the container with: docker run --shm-size 8g ..."
    return Finding(
        "shm",
        "note",
        "Shared memory is small",
        f"/dev/shm holds {size_text(linux.shm_bytes)}",
        "runs with runtime.workers above 0, or on several GPUs, may die with a bus error; by default there are none",
        (docker,) if linux.container else ("sudo mount -o remount,size=8G /dev/shm",),
        f"https://docs.pytorch.org/docs/stable/multiprocessing.html; {OURS}",
    )


def _disk(situation: Situation, plan: EnvPlan) -> Finding | None:
    free = situation.facts.disk_free_bytes
    if free is None or free >= DISK_BYTES:
        return None
    return Finding(
        "disk",
        "harms",
        "The disk is nearly full",
        f"{size_text(free)} are free where lora-rocm keeps its files",
        "a base model (SDXL: 7 GB), caches and checkpoints need room; a run stops when the disk is full",
        ("lora-rocm cache stats", "Free at least 20 GB, or put runs and cache on another disk."),
        OURS,
    )


MEMORY_CHECKS: dict[str, Check] = {
    "carve-out": _carve_out,
    "dedicated-memory": _dedicated,
    "gtt": _gtt,
    "main-memory": _main_memory,
    "memory-in-use": _memory_in_use,
    "disk": _disk,
    "shm": _shm,
}
