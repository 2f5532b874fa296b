"""The table of architectures compared with AMD's own, the package rocm-bootstrap (MIT, made from LLVM's processor
table).
"""

from __future__ import annotations

import pytest

from lora_rocm.hardware.archs import BY_GFX
from lora_rocm.hardware.probe.gpu_probe import gfx_of_version

rocm_bootstrap = pytest.importorskip("rocm_bootstrap", reason="part of the dev extra")

LEFT_OUT = {
    "gfx900": "Vega 10: no index has wheels for it (wheels.UNSERVED)",
    "gfx902": "Raven: integrated, the CPU is used instead (wheels.AS_CPU)",
    "gfx904": "Vega 12: Radeon Pro Vega 16 and 20 of MacBooks; no index has wheels for it",
    "gfx909": "Raven 2: integrated, the CPU is used instead (wheels.AS_CPU)",
    "gfx90c": "Renoir to Barcelo: integrated, the CPU is used instead (wheels.AS_CPU)",
    "gfx1013": "BC-250 of a mining rig: no index names it",
    "gfx1250": "Instinct MI400 series: its wheel is known (wheels.toml, only_in), its PCI ids are not",
    "gfx1251": "Instinct MI400 series: to be added with the first wheel for it",
    "gfx1250-strict": "no hardware: a name of AMD's packages",
}


def unknown(targets: set[str], known: set[str]) -> set[str]:
    """Targets that are neither known nor excluded on purpose."""
    return targets - known - LEFT_OUT.keys()


def test_every_target_of_amd_is_known_or_left_out_on_purpose_and_nothing_else_is_known() -> None:
    targets = {target.name for target in rocm_bootstrap.ALL_TARGETS}
    assert unknown(targets, set(BY_GFX)) == set()
    assert set(BY_GFX) <= targets and LEFT_OUT.keys() <= targets and not LEFT_OUT.keys() & BY_GFX.keys()
    assert unknown(targets, set(BY_GFX) - {"gfx1151"}) == {"gfx1151"}  # control


def test_kfds_numbers_are_read_as_amd_reads_them() -> None:
    for target in rocm_bootstrap.ALL_TARGETS:
        version = target.major * 10000 + target.minor * 100 + target.stepping
        assert gfx_of_version(version) == target.name.removesuffix("-strict")
        assert rocm_bootstrap.parse_gfx_target_version(version).name == gfx_of_version(version)
