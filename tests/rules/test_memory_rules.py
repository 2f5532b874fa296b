"""The plan's sentences about memory on recorded machines."""

import pytest

from lora_rocm.hardware.facts import load_facts
from lora_rocm.hardware.memory_budget import GIB
from lora_rocm.hardware.settings import Settings
from lora_rocm.rules.environment import plan
from lora_rocm.rules.memory_rules import budget_of
from lora_rocm.rules.this_machine import situation_here
from tests.golden import HOSTS, machines

UNLIMITED = {
    "apple-m3",
    "broken-unknown-gpu",
    "cpu-only",
    "nvidia-rtx4090",
}  # every AMD GPU with known memory is limited
HEAP = {
    "linux-strix-halo", "linux-strix-halo-2604", "linux-strix-halo-dkms", "linux-strix-halo-mes86",
    "linux-strix-halo-tuned", "linux-strix-point",
    "windows-strix-halo", "windows-strix-halo-96gb",
}  # fmt: skip
"""Integrated GPUs on Linux, and gfx1151 on Windows; not windows-krackan, which is integrated."""


def settings(machine: str) -> Settings:
    return plan(situation_here(facts=load_facts(HOSTS / f"{machine}.json"))).settings


@pytest.mark.parametrize("machine", machines())
def test_where_the_allocator_is_limited(machine: str) -> None:
    facts = load_facts(HOSTS / f"{machine}.json")
    found, gpu = settings(machine).memory_limit_bytes, situation_here(facts=facts).gpu
    assert (found is not None) == (machine not in UNLIMITED)
    if found is not None and gpu is not None:
        wanted = budget_of(facts, gpu)
        assert wanted is not None and found == wanted.limit_bytes


@pytest.mark.parametrize("machine", machines())
def test_where_tensors_are_copied_to_the_heap(machine: str) -> None:
    assert settings(machine).heap_copy == (machine in HEAP)


def test_a_full_apu_still_gets_a_limit() -> None:
    facts = load_facts(HOSTS / "linux-strix-halo.json")
    full = type(facts)(**{**vars(facts), "memory_available_bytes": 0})
    assert plan(situation_here(facts=full)).settings.memory_limit_bytes == GIB
