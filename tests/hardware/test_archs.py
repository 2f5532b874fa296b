"""The table of architectures."""

import re

import pytest

from lora_rocm.hardware.archs import ARCHS, BY_GFX, GENERIC, arch_of, has_kernels, triton_of, triton_takes
from tests.golden import machines
from tests.hardware.situations import facts_of


def test_each_architecture_stands_once_and_has_a_name_of_the_usual_form() -> None:
    assert len(BY_GFX) == len(ARCHS)
    assert all(re.fullmatch(r"gfx\d{1,2}\d[0-9a-f]", arch.gfx) and arch.cards for arch in ARCHS)


def test_lookup() -> None:
    assert arch_of("gfx1151") is BY_GFX["gfx1151"]
    assert arch_of("gfx1299") is None and arch_of(None) is None and arch_of("") is None


def test_only_cards_without_kernels_in_the_wheels_have_an_override() -> None:
    assert not [arch.gfx for arch in ARCHS if arch.override and arch.pytorch_org]
    assert BY_GFX["gfx1151"].override is None, "never on Strix Halo"


@pytest.mark.parametrize(
    ("arch_list", "gfx", "known"),
    [
        (("gfx1030", "gfx1100"), "gfx1100", True),
        (("gfx1030", "gfx1100"), "gfx1031", False),
        (("gfx10-3-generic",), "gfx1031", True),
        (("gfx11-generic",), "gfx1151", True),
        (("gfx11-generic",), "gfx1201", False),
        (("gfx12-generic",), "gfx1201", True),
        (None, "gfx1100", None),
        ((), "gfx1100", None),
        (("gfx1100",), None, None),
    ],
)
def test_kernels(arch_list: tuple[str, ...] | None, gfx: str | None, known: bool | None) -> None:
    assert has_kernels(arch_list, gfx) is known


@pytest.mark.parametrize(
    ("version", "gfx", "takes"),
    [
        ("3.9.0", "gfx1030", False),
        ("3.8.0+rocm7.2", "gfx1030", True),
        ("3.7.1", "gfx906", False),
        ("3.9.0", "gfx1100", True),
        ("3.9.0", "gfx900", False),
        ("3.9.0", "gfx1299", None),
        ("3.12.0", "gfx1030", None),
        ("unknown", "gfx1030", None),
    ],
)
def test_which_triton_takes_which_architecture(version: str, gfx: str, takes: bool | None) -> None:
    assert triton_takes(version, gfx) is takes


def test_triton_is_found_under_all_its_names() -> None:
    assert triton_of({"torch": "2.13.0", "Triton-ROCm": "3.7.1"}) == ("triton_rocm", "3.7.1")
    assert triton_of({"tritonclient": "2.0"}) is None


def test_generic_targets_name_known_architectures_of_one_major_version() -> None:
    for target, members in GENERIC.items():
        major = re.match(r"gfx(\d+)", target)
        assert major and all(member in BY_GFX and member[3:-2] == major[1] for member in members)


def test_gfx1170_is_gfx11_by_number_only() -> None:
    assert not [gfx for gfx in GENERIC["gfx11-generic"] if not re.fullmatch("gfx11[05][0-3]", gfx)]
    assert has_kernels(("gfx11-generic",), "gfx1170") is False


def test_recorded_cards_are_in_the_table_but_for_the_one_that_no_table_knows() -> None:
    seen = {gpu.gfx for machine in machines() for gpu in facts_of(machine).amd_gpus if gpu.gfx}
    assert seen - set(BY_GFX) == {"gfx1299", "gfx1250"}


@pytest.mark.parametrize(
    ("gfx", "system", "rocm", "state"),
    [
        ("gfx1201", "windows", "7.14", "building"),
        ("gfx1201", "windows", "10.0", "release"),
        ("gfx1200", "windows", "10.1.0", "release"),
        ("gfx1200", "windows", "nightly", "building"),
        ("gfx1200", "windows", None, "building"),
        ("gfx1200", "linux", "7.14", "release"),
        ("gfx1153", "linux", "10.1", "building"),
        ("gfx1153", "windows", "10.1", "none"),
        ("gfx1100", "windows", "7.14", "release"),
    ],
)
def test_the_state_of_a_wheel_is_one_of_its_rocm(gfx: str, system: str, rocm: str | None, state: str) -> None:
    assert BY_GFX[gfx].wheels(system, rocm) == state
