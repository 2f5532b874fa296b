"""The bus according to sysfs: the narrowest link of the path counts."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from lora_rocm.children.bench.copies import link_to
from lora_rocm.hardware.pci import address_of

ADDRESS = "0000:03:00.0"


def devices(tmp_path: Path, **links: tuple[str, str]) -> Path:
    """A sysfs with a card behind its own switch: root port, switch, card."""
    chain = tmp_path / "devices" / "pci0000:00"
    for name, (speed, width) in links.items():
        chain /= name
        chain.mkdir(parents=True)
        (chain / "current_link_speed").write_text(speed, encoding="utf-8")
        (chain / "current_link_width").write_text(width, encoding="utf-8")
    found = tmp_path / "bus"
    found.mkdir()
    (found / ADDRESS).symlink_to(chain)
    return found


def test_a_card_behind_its_own_switch_is_as_wide_as_its_slot(tmp_path: Path) -> None:
    link = link_to(ADDRESS, devices(tmp_path, port=("16.0 GT/s PCIe\n", "4\n"), card=("16.0 GT/s PCIe\n", "16\n")))
    assert link is not None and (link.generation, link.width, link.gb_per_s) == (4, 4, 7.88)


RATES = [("2.5", "1", 0.25), ("5.0", "16", 8.0), ("8.0", "16", 15.75), ("32.0", "16", 63.02)]


@pytest.mark.parametrize(("speed", "width", "gb_per_s"), RATES)
def test_rates(speed: str, width: str, gb_per_s: float, tmp_path: Path) -> None:
    link = link_to(ADDRESS, devices(tmp_path, card=(f"{speed} GT/s PCIe", width)))
    assert link is not None and link.gb_per_s == gb_per_s


@pytest.mark.parametrize(("speed", "width"), [("Unknown", "255"), ("16.0 GT/s", "x"), ("", ""), ("7 GT/s", "16")])
def test_what_is_garbled_is_not_known(speed: str, width: str, tmp_path: Path) -> None:
    assert link_to(ADDRESS, devices(tmp_path, card=(speed, width))) is None


def test_what_is_missing_is_not_known(tmp_path: Path) -> None:
    assert link_to(ADDRESS, tmp_path) is None
    assert address_of(SimpleNamespace()) is None
    assert address_of(SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)) == "0000:c1:00.0"
