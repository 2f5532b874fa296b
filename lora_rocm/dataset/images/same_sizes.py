"""Finds images that get the same size at several resolutions of their source, so that each epoch repeats them."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from lora_rocm.dataset.images.buckets import Geometry, Size, choose_bucket
from lora_rocm.dataset.skipped_files import counted, first_names, some
from lora_rocm.foundation.units import count_text

if TYPE_CHECKING:
    from lora_rocm.dataset.rows.hf_datasets import DatasetRow
    from lora_rocm.dataset.sample_table import Sample
    from lora_rocm.recipe.schema import DataSection

SHOWN_SIZES = 3
TWICE = "An epoch uses such an image twice at this size."
Pair = tuple[int, int]
"""Two resolutions, the smaller one first, at which an image gets the same size."""


class SameSizes:
    """Counts images that get the same size at several resolutions.

    There are two causes, counted separately: the resolutions are too close, or the image is too small.
    """

    def __init__(self, data: DataSection) -> None:
        self._data, self._small = data, first_names()
        self._place: Path | DatasetRow | None = None
        self._seen = dict[Size, int]()  # of the current image: size -> resolution
        self._sizes = dict[Pair, Counter[Size]]()

    def add(self, sample: Sample, geometry: Geometry) -> None:
        """Check an image at one resolution. All resolutions of an image must be added one after another."""
        if sample.location != self._place:
            self._place, self._seen = sample.location, {}
        size, resolution = geometry.target_hw, sample.options.resolution
        if size not in self._seen:
            self._seen[size] = resolution
        elif self._enlarged(sample) == size:
            self._sizes.setdefault((self._seen[size], resolution), Counter())[size] += 1
        else:
            self._small.append(sample.key)

    def _enlarged(self, sample: Sample) -> Size:
        """Return the size that an image would have at its resolution if small images were enlarged."""
        data, crop = self._data, sample.given.crop
        wide, high = (sample.width, sample.height) if crop is None else crop[2:]
        how = (data.bucket_step, data.bucket_max_aspect, data.enable_bucket)
        return choose_bucket(wide, high, sample.options.resolution, *how, upscale=True).target_hw

    def notices(self) -> list[str]:
        """Return notices that name the affected resolutions and the recipe key to change; empty if there are none."""
        said = [
            f"The resolutions {first} and {second} give {count_text(sizes.total(), 'image')} the same size "
            f"({_sizes_text(sizes)}). {TWICE} {_fix(self._data)}"
            for (first, second), sizes in self._sizes.items()
        ]
        if self._small:
            are = counted(self._small, "image is", "images are")
            said.append(
                f"{are} too small for a resolution, and repeated at the size for a smaller one: {some(self._small)}. "
                "Set data.upscale: true to enlarge them."
            )
        return said


def _sizes_text(sizes: Counter[Size]) -> str:
    shown = [f"{width}x{height}" for (height, width), _ in sizes.most_common(SHOWN_SIZES)]
    return ", ".join([*shown, "..."] if len(sizes) > SHOWN_SIZES else shown)


def _fix(data: DataSection) -> str:
    return (
        f"Use resolutions that are at least data.bucket_step ({data.bucket_step}) apart, remove one of them, or lower "
        "data.bucket_step."
    )


def alike_squares(data: DataSection) -> list[str]:
    """Return notices about resolutions of one source at which a square image gets the same size. No image is read."""
    said = dict[str, None]()
    for first, second in combinations(data.resolved_sources(), 2):
        pair = sorted((first.resolution, second.resolution))
        small, large = (side // data.bucket_step * data.bucket_step for side in pair)
        if first.index == second.index and small == large:
            what = f"The resolutions {pair[0]} and {pair[1]} give a square image the same size ({small}x{small})"
            said[f"{what}. {TWICE} {_fix(data)}"] = None
    return list(said)
