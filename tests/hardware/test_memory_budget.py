"""The memory budget of every recorded machine, and its behaviour when facts are missing."""

from dataclasses import replace

import pytest

from lora_rocm.hardware.facts import Gpu, HostFacts, Linux, load_facts
from lora_rocm.hardware.gpu_select import select
from lora_rocm.hardware.memory_budget import GIB, MIB, MemoryBudget, budget, host_reserve, parts_text
from lora_rocm.rules.memory_rules import memory_table
from tests.golden import HOSTS, machines
from tests.wording import says, worded

# Reviewed by hand: GiB of each GPU in order, and whether it limits the allocator.
REVIEWED: dict[str, list[tuple[float, bool] | None]] = {
    "apple-m3": [None],
    "broken-no-permission": [(17.3, True)],
    "broken-unknown-gpu": [None],
    "cpu-only": [None],
    "linux-gfx1250": [(429.3, True)],
    "linux-gfx1299": [(29.3, True)],
    "linux-mi300x": [(190.4, True)] * 8,
    "linux-r9700": [(29.2, True)],
    "linux-r9700-quiet": [(29.2, True)],
    "linux-radeon-vii": [(13.5, True)],
    "linux-rx5600xt": [(3.8, True)],
    "linux-rx6700xt": [(9.7, True)],
    "linux-rx6800xt": [(13.5, True)],
    "linux-rx7600-raphael": [(6.7, True), (15.6, True)],
    "linux-rx7800xt-sdma": [(13.5, True)],
    "linux-rx7900xtx": [(20.9, True)],
    "linux-rx9060xt-pair": [(13.4, True), (14.3, True)],
    "linux-rx9070xt": [(13.5, True)],
    "linux-strix-halo": [(62.6, True)],
    "linux-strix-halo-2604": [(90.5, True)],
    "linux-strix-halo-dkms": [(62.6, True)],
    "linux-strix-halo-mes86": [(90.5, True)],
    "linux-strix-halo-rx7900xtx": [(22.7, True), (62.6, True)],
    "linux-strix-halo-tuned": [(90.5, True)],
    "linux-strix-point": [(15.6, True)],
    "nvidia-rtx4090": [(24.0, False)],
    "windows-gfx1153": [(8.1, True)],
    "windows-krackan": [(15.9, True)],
    "windows-rx7600-mixed": [(6.3, True)],
    "windows-rx7800xt-next": [(14.0, True)],
    "windows-rx7900xtx-raphael": [(31.6, True), (21.8, True)],
    "windows-rx9060xt": [(14.0, True)],
    "windows-rx9060xt-fits": [(14.0, True)],
    "windows-rx9060xt-next": [(14.0, True)],
    "windows-rx9070xt": [(14.0, True)],
    "windows-strix-halo": [(63.0, True)],
    "windows-strix-halo-96gb": [(95.0, True)],
    "wsl-rx7900xtx": [(21.8, True)],
}


RESERVES = memory_table().reserves


def found_for(facts: HostFacts, gpu: Gpu) -> MemoryBudget | None:
    return budget(facts, gpu, RESERVES)


@pytest.mark.parametrize("machine", machines())
def test_budget_of_each_recorded_machine(machine: str) -> None:
    facts = load_facts(HOSTS / f"{machine}.json")
    found = [found_for(facts, gpu) for gpu in facts.gpus]
    assert [item and (round(item.total_bytes / GIB, 1), item.capped) for item in found] == REVIEWED[machine]


@pytest.mark.parametrize("machine", machines())
def test_no_budget_is_more_than_the_machine_has(machine: str) -> None:
    facts = load_facts(HOSTS / f"{machine}.json")
    for gpu in facts.gpus:
        found = found_for(facts, gpu)
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
        ({"linux": Linux("6.18", ttm_pages_limit=30 * 262144)}, 30),  # the kernel's limit is below GTT's size
        ({"gtt_bytes": None}, 0),  # only the small carve-out is known
    ],
)
def test_pools_of_an_apu(changes: dict[str, object], gib: int) -> None:
    found = found_for(*apu(**changes))
    assert found is not None and found.total_bytes // GIB == gib


def test_nothing_known_is_no_budget() -> None:
    facts, gpu = apu(vram_bytes=None, gtt_bytes=None)
    assert found_for(facts, gpu) is None
    assert found_for(replace(facts, system="windows"), gpu) is None
    assert found_for(facts, replace(gpu, integrated=False)) is None


def test_reserve_is_a_fifth_and_at_most_16_gib() -> None:
    assert host_reserve(10 * GIB) == 2 * GIB and host_reserve(1000 * GIB) == 16 * GIB


def test_the_selected_gpu_is_the_one_that_has_a_budget() -> None:
    facts = load_facts(HOSTS / "linux-strix-halo-rx7900xtx.json")
    gpu = select(facts, {}).gpu
    assert gpu is not None and gpu.gfx == "gfx1100"
    found = found_for(facts, gpu)
    assert found is not None and found.capped
    assert found.kept_free_bytes == RESERVES.headless_mib * MIB  # the APU next to it shows the desktop


def card(machine: str, **changes: object) -> MemoryBudget:
    facts = load_facts(HOSTS / f"{machine}.json")
    gpu = replace(facts.gpus[0], **changes)  # type: ignore[arg-type]
    found = found_for(replace(facts, gpus=(gpu, *facts.gpus[1:])), gpu)
    assert found is not None
    return found


def test_what_others_are_seen_to_hold_is_subtracted_and_else_a_desktop_is_assumed() -> None:
    seen, blind = card("linux-rx7900xtx"), card("linux-rx7900xtx", vram_used_bytes=None)
    whole = load_facts(HOSTS / "linux-rx7900xtx.json").gpus[0].vram_bytes or 0
    fixed = (RESERVES.libraries_mib + RESERVES.kept_free_mib) * MIB
    assert seen.total_bytes == whole - 1434 * MIB - fixed
    assert seen.limit_bytes == whole - fixed, "the run reads anew what others hold"
    assert blind.total_bytes == blind.limit_bytes == whole - GIB - fixed
    assert parts_text(seen.parts) == (worded("hardware/24-0-gib-memory-of-the-card"))
    assert says(parts_text(blind.parts), "hardware/1-0-gib-kept-for-the-desktop")


@pytest.mark.parametrize(("machine", "used_mib", "kept_mib"), [
    ("linux-rx7900xtx", 1434, 512),
    ("linux-rx7900xtx", 20, 512),  # the only GPU
    ("linux-rx7600-raphael", 30, 64),  # the desktop is on the processor's GPU
    ("linux-rx7600-raphael", 900, 512),  # it is on this card
    ("linux-rx7600-raphael", None, 64),
    ("linux-mi300x", 283, 64),  # has no outputs
    ("windows-rx9070xt", None, 0),  # Windows moves memory away instead
    ("wsl-rx7900xtx", None, 0),
    ("nvidia-rtx4090", None, 0),
])  # fmt: skip
def test_a_card_on_linux_is_never_filled(machine: str, used_mib: int | None, kept_mib: int) -> None:
    found = card(machine, vram_used_bytes=used_mib and used_mib * MIB)
    assert found.kept_free_bytes == kept_mib * MIB
    assert found.library_bytes == (0 if machine.startswith("nvidia") else RESERVES.libraries_mib * MIB)


def test_a_card_that_others_fill_leaves_nothing() -> None:
    found = card("linux-rx7900xtx", vram_used_bytes=24 * GIB)
    assert found.total_bytes == 0 < found.limit_bytes
