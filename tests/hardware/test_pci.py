"""Ids and names of AMD GPUs."""

from __future__ import annotations

import pytest

from lora_rocm.hardware.archs import BY_GFX
from lora_rocm.hardware.pci import by_id, gfx_of_id, gfx_of_name, pci_table, product_name

IDS_TEXT = """# List of AMDGPU IDs
1.0.0
744C,\tC8,\tAMD Radeon RX 7900 XTX
744C,\tCC,\tAMD Radeon RX 7900 XT
7481,   C7,     AMD Steam Machine
garbage
"""


def test_every_architecture_of_the_table_has_ids_and_a_name_and_no_other_has() -> None:
    assert set(pci_table().ids) == set(BY_GFX)
    named = {row.gfx for row in pci_table().names}
    assert named <= set(BY_GFX)
    assert set(BY_GFX) - named == {"gfx1033", "gfx1036"}  # their adapters are called "AMD Radeon(TM) Graphics"


def test_no_id_is_of_two_architectures() -> None:
    devices = [device for line in pci_table().ids.values() for device in line.split()]
    assert len(devices) == len(set(devices)) == len(by_id())
    assert all(len(device) == 4 and int(device, 16) for device in devices)


@pytest.mark.parametrize(
    ("pci_id", "gfx"),
    [("1002:744c", "gfx1100"), ("1002:744C", "gfx1100"), ("1002:1114", "gfx1152"), ("1002:13c0", "gfx1036"),
     ("1002:1902", "gfx1153"), ("1002:1586", "gfx1151"), ("1002:7fff", None), ("10de:744c", None), ("", None)],
)  # fmt: skip
def test_ids(pci_id: str, gfx: str | None) -> None:
    assert gfx_of_id(pci_id) == gfx


@pytest.mark.parametrize(
    ("name", "gfx"),
    [
        ("AMD Radeon RX 9070 XT", "gfx1201"),
        ("AMD Radeon RX 9070 GRE", "gfx1201"),
        ("AMD Radeon AI PRO R9700", "gfx1201"),
        ("AMD Radeon RX 9060 XT", "gfx1200"),
        ("AMD Radeon RX 9060 XT LP", "gfx1200"),
        ("AMD Radeon RX 9050", "gfx1200"),
        ("AMD Radeon RX 9050 4GB", "gfx1200"),
        ("AMD Radeon RX 9055", None),
        ("AMD Radeon AI PRO R9700S", "gfx1201"),
        ("AMD Radeon AI PRO R9600D", "gfx1201"),
        ("AMD Radeon RX 7700", "gfx1101"),
        ("AMD Radeon PRO V710 MxGPU", "gfx1101"),
        ("AMD Radeon PRO V620", "gfx1030"),
        ("AMD Instinct MI350P", "gfx950"),
        ("AMD Ryzen AI Max PRO 495 w/ Radeon Graphics", "gfx1151"),
        ("AMD Radeon(TM) 8060S Graphics", "gfx1151"),
        ("AMD Radeon(TM) 8040S Graphics", "gfx1151"),
        ("AMD Radeon(TM) 890M Graphics", "gfx1150"),
        ("AMD Radeon 880M Graphics", "gfx1150"),
        ("AMD Radeon(TM) 860M Graphics", "gfx1152"),
        ("AMD Radeon 820M Graphics", "gfx1153"),
        ("AMD Radeon RX 7900 GRE", "gfx1100"),
        ("AMD Radeon PRO W7900", "gfx1100"),
        ("Radeon Pro W7800 48GB", "gfx1100"),
        ("AMD Radeon RX 7800 XT", "gfx1101"),
        ("AMD Radeon RX 7700 XT", "gfx1101"),
        ("AMD Radeon PRO W7700", "gfx1101"),
        ("AMD Radeon RX 7700S", "gfx1102"),
        ("AMD Radeon RX 7600 XT", "gfx1102"),
        ("AMD Radeon RX 7650 GRE", "gfx1102"),
        ("AMD Radeon(TM) 780M", "gfx1103"),
        ("AMD Radeon 740M Graphics", "gfx1103"),
        ("AMD Radeon RX 6950 XT", "gfx1030"),
        ("AMD Radeon RX 6800 XT", "gfx1030"),
        ("AMD Radeon RX 6800S", "gfx1032"),
        ("AMD Radeon RX 6750 XT", "gfx1031"),
        ("AMD Radeon RX 6700 XT", "gfx1031"),
        ("AMD Radeon RX 6650 XT", "gfx1032"),
        ("AMD Radeon RX 6600", "gfx1032"),
        ("AMD Radeon RX 6500 XT", "gfx1034"),
        ("AMD Radeon 680M", "gfx1035"),
        ("AMD Radeon RX 5700 XT", "gfx1010"),
        ("AMD Radeon RX 5600 XT", "gfx1010"),
        ("AMD Radeon RX 5500 XT", "gfx1012"),
        ("AMD Radeon Pro V520", "gfx1011"),
        ("AMD Radeon VII", "gfx906"),
        ("AMD Instinct MI50", "gfx906"),
        ("AMD Instinct MI100", "gfx908"),
        ("AMD Instinct MI210", "gfx90a"),
        ("AMD Instinct MI300X", "gfx942"),
        ("AMD Instinct MI355X", "gfx950"),
        ("AMD Radeon(TM) Graphics", None),
        ("AMD Radeon RX 580 Series", None),
        ("AMD Radeon R7 Graphics", None),
        ("AMD Radeon RX 77001", None),
    ],
)
def test_names(name: str, gfx: str | None) -> None:
    assert gfx_of_name(name) == gfx


def test_the_product_is_that_of_device_and_revision() -> None:
    assert product_name(IDS_TEXT, "744c", "cc") == "AMD Radeon RX 7900 XT"
    assert product_name(IDS_TEXT, "7481", "C7") == "AMD Steam Machine"
    assert product_name(IDS_TEXT, "744c", "ff") is None
    assert product_name("", "744c", "c8") is None
