"""The model folders of ComfyUI, Forge and programs like them on this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

FolderKind = Literal["loras", "checkpoints", "diffusion_models", "text_encoders", "vae", "diffusers"]
"""The content of a folder, by ComfyUI's names."""
PROGRAMS = ("comfyui", "forge", "stable-diffusion-webui", "sd-webui", "swarmui", "stabilitymatrix")
"""Pieces of the names of folders in which these programs are installed, in lower case."""
ROOTS = ("", "ComfyUI", "webui")
"""Folders of a program in which its folder of models may be; the others are of its portable editions."""
PLACES: Mapping[FolderKind, tuple[str, ...]] = {
    "loras": ("models/loras", "models/Lora", "Models/Lora"),
    "checkpoints": (
        "models/checkpoints",
        "models/Stable-diffusion",
        "Models/Stable-Diffusion",
        "Models/StableDiffusion",
    ),
    "diffusion_models": ("models/diffusion_models", "models/unet", "Models/diffusion_models", "Models/DiffusionModels"),
    "text_encoders": (
        "models/text_encoders",
        "models/clip",
        "models/text_encoder",
        "Models/clip",
        "Models/TextEncoders",
    ),
    "vae": ("models/vae", "models/VAE", "Models/VAE"),
    "diffusers": ("models/diffusers", "models/Diffusers", "Models/Diffusers"),
}
"""Folders of each kind, relative to the folder of models' parent. Programs differ in their spelling."""
NEAR = ("", "Documents", "Desktop", "Downloads", "AI", "ai", "apps", "src", "git", "StabilityMatrix/Packages")
"""Folders in the home folder in which programs are searched."""
MAX_ENTRIES = 2000


def program_folders(kinds: Iterable[FolderKind], home: Path, around: Iterable[Path] = ()) -> list[Path]:
    """Return the existing folders of these programs for these kinds of models.

    Args:
        kinds: the kinds.
        home: the user's home folder.
        around: further folders in which the programs may be.
    """
    places = [place for kind in kinds for place in PLACES[kind]]
    found = dict[Path, None]()
    for folder in dict.fromkeys([*(home / name for name in NEAR), *around]):
        for program in _programs(folder):
            for path in (program / root / place for root in ROOTS for place in places):
                with contextlib.suppress(OSError):
                    if path.is_dir():
                        found[path.resolve()] = None
    return list(found)


def _programs(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number >= MAX_ENTRIES:
                return
            if any(name in entry.name.lower() for name in PROGRAMS):
                yield folder / entry.name
