"""Check whether torch's attention library (AOTriton) and its precompiled GPU kernels ("images") have the same version.

If the versions differ, attention silently returns zeros, or every later kernel of the process fails (ROCm/aotriton#210,
TheRock#7315, #7992: torch 2.11 and 2.12 for Windows of August 2026). Standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lora_rocm.hardware.facts import Torch

FOLDER = re.compile(r"amd-gfx([0-9a-fx]+)")
"""Pattern of the names of image folders. In a name, "x" is a wildcard for one digit of the architecture
("amd-gfx120x").
"""


@dataclass(frozen=True)
class Misfit:
    """A version mismatch between an AOTriton library and its GPU images.

    library: version of the library.
    images: version for which the images were built.
    where: files that prove the mismatch, relative to site-packages, with the version in each.
    """

    library: str
    images: str
    where: str


def attention_misfit(torch: Torch | None, gfx: str | None) -> Misfit | None:
    """Return the version mismatch between library and GPU images, or None if they match or the files do not show it.

    Only major and minor version are compared, because images record nothing else. If ``gfx`` is None, all folders of
    images are compared.
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
    """Whether the files prove that the library and the GPU images for an architecture match. False if unknown."""
    if torch is None or torch.aotriton is None or not any(_serves(folder, gfx) for folder in torch.aotriton_images):
        return False
    return attention_misfit(torch, gfx) is None


def _serves(folder: str, gfx: str | None) -> bool:
    found = FOLDER.match(folder)
    if found is None or gfx is None:
        return True
    return re.fullmatch("gfx" + found.group(1).replace("x", "[0-9a-f]"), gfx) is not None


def _minor(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version ("0.12.50" gives (0, 12)); () if it does not start with two numbers."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()
