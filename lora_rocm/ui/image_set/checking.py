"""Finds the images of a folder that training skips, with the reasons, and the buckets of the others.

It is the scan of ``lora-rocm check`` and of training, with the geometry of training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lora_rocm.dataset.sources.scan import geometries, scan
from lora_rocm.errors import Problem
from lora_rocm.ui.image_set.reading import FolderReading

DRAWN_PX = 64
"""Longest side of a drawn bucket."""


@dataclass(frozen=True)
class DrawnBucket:
    """A bucket. width, height: its size in pixels. drawn_wh: the size of its picture. share: 1 for the fullest one."""

    width: int
    height: int
    count: int
    drawn_wh: tuple[float, float]
    share: float


@dataclass(frozen=True)
class FolderCheck:
    """The use of a folder's images in training.

    Attributes:
        num_usable: number of images that are trained on, counted once for each resolution.
        skipped: the images that are not trained on, with the reasons.
        notices: the notices of ``check``.
        buckets: the buckets, the fullest first.
    """

    num_usable: int
    skipped: Sequence[Problem]
    notices: Sequence[str]
    buckets: Sequence[DrawnBucket]


def check_folder(reading: FolderReading, advance: Callable[[int, int], None]) -> FolderCheck:
    """Examine the images of a folder as training does. Only headers and captions are read.

    Args:
        reading: how the folder is read.
        advance: called with the number of finished images and of all; it may raise to cancel.

    Raises:
        DataError: as in training, such as a folder without usable images.
    """
    found = scan(reading.data, lambda what, done, total, rate: advance(done, total), copies=False)
    fitted, too_small, cropped = geometries(found.samples, reading.data)
    counts = Counter(geometry.target_hw for geometry in fitted.values())
    most = max(counts.values(), default=1)
    buckets = []
    for (height, width), count in counts.most_common():
        scale = DRAWN_PX / max(height, width)
        drawn = (round(width * scale, 1), round(height * scale, 1))
        buckets.append(DrawnBucket(width, height, count, drawn, count / most))
    return FolderCheck(len(fitted), (*found.set_aside, *too_small), (*found.notices, *cropped), buckets)
