"""What the plan says about memory on recorded machines."""

import pytest

from lora_rocm.hardware.facts import load_facts
from lora_rocm.hardware.memory_budget import GIB, budget
from lora_rocm.hardware.settings import Settings
from lora_rocm.rules.environment import plan
from lora_rocm.rules.this_machine import situation_here
from tests.golden import HOSTS, machines

LIMITED = {  # machines whose selected GPU is held to a budget
    "broken-no-permission", "linux-gfx1299", "linux-radeon-vii", "linux-rx5600xt", "linux-rx6700xt", "linux-rx6800xt",
    "linux-rx7800xt-sdma", "linux-rx7900xtx", "linux-rx9060xt-pair", "linux-rx9070xt", "linux-strix-halo",
    "linux-strix-halo-tuned", "linux-strix-point", "windows-gfx1153", "windows-krackan", "windows-rx7900xtx-raphael",
    "windows-rx9070xt", "windows-strix-halo", "wsl-rx7900xtx", "linux-gfx1250", "linux-r9700", "linux-r9700-quiet",
    "linux-strix-halo-2604", "linux-strix-halo-mes86", "windows-rx7600-mixed", "windows-rx7800xt-next",
    "windows-rx9060xt", "windows-rx9060xt-fits", "windows-rx9060xt-next",
}  # fmt: skip
HEAP = {
    "linux-strix-halo", "linux-strix-halo-2604", "linux-strix-halo-mes86", "linux-strix-halo-tuned",
    "windows-strix-halo",
}  # fmt: skip


def settings(machine: str) -> Settings:
    return plan(situation_here(facts=load_facts(HOSTS / f"{machine}.json"))).settings


@pytest.mark.parametrize("machine", machines())
def test_where_the_allocator_is_limited(machine: str) -> None:
    facts = load_facts(HOSTS / f"{machine}.json")
    found, gpu = settings(machine).memory_limit_bytes, situation_here(facts=facts).gpu
    assert (found is not None) == (machine in LIMITED)
    if found is not None and gpu is not None:
        wanted = budget(facts, gpu)
        assert wanted is not None and found == wanted.total_bytes


@pytest.mark.parametrize("machine", machines())
def test_where_tensors_are_copied_to_the_heap(machine: str) -> None:
    assert settings(machine).heap_copy == (machine in HEAP)


def test_a_full_apu_still_gets_a_limit() -> None:
    facts = load_facts(HOSTS / "linux-strix-halo.json")
    full = type(facts)(**{**vars(facts), "memory_available_bytes": 0})
    assert plan(situation_here(facts=full)).settings.memory_limit_bytes == GIB
