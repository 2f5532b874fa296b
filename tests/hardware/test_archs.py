"""The table of architectures."""

import re

import pytest

from lora_rocm.hardware.archs import ARCHS, BY_GFX, GENERIC, arch_of, has_kernels
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


def test_generic_targets_name_known_architectures_of_one_major_version() -> None:
    for target, members in GENERIC.items():
        major = re.match(r"gfx(\d+)", target)
        assert major and all(member in BY_GFX and member[3:-2] == major[1] for member in members)


def test_recorded_cards_are_in_the_table_but_for_the_one_that_no_table_knows() -> None:
    seen = {gpu.gfx for machine in machines() for gpu in facts_of(machine).amd_gpus if gpu.gfx}
    assert seen - set(BY_GFX) == {"gfx1299"}
