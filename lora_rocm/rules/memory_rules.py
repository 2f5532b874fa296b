"""Settings about memory: the allocator's limit, and the way of mapped files to the device."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from lora_rocm.foundation.tables import read_table
from lora_rocm.hardware.memory_budget import GIB, budget
from lora_rocm.rules.rule import Rule, RuleTable, Situation

MIN_LIMIT_BYTES = GIB
"""No limit is lower: the GPU's libraries would not even start, and the error would be misleading."""


def _limit(situation: Situation) -> str | None:
    gpu = situation.gpu
    found = budget(situation.facts, gpu) if gpu is not None else None
    if found is None or not found.capped:
        return None
    return str(max(found.total_bytes, MIN_LIMIT_BYTES))


FUNCTIONS = {"memory_limit": _limit}


@cache
def memory_rules() -> tuple[Rule, ...]:
    """The rules about memory. See ``read_table`` for errors."""
    return read_table(Path(__file__).with_name("memory_rules.toml"), RuleTable, FUNCTIONS).rule
