"""Rules about memory: the allocator's limit, and the copying of memory-mapped files to the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lora_rocm.foundation.tables import by_name, read_table
from lora_rocm.hardware.facts import Gpu, HostFacts
from lora_rocm.hardware.memory_budget import GIB, MemoryBudget, Reserves, budget
from lora_rocm.rules.rule import MachineRule, Situation

MIN_LIMIT_BYTES = GIB
"""Smallest value of the allocator's limit.

Below it, not even the GPU's libraries start, and the error is misleading.
"""


def budget_of(facts: HostFacts, gpu: Gpu | None) -> MemoryBudget | None:
    """Return the memory budget of a GPU of this machine, or None if there is no GPU or its memory could not be read."""
    return budget(facts, gpu, memory_table().reserves) if gpu is not None else None


def _capped(situation: Situation) -> MemoryBudget | None:
    found = budget_of(situation.facts, situation.gpu)
    return found if found is not None and found.capped else None


def _memory_limit(situation: Situation) -> str | None:
    found = _capped(situation)
    return None if found is None else str(max(found.limit_bytes, MIN_LIMIT_BYTES))


def _kept_free(situation: Situation) -> str | None:
    found = _capped(situation)
    return str(found.kept_free_bytes) if found is not None and found.kept_free_bytes else None


def _libraries(situation: Situation) -> str | None:
    found = _capped(situation)
    return str(found.library_bytes) if found is not None and found.library_bytes else None


FUNCTIONS = by_name(_memory_limit, _kept_free, _libraries)


@dataclass(frozen=True)
class MemoryTable:
    """Contents of ``memory_rules.toml``."""

    reserves: Reserves
    rule: tuple[MachineRule, ...]


@cache
def memory_table() -> MemoryTable:
    """Return the contents of ``memory_rules.toml``. Errors are as in ``read_table``."""
    return read_table(Path(__file__).with_name("memory_rules.toml"), MemoryTable, FUNCTIONS)
