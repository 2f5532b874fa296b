"""Which GPU a run uses, and how others are hidden."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lora_rocm.hardware.facts import Gpu, HostFacts, Torch
from lora_rocm.hardware.gpu_select import Selection, select, visible
from tests.golden import machines
from tests.hardware.situations import facts_of

CARD = Gpu("amd", "card", 0, "gfx1201", integrated=False, node=1, vram_bytes=16 << 30)
APU = Gpu("amd", "apu", 1, "gfx1151", integrated=True, node=2, vram_bytes=96 << 30)
SMALL = Gpu("amd", "small", 2, "gfx1102", integrated=False, node=3, vram_bytes=8 << 30)


def machine(*gpus: Gpu, system: str = "linux", torch: Torch | None = None) -> HostFacts:
    return HostFacts("test", system, "3.12", "cpu", 8, gpus=gpus, torch=torch)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gpus", "best"),
    [
        ((APU, CARD), "card"),
        ((SMALL, CARD), "card"),
        ((replace(CARD, gfx=None, name="unknown"), SMALL), "small"),
        ((replace(CARD, name="unknown", gfx="gfx1299"), APU), "unknown"),
        ((CARD, replace(CARD, index=1, name="twin")), "card"),
        ((replace(CARD, vram_bytes=None), SMALL), "small"),
    ],
)
def test_the_best(gpus: tuple[Gpu, ...], best: str) -> None:
    found = select(machine(*gpus), {})
    assert found.gpu is not None and found.gpu.name == best
    assert found.hide_with == ("ROCR_VISIBLE_DEVICES", str(found.gpu.index)) and found.alone and not found.by_user


def test_a_card_that_the_installed_torch_has_kernels_for_goes_before_a_larger_one() -> None:
    both = machine(CARD, SMALL, torch=Torch("2.13", hip="7.2", arch_list=("gfx1100", "gfx1102")))
    assert select(both, {}).gpu == SMALL
    unknown = replace(both, torch=Torch("2.13", hip="7.2"))
    assert select(unknown, {}).gpu == CARD


def test_one_gpu_needs_no_variable_and_none_gives_none() -> None:
    assert select(machine(APU), {}) == Selection(APU)
    assert select(machine(), {"HIP_VISIBLE_DEVICES": "0"}) == Selection(None)


def test_windows_hides_with_hip() -> None:
    assert select(machine(APU, CARD, system="windows"), {}).hide_with == ("HIP_VISIBLE_DEVICES", "0")


@pytest.mark.parametrize(
    ("environ", "seen"),
    [
        ({"ROCR_VISIBLE_DEVICES": "1"}, [APU]),
        ({"HIP_VISIBLE_DEVICES": "1,0"}, [APU, CARD]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [APU]),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, [CARD]),
        ({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "1"}, [APU]),
        ({"ROCR_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "0"}, [APU]),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, []),
        ({"HIP_VISIBLE_DEVICES": "0,7,1"}, [CARD]),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
        ({"ROCR_VISIBLE_DEVICES": ""}, []),
        ({"ROCR_VISIBLE_DEVICES": "1,1"}, [APU]),
    ],
)
def test_what_the_user_made_visible(environ: dict[str, str], seen: list[Gpu]) -> None:
    facts = machine(CARD, APU)
    assert visible(facts, environ) == seen
    found = select(facts, environ)
    assert found == Selection(seen[0] if seen else None, None, alone=len(seen) < 2, by_user=True)


@pytest.mark.parametrize("variable", ["HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"])
def test_hip_takes_an_empty_list_for_none(variable: str) -> None:
    found = select(machine(CARD, APU), {variable: ""})
    assert found.gpu == CARD and not found.by_user and found.hide_with


def test_windows_does_not_read_rocr() -> None:
    found = select(machine(CARD, APU, system="windows"), {"ROCR_VISIBLE_DEVICES": "1"})
    assert found.gpu == CARD and not found.by_user


def test_a_uuid_may_be_any_card_so_the_chosen_one_is_not_alone() -> None:
    environ = {"ROCR_VISIBLE_DEVICES": "GPU-7c1f0b6f6ef2b6d0"}
    assert visible(machine(CARD, APU), environ) is None
    assert select(machine(CARD, APU), environ) == Selection(CARD, alone=False, by_user=True)
    assert select(machine(CARD), environ) == Selection(CARD, alone=True, by_user=True)


def test_with_torch_for_nvidia_nothing_is_selected() -> None:
    assert select(machine(CARD, torch=Torch("2.13", cuda="13.0")), {}).gpu is None


CHOSEN = {
    "linux-strix-halo-rx7900xtx": "gfx1100",
    "linux-rx7600-raphael": "gfx1102",
    "windows-rx7900xtx-raphael": "gfx1100",
}


@pytest.mark.parametrize("name", machines())
def test_recorded_machines(name: str) -> None:
    facts = facts_of(name)
    found = select(facts, {})
    if not facts.amd_gpus:
        assert found.gpu is None
        return
    assert found.gpu is not None and found.gpu.gfx == CHOSEN.get(name, facts.amd_gpus[0].gfx)
    assert (found.hide_with is not None) is (len(facts.amd_gpus) > 1)
