"""Aspect-ratio buckets: pure maths, in pixels. Sizes are (height, width) unless a name says otherwise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from lora_rocm.dataset.shape import Shape
from lora_rocm.errors import DataError

if TYPE_CHECKING:
    from lora_rocm.recipe.schema import DataSection

Size = tuple[int, int]


@dataclass(frozen=True)
class Geometry:
    """How one image is cut. SDXL is told original_hw, crop_top_left and target_hw.

    original_hw: size of the file after EXIF orientation.
    resized_hw: size it is scaled to; covers target_hw.
    crop_top_left: (top, left) of the crop in the scaled image.
    target_hw: size of the crop, which is the size of the bucket.
    """

    original_hw: Size
    resized_hw: Size
    crop_top_left: Size
    target_hw: Size

    @property
    def shape(self) -> Shape:
        """The bucket."""
        return image_shape(self.target_hw)

    @property
    def lost_share(self) -> float:
        """Share of the image's area that the crop cuts off."""
        (height, width), (target_height, target_width) = self.resized_hw, self.target_hw
        return 1.0 - target_height * target_width / (height * width)

    def transposed(self) -> Geometry:
        """The same with height and width exchanged."""
        return Geometry(self.original_hw[::-1], self.resized_hw[::-1], self.crop_top_left[::-1], self.target_hw[::-1])


def image_shape(size_hw: Size) -> Shape:
    """The shape of an image of (height, width) pixels."""
    return Shape.of(h=size_hw[0], w=size_hw[1])


@lru_cache(maxsize=64)
def bucket_sizes(resolution: int, step: int, max_aspect: float) -> tuple[Size, ...]:
    """Every bucket, sorted: sides are multiples of ``step``, the area is at most ``resolution**2``.

    For each width the highest that fits, and for each height the widest; and the square, rounded down to ``step``.
    Longest over shortest side is at most ``max_aspect``.

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
    widest = min(resolution**2 // step, math.ceil(resolution * math.sqrt(max_aspect)))  # beyond it is too flat
    for width in range(step, widest + 1, step):
        height = resolution**2 // width // step * step
        if max(height, width) <= max_aspect * min(height, width):
            sizes |= {(height, width), (width, height)}
    return tuple(sorted(sizes))


def largest_shape(data: DataSection) -> Shape:
    """The bucket that costs most, whether or not an image falls into it; of several the one closest to a square."""
    resolution = max(source.resolution for source in data.resolved_sources())
    sizes = bucket_sizes(resolution, data.bucket_step, data.bucket_max_aspect if data.enable_bucket else 1.0)
    return image_shape(max(sizes, key=lambda hw: (hw[0] * hw[1], -abs(hw[0] - hw[1]))))


def square_shape(data: DataSection) -> Shape:
    """The bucket of a square image.

    Raises:
        DataError: as ``bucket_sizes``.
    """
    return image_shape(max(bucket_sizes(data.resolution, data.bucket_step, max_aspect=1.0)))


def choose_bucket(
    width: int, height: int, resolution: int, step: int, max_aspect: float, enable_bucket: bool, upscale: bool
) -> Geometry:
    """Choose the bucket of an image: the nearest by logarithm of the aspect ratio. Scaled to cover, cut at the centre.

    Without ``upscale`` an image that is smaller than its bucket gets a smaller bucket of its own: its sides rounded
    down to ``step``, within the sides of the bucket that it missed and within ``max_aspect``.
    Without ``enable_bucket`` every bucket is square.

    Raises:
        DataError: a side is smaller than one step (and ``upscale`` is off), or the resolution is.
    """
    if width < height:  # portrait is landscape lying down, so that both are treated exactly alike
        return choose_bucket(height, width, resolution, step, max_aspect, enable_bucket, upscale).transposed()
    max_aspect = max_aspect if enable_bucket else 1.0
    aspect = math.log(width / height)
    landscape = [size for size in bucket_sizes(resolution, step, max_aspect) if size[1] >= size[0]]
    target = min(landscape, key=lambda hw: (abs(math.log(hw[1] / hw[0]) - aspect), -hw[0] * hw[1]))
    if not upscale and (height < target[0] or width < target[1]):
        target = _own_bucket(width, height, target, step, max_aspect)
    resized = _cover((height, width), target)
    top_left = ((resized[0] - target[0]) // 2, (resized[1] - target[1]) // 2)
    return Geometry((height, width), resized, top_left, target)


def _own_bucket(width: int, height: int, bucket_hw: Size, step: int, max_aspect: float) -> Size:
    """The bucket of a landscape image that is smaller than ``bucket_hw``."""
    if height < step:
        raise DataError(
            "image-too-small",
            f"An image of {width}x{height} pixels is smaller than one bucket step of {step} pixels.",
            fix="Take a larger image, set data.upscale: true, or lower data.bucket_step.",
        )
    own_height = min(height // step * step, bucket_hw[0])
    widest = int(own_height * max_aspect) // step * step
    return own_height, min(width // step * step, bucket_hw[1], widest)


def _cover(original_hw: Size, target_hw: Size) -> Size:
    """Size of the original after scaling both sides alike until it just covers the target (rounded to whole pixels)."""
    (height, width), (target_height, target_width) = original_hw, target_hw
    if target_height * width >= target_width * height:  # the height decides
        return target_height, max(target_width, _divide_rounded(width * target_height, height))
    return max(target_height, _divide_rounded(height * target_width, width)), target_width


def _divide_rounded(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)
