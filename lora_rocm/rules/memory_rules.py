"""Settings about memory: the allocator's limit, and the way of mapped files to the device."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from lora_rocm.foundation.tables import by_name, read_rows
from lora_rocm.hardware.memory_budget import GIB, budget
from lora_rocm.rules.rule import Rule, Situation

MIN_LIMIT_BYTES = GIB
"""No limit is lower: the GPU's libraries would not even start, and the error would be misleading."""


def _memory_limit(situation: Situation) -> str | None:
    gpu = situation.gpu
    found = budget(situation.facts, gpu) if gpu is not None else None
    if found is None or not found.capped:
        return None
    return str(max(found.total_bytes, MIN_LIMIT_BYTES))


FUNCTIONS = by_name(_memory_limit)


@cache
def memory_rules() -> tuple[Rule, ...]:
    """The rules about memory. See ``read_rows`` for errors."""
    return read_rows(Path(__file__).with_name("memory_rules.toml"), Rule, FUNCTIONS)
