"""Aspect-ratio buckets: pure maths, in pixels. Sizes are (height, width), except in names that end in wh."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from lora_rocm.dataset.shape import SampleShape
from lora_rocm.errors import DataError

if TYPE_CHECKING:
    from lora_rocm.recipe.schema import DataSection

Size = tuple[int, int]


@dataclass(frozen=True)
class Geometry:
    """Scaling and crop of one image. SDXL is conditioned on original_hw, crop_top_left and target_hw.

    original_hw: size of the file's image after applying EXIF orientation.
    resized_hw: size after scaling, which is at least target_hw in both dimensions.
    crop_top_left: (top, left) of the crop in the scaled image.
    target_hw: size of the crop, equal to the bucket size.
    """

    original_hw: Size
    resized_hw: Size
    crop_top_left: Size
    target_hw: Size

    @property
    def shape(self) -> SampleShape:
        """The shape of the bucket's samples."""
        return image_shape(self.target_hw)

    @property
    def lost_share(self) -> float:
        """Fraction of the image's area that is cropped away."""
        (height, width), (target_height, target_width) = self.resized_hw, self.target_hw
        return 1.0 - target_height * target_width / (height * width)

    def transposed(self) -> Geometry:
        """Return the same geometry with height and width swapped."""
        return Geometry(self.original_hw[::-1], self.resized_hw[::-1], self.crop_top_left[::-1], self.target_hw[::-1])


def image_shape(size_hw: Size) -> SampleShape:
    """Return the shape of a sample with an image of (height, width) pixels."""
    return SampleShape.of(h=size_hw[0], w=size_hw[1])


@lru_cache(maxsize=64)
def bucket_sizes(resolution: int, step: int, max_aspect: float) -> tuple[Size, ...]:
    """Return all buckets, sorted by size. Sides are multiples of ``step``; the area is at most ``resolution**2``.

    They are the tallest bucket of each width, the widest bucket of each height, and the largest square. The ratio of
    the longer to the shorter side is at most ``max_aspect``.

    Raises:
        DataError: the resolution is smaller than one step.
    """
    side = resolution // step * step
    if side == 0:
        raise DataError(
            "resolution-too-small",
            f"A resolution of {resolution} pixels is smaller than one bucket step of {step} pixels.",
            where=f"data.resolution: {resolution}",
            fix="Raise data.resolution or lower data.bucket_step.",
        )
    sizes = {(side, side)}
    widest = min(resolution**2 // step, math.ceil(resolution * math.sqrt(max_aspect)))  # wider is too flat
    for width in range(step, widest + 1, step):
        height = resolution**2 // width // step * step
        if max(height, width) <= max_aspect * min(height, width):
            sizes |= {(height, width), (width, height)}
    return tuple(sorted(sizes))


def largest_shape(data: DataSection) -> SampleShape:
    """Return the shape of the largest bucket by area, even if no image uses it.

    If several buckets have this area, the one closest to a square is returned.
    """
    resolution = max(source.resolution for source in data.resolved_sources())
    sizes = bucket_sizes(resolution, data.bucket_step, data.bucket_max_aspect if data.enable_bucket else 1.0)
    return image_shape(max(sizes, key=lambda hw: (hw[0] * hw[1], -abs(hw[0] - hw[1]))))


def choose_bucket(
    width: int, height: int, resolution: int, step: int, max_aspect: float, enable_bucket: bool, upscale: bool
) -> Geometry:
    """Return the scaling and crop for an image: the image is scaled to cover its bucket and cropped at the centre.

    The bucket is the one with the nearest aspect ratio (by logarithm). Without ``upscale``, an image smaller than this
    bucket gets a smaller bucket: the image's sides rounded down to ``step``. The sides of the nearest bucket and
    ``max_aspect`` limit it. Without ``enable_bucket``, all buckets are squares.

    Raises:
        DataError: a side of the image is smaller than one step and ``upscale`` is off, or the resolution is smaller
            than one step.
    """
    if width < height:  # portrait is transposed to landscape, so that both are treated exactly alike
        return choose_bucket(height, width, resolution, step, max_aspect, enable_bucket, upscale).transposed()
    max_aspect = max_aspect if enable_bucket else 1.0
    aspect = math.log(width / height)
    landscape = [size for size in bucket_sizes(resolution, step, max_aspect) if size[1] >= size[0]]
    target = min(landscape, key=lambda hw: (abs(math.log(hw[1] / hw[0]) - aspect), -hw[0] * hw[1]))
    if not upscale and (height < target[0] or width < target[1]):
        target = _own_bucket(width, height, target, step, max_aspect)
    return covering((height, width), target)


def covering(original_hw: Size, target_hw: Size) -> Geometry:
    """Return the geometry that scales an image to cover the target, enlarging it if necessary, and crops its centre."""
    resized = _cover(original_hw, target_hw)
    top_left = ((resized[0] - target_hw[0]) // 2, (resized[1] - target_hw[1]) // 2)
    return Geometry(original_hw, resized, top_left, target_hw)


def _own_bucket(width: int, height: int, bucket_hw: Size, step: int, max_aspect: float) -> Size:
    """Return the bucket of a landscape image that is smaller than the nearest bucket ``bucket_hw``.

    Raises:
        DataError: the height is smaller than one step.
    """
    if height < step:
        raise DataError(
            "image-too-small",
            f"An image of {width}x{height} pixels is smaller than one bucket step of {step} pixels.",
            fix="Use a larger image, set data.upscale: true, or lower data.bucket_step.",
        )
    own_height = min(height // step * step, bucket_hw[0])
    widest = int(own_height * max_aspect) // step * step
    return own_height, min(width // step * step, bucket_hw[1], widest)


def _cover(original_hw: Size, target_hw: Size) -> Size:
    """Return the smallest size that covers the target at the original's aspect ratio, rounded to whole pixels."""
    (height, width), (target_height, target_width) = original_hw, target_hw
    if target_height * width >= target_width * height:  # the height limits the scale
        return target_height, max(target_width, _divide_rounded(width * target_height, height))
    return max(target_height, _divide_rounded(height * target_width, width)), target_width


def _divide_rounded(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)
