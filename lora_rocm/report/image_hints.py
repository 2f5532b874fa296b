"""Hints why an image is never learned, from its files: an empty caption, a duplicate, less sharp than others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from lora_rocm.dataset.images.image_io import UnreadableImage, decode
from lora_rocm.dataset.sources.equal_files import equal_files
from lora_rocm.foundation.bounded_read import check_plain, read_plain
from lora_rocm.recipe.schema import Recipe
from lora_rocm.report.image_losses import MAX_SHOWN, ImageLoss, RelativeLosses, judged
from lora_rocm.rundir.sample_losses import SampleLosses

MAX_IMAGE_BYTES = 1 << 28
MAX_CAPTION_BYTES = 1 << 16
SHARPNESS_SIDE_PX = 512
BLURRED = 0.2
"""An image is less sharp than others if its sharpness is below this share of their median."""
LEAST_COMPARED, MAX_COMPARED = 4, 12
"""Number of usual images that are decoded for this comparison."""


def hinted_losses(losses: SampleLosses, recipe: Recipe | None) -> list[ImageLoss]:
    """Return the loss of each image, with hints from the files of a run with one folder of images."""
    found, data = judged(RelativeLosses.of(losses)), recipe.data if recipe else None
    if data is None or not data.path or not any(each.is_outlier for each in found):
        return found
    extensions = data.caption_extension
    return with_hints(found, Path(data.path), (extensions,) if isinstance(extensions, str) else extensions)


def with_hints(images: Sequence[ImageLoss], folder: Path, caption_extensions: Sequence[str]) -> list[ImageLoss]:
    """Return the images, the outliers with hints from their files. Only regular files in ``folder`` are read.

    Args:
        images: judged images with names relative to ``folder``.
        folder: the folder of images.
        caption_extensions: extensions of the caption files, with a dot; the first file that exists counts.
    """
    names = [each.name for each in images if _is_in(folder, each.name)]
    outliers = [each for each in images if each.is_outlier and each.name in names][:MAX_SHOWN]
    usual = [each.name for each in images if not each.is_outlier and each.name in names]
    twins = dict[str, str]()
    for group in equal_files([folder / name for name in names]):
        first, second = names[group[0]], names[group[1]]
        twins |= {names[place]: first for place in group[1:]} | {first: second}
    known = [value for name in usual[:: max(len(usual) // MAX_COMPARED, 1)] if (value := _sharpness(folder / name))]
    hints = {each.name: _hints(each.name, folder, caption_extensions, twins, known[:MAX_COMPARED]) for each in outliers}
    return [replace(each, hints=hints.get(each.name, ())) for each in images]


def _hints(
    name: str, folder: Path, extensions: Sequence[str], twins: Mapping[str, str], sharpness: Sequence[float]
) -> tuple[str, ...]:
    """Return the hints of one image. twins: another image with the same content. sharpness: of usual images."""
    found = []
    if _has_empty_caption(folder / name, extensions):
        found.append("its caption is empty")
    if name in twins:
        found.append(f"the same file as {twins[name]}, perhaps with another caption")
    own = _sharpness(folder / name) if len(sharpness) >= LEAST_COMPARED else None
    if own is not None and own < BLURRED * median(sharpness):
        found.append("less sharp than the other images")
    return tuple(found)


def _sharpness(path: Path) -> float | None:
    """Return the variance of the Laplacian of an image's brightness, at a fixed size; None if it cannot be decoded."""
    try:
        image = decode(read_plain(path, MAX_IMAGE_BYTES)).convert("L")
    except (OSError, UnreadableImage):
        return None
    scale = SHARPNESS_SIDE_PX / max(image.size)
    size = (max(round(image.width * scale), 3), max(round(image.height * scale), 3))
    grey = np.asarray(image.resize(size), np.float64)
    inner = grey[1:-1, 1:-1]
    laplacian = grey[:-2, 1:-1] + grey[2:, 1:-1] + grey[1:-1, :-2] + grey[1:-1, 2:] - 4 * inner
    return float(laplacian.var())


def _is_in(folder: Path, name: str) -> bool:
    """Whether a regular file is in a folder; False if it is missing, too large, or a link to elsewhere."""
    path = folder / name
    try:
        if not path.resolve().is_relative_to(folder.resolve()):
            return False
        check_plain(path, MAX_IMAGE_BYTES)
    except (OSError, ValueError):
        return False
    return True


def _has_empty_caption(image: Path, extensions: Sequence[str]) -> bool:
    for extension in extensions:
        try:
            return not read_plain(image.with_suffix(extension), MAX_CAPTION_BYTES).strip()
        except (OSError, ValueError):  # missing, or not readable
            continue
    return False
