"""The memory budget of every recorded machine, and what it does with facts that are missing."""

from dataclasses import replace

import pytest

from lora_rocm.hardware.facts import Gpu, HostFacts, Linux, load_facts
from lora_rocm.hardware.gpu_select import select
from lora_rocm.hardware.memory_budget import GIB, budget, host_reserve
from tests.golden import HOSTS, machines

# Reviewed by hand: GiB of each GPU in order, and whether the allocator is held to it.
REVIEWED: dict[str, list[tuple[float, bool] | None]] = {
    "apple-m3": [None],
    "broken-no-permission": [(19.0, True)],
    "broken-unknown-gpu": [None],
    "cpu-only": [None],
    "linux-gfx1250": [(431.0, True)],
    "linux-gfx1299": [(31.0, True)],
    "linux-mi300x": [(192.0, False)] * 8,
    "linux-r9700": [(30.9, True)],
    "linux-r9700-quiet": [(30.9, True)],
    "linux-radeon-vii": [(15.2, True)],
    "linux-rx5600xt": [(5.5, True)],
    "linux-rx6700xt": [(11.4, True)],
    "linux-rx6800xt": [(15.2, True)],
    "linux-rx7600-raphael": [(8.0, False), (15.6, True)],
    "linux-rx7800xt-sdma": [(15.2, True)],
    "linux-rx7900xtx": [(23.0, True)],
    "linux-rx9060xt-pair": [(15.2, True), (15.2, True)],
    "linux-rx9070xt": [(15.2, True)],
    "linux-strix-halo": [(62.6, True)],
    "linux-strix-halo-2604": [(90.5, True)],
    "linux-strix-halo-mes86": [(90.5, True)],
    "linux-strix-halo-rx7900xtx": [(24.0, False), (62.6, True)],
    "linux-strix-halo-tuned": [(90.5, True)],
    "linux-strix-point": [(15.6, True)],
    "nvidia-rtx4090": [(24.0, False)],
    "windows-gfx1153": [(8.1, True)],
    "windows-krackan": [(15.9, True)],
    "windows-rx7600-mixed": [(7.5, True)],
    "windows-rx7800xt-next": [(15.2, True)],
    "windows-rx7900xtx-raphael": [(31.6, True), (23.0, True)],
    "windows-rx9060xt": [(15.2, True)],
    "windows-rx9060xt-fits": [(15.2, True)],
    "windows-rx9060xt-next": [(15.2, True)],
    "windows-rx9070xt": [(15.2, True)],
    "windows-strix-halo": [(63.0, True)],
    "wsl-rx7900xtx": [(23.0, True)],
}


@pytest.mark.parametrize("machine", machines())
def test_budget_of_each_recorded_machine(machine: str) -> None:
    facts = load_facts(HOSTS / f"{machine}.json")
    found = [budget(facts, gpu) for gpu in facts.gpus]
    assert [item and (round(item.total_bytes / GIB, 1), item.capped) for item in found] == REVIEWED[machine]


@pytest.mark.parametrize("machine", machines())
def test_no_budget_is_more_than_the_machine_has(machine: str) -> None:
    facts = load_facts(HOSTS / f"{machine}.json")
    for gpu in facts.gpus:
        found = budget(facts, gpu)
        assert found is None or 0 <= found.total_bytes <= (gpu.vram_bytes or 0) + (facts.memory_bytes or 0)
        assert found is None or (found.why and found.parts)


def apu(**changes: object) -> tuple[HostFacts, Gpu]:
    gpu = Gpu("amd", "8060S", gfx="gfx1151", integrated=True, vram_bytes=GIB // 2, gtt_bytes=62 * GIB)
    facts = HostFacts(
        "test", "linux", "3.12", "cpu", 16, memory_bytes=125 * GIB, memory_available_bytes=110 * GIB, gpus=(gpu,)
    )
    return replace(facts, **{key: value for key, value in changes.items() if hasattr(facts, key)}), replace(
        gpu, **{key: value for key, value in changes.items() if hasattr(gpu, key)}
    )


@pytest.mark.parametrize(
    ("changes", "gib"),
    [
        ({}, 62),  # GTT is larger than the carve-out
        ({"vram_bytes": 96 * GIB}, 95),  # the carve-out is larger, and shows the desktop
        ({"memory_available_bytes": 40 * GIB}, 24),  # other programs hold the rest: 40 - 16
        ({"memory_available_bytes": 4 * GIB}, 0),
        ({"memory_available_bytes": None}, 62),  # not read: nothing is guessed
        ({"linux": Linux("6.18", ttm_pages_limit=30 * 262144)}, 30),  # the kernel's limit is below what GTT says
        ({"gtt_bytes": None}, 0),  # only the small carve-out is known
    ],
)
def test_pools_of_an_apu(changes: dict[str, object], gib: int) -> None:
    found = budget(*apu(**changes))
    assert found is not None and found.total_bytes // GIB == gib


def test_nothing_known_is_no_budget() -> None:
    facts, gpu = apu(vram_bytes=None, gtt_bytes=None)
    assert budget(facts, gpu) is None
    assert budget(replace(facts, system="windows"), gpu) is None
    assert budget(facts, replace(gpu, integrated=False)) is None


def test_reserve_is_a_fifth_and_at_most_16_gib() -> None:
    assert host_reserve(10 * GIB) == 2 * GIB and host_reserve(1000 * GIB) == 16 * GIB


def test_the_selected_gpu_is_the_one_that_has_a_budget() -> None:
    facts = load_facts(HOSTS / "linux-strix-halo-rx7900xtx.json")
    gpu = select(facts, {}).gpu
    assert gpu is not None and gpu.gfx == "gfx1100"
    found = budget(facts, gpu)
    assert found is not None and not found.capped  # the APU beside it shows the desktop
