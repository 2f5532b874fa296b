"""Which AOTriton and images fit, and the message where the files do not show it."""

from __future__ import annotations

import pytest

from lora_rocm.hardware.attention_images import attention_fits, attention_misfit
from lora_rocm.hardware.facts import Torch


def torch(library: str | None, **images: str) -> Torch:
    folders = {f"amd-{name}": version for name, version in images.items()}
    return Torch("2.12.0+rocm10.0.0", hip="7.15.26333", aotriton=library, aotriton_images=folders)


@pytest.mark.parametrize(
    ("library", "images", "gfx", "misfits"),
    [
        ("0.12.50", {"gfx120x": "0.13"}, "gfx1201", True),
        ("0.12.50", {"gfx115x": "0.13"}, "gfx1151", True),
        ("0.13.0", {"gfx11xx": "0.12"}, "gfx1103", True),
        ("0.12", {"gfx90a": "0.13"}, "gfx90a", True),
        ("1.2.0", {"gfx120x": "0.2"}, "gfx1200", True),
        ("0.12.50", {"gfx120x": "0.12"}, "gfx1201", False),
        ("0.13.50", {"gfx120x": "0.13.0"}, "gfx1201", False),
        ("0.12.50", {"gfx120x": "0.13", "gfx110x": "0.12"}, "gfx1100", False),
        ("0.12.50", {"gfx120x": "0.13"}, None, True),  # any images may be the ones it uses
    ],
)
def test_major_and_minor_version_have_to_agree(
    library: str, images: dict[str, str], gfx: str | None, misfits: bool
) -> None:
    found = attention_misfit(torch(library, **images), gfx)
    assert (found is not None) is misfits and attention_fits(torch(library, **images), gfx) is not misfits
    if found is not None:
        assert library in found.where and found.images in found.where and "__signature__" in found.where


@pytest.mark.parametrize(
    "silent",
    [
        None,
        Torch("2.13.0+cpu", aotriton="0.12.50", aotriton_images={"amd-gfx120x": "0.13"}),
        torch(None, gfx120x="0.13"),
        torch("0.12.50"),
        torch("garbled", gfx120x="0.13"),
        torch("0.12.50", gfx120x="garbled"),
        torch("0.12.50", gfx94x="0.13"),
    ],
)
def test_nothing_is_said_where_the_files_do_not_tell(silent: Torch | None) -> None:
    assert attention_misfit(silent, "gfx1201") is None
