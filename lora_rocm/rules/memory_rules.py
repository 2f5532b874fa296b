"""Settings about memory: the allocator's limit, and the way of mapped files to the device."""

from __future__ import annotations

from lora_rocm.hardware.memory_budget import GIB, budget
from lora_rocm.rules.rule import Rule, Situation, When

MIN_LIMIT_BYTES = GIB
"""No limit is lower: the GPU's libraries would not even start, and the error would be misleading."""


def _limit(situation: Situation) -> str | None:
    gpu = situation.gpu
    found = budget(situation.facts, gpu) if gpu is not None else None
    if found is None or not found.capped:
        return None
    return str(max(found.total_bytes, MIN_LIMIT_BYTES))


MEMORY_RULES: tuple[Rule, ...] = (
    Rule(
        "memory-limit",
        "setting:memory_limit_bytes",
        _limit,
        "a full GPU raises an error that names the cure; without it the desktop freezes (APUs take the system's "
        "memory), or Windows moves tensors to main memory without a word and training crawls",
        "unsloth#7960 and #8482; AMD radeon-ryzen docs, limitations of Ryzen AI Max; TheRock docs/faq.md",
        When(systems=("linux", "windows")),
    ),
    Rule(
        "heap-copy",
        "setting:heap_copy",
        "true",
        "copies straight from mapped files stall, or read stale memory, on this APU: each tensor goes to memory of its "
        "own first, one at a time",
        "llama.cpp#28211, #25863 and #26543 (gfx1151)",
        When(systems=("linux", "windows"), gfx=("gfx1151",)),
    ),
)
