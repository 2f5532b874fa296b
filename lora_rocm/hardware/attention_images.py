"""Checks from the facts about a torch whether its attention library (AOTriton) and its GPU images fit each other.

A library with images of another version computes zeros without an error, or every later kernel of the process fails
(ROCm/aotriton#210, TheRock#7315, #7992: torch 2.11 and 2.12 for Windows of August 2026). Standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lora_rocm.hardware.facts import Torch

FOLDER = re.compile(r"amd-gfx([0-9a-fx]+)")
"""A folder of images: "x" stands for any digit of an architecture ("amd-gfx120x")."""


@dataclass(frozen=True)
class Misfit:
    """A library and images of different versions. ``where``: the files that show it, below site-packages."""

    library: str
    images: str
    where: str


def attention_misfit(torch: Torch | None, gfx: str | None) -> Misfit | None:
    """The misfit between library and images for an architecture; None if they fit, or if the files do not show it.

    Major and minor version have to agree; images name no further numbers. An unknown architecture may use any image.
    """
    if torch is None or torch.hip is None or torch.aotriton is None:
        return None
    library = _minor(torch.aotriton)
    for folder, version in torch.aotriton_images.items():
        if library and _serves(folder, gfx) and _minor(version) and _minor(version) != library:
            signature = f"torch/lib/aotriton.images/{folder}/__signature__"
            where = f"torch/include/aotriton/config.h: {torch.aotriton}; {signature}: {version}"
            return Misfit(torch.aotriton, version, where)
    return None


def attention_fits(torch: Torch | None, gfx: str | None) -> bool:
    """Whether the files show that library and images for an architecture fit."""
    if torch is None or torch.aotriton is None or not any(_serves(folder, gfx) for folder in torch.aotriton_images):
        return False
    return attention_misfit(torch, gfx) is None


def _serves(folder: str, gfx: str | None) -> bool:
    found = FOLDER.match(folder)
    if found is None or gfx is None:
        return True
    return re.fullmatch("gfx" + found.group(1).replace("x", "[0-9a-f]"), gfx) is not None


def _minor(version: str) -> tuple[int, ...]:
    """Major and minor number ("0.12.50" is (0, 12)); () if it has none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()
