"""The recorded machines: honest about where they come from, readable, and consistent in themselves."""

from __future__ import annotations

import json

import pytest

from lora_rocm.hardware.archs import arch_of
from lora_rocm.hardware.facts import HostFacts, facts_from_json, load_facts
from tests.golden import HOSTS, machines

ORIGIN = "constructed from documentation; recorded on no machine"
NO_TABLE_KNOWS = {"linux-gfx1299": "gfx1299", "linux-gfx1250": "gfx1250", "broken-unknown-gpu": None}
RESERVED_BYTES = 3 << 30  # what firmware keeps of a round number of GiB


def host(name: str) -> HostFacts:
    return load_facts(HOSTS / f"{name}.json")


def test_there_are_many() -> None:
    assert len(machines()) >= 23
    assert {host(name).system for name in machines()} == {"linux", "windows", "macos"}
    distributions = {linux.distribution for name in machines() if (linux := host(name).linux)}
    assert {"ubuntu", "fedora", "arch", "debian"} <= distributions


@pytest.mark.parametrize("name", machines())
def test_says_that_it_is_constructed(name: str) -> None:
    assert host(name).origin == ORIGIN


@pytest.mark.parametrize("name", machines())
def test_goes_through_json_unchanged(name: str) -> None:
    facts = host(name)
    assert facts_from_json(json.loads(json.dumps(facts.to_json())), name) == facts


@pytest.mark.parametrize("name", machines())
def test_architectures_are_known_or_deliberately_not(name: str) -> None:
    for gpu in host(name).amd_gpus:
        arch = arch_of(gpu.gfx)
        if name in NO_TABLE_KNOWS:
            assert arch is None and gpu.gfx == NO_TABLE_KNOWS[name]
        else:
            assert arch is not None and arch.integrated == gpu.integrated


@pytest.mark.parametrize("name", machines())
def test_is_consistent(name: str) -> None:
    facts = host(name)
    assert (facts.linux is not None) == (facts.system == "linux")
    assert (facts.windows is not None) == (facts.system == "windows")
    assert facts.memory_bytes is not None and facts.memory_available_bytes is not None
    assert 0 < facts.memory_available_bytes < facts.memory_bytes
    for vendor in ("amd", "nvidia", "apple"):
        indices = [gpu.index for gpu in facts.gpus if gpu.vendor == vendor]
        assert indices == list(range(len(indices)))
    nodes = [gpu.node for gpu in facts.amd_gpus if gpu.node is not None]
    assert nodes == sorted(set(nodes))
    if facts.linux is not None and facts.linux.ttm_pages_limit is not None:
        limit_bytes = facts.linux.ttm_pages_limit * 4096
        assert limit_bytes < facts.memory_bytes
        assert all(gpu.gtt_bytes is None or gpu.gtt_bytes <= limit_bytes for gpu in facts.gpus)


@pytest.mark.parametrize("name", machines())
def test_torch_is_of_one_kind(name: str) -> None:
    torch = host(name).torch
    if torch is None:
        return
    assert not (torch.hip and torch.cuda)
    assert ("rocm" in torch.version) == (torch.hip is not None)
    assert (torch.arch_list is None) == (torch.arch_source is None)


@pytest.mark.parametrize("name", machines())
def test_rocm_is_named_by_its_own_numbers(name: str) -> None:
    """HIP and ROCm part after 7.14, and every text and comparison about ROCm goes by ``rocm_version``."""
    torch = host(name).torch
    if torch is None or torch.hip is None:
        return
    numbers = [int(number) for number in (torch.rocm_version or "").split(".")]
    assert torch.version.endswith(f"+rocm{torch.rocm_version}")
    assert torch.hip.startswith(f"{numbers[0]}.{numbers[1]}.") or (numbers[0] >= 10 and torch.hip.startswith("7.1"))


def test_memory_of_a_split_apu_adds_up() -> None:
    facts = host("windows-strix-halo")
    assert facts.memory_bytes is not None and facts.gpus[0].vram_bytes is not None
    assert (128 << 30) - RESERVED_BYTES < facts.memory_bytes + facts.gpus[0].vram_bytes <= 128 << 30
