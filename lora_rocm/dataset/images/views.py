"""Views of an image: its cached versions, of which each step draws one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from lora_rocm.dataset.images.buckets import Geometry, Size
from lora_rocm.dataset.sources.given import Rectangle
from lora_rocm.foundation.seeds import draw, fraction

if TYPE_CHECKING:
    from PIL import Image

    from lora_rocm.dataset.sample_table import Sample
    from lora_rocm.recipe.source_sections import SourceOptions

HUE_STEPS = 256  # in Pillow's HSV images
MOST_HUE_STEPS = 11  # 15.5 degrees; sd-scripts (AugHelper.color_aug): 8 of OpenCV's 180 steps, which is 16 degrees
MOST_GAMMA = 0.05  # more or less than 1, as there


@dataclass(frozen=True, slots=True)
class ImageView:
    """One version of an image.

    flip: mirrored. crop: number of the random crop. colour: number of the change of colours; 0: unchanged.
    """

    flip: bool = False
    crop: int = 0
    colour: int = 0


PLAIN = ImageView()


def views_of(options: SourceOptions) -> tuple[ImageView, ...]:
    """The views of each image of a source: first the plain one, last the mirrored ones."""
    flips = (False, True) if options.flip_aug else (False,)
    crops, colours = range(max(int(options.random_crop), 1)), range(options.color_aug + 1)
    return tuple(ImageView(*each) for each in product(flips, crops, colours))


def view_count(options: SourceOptions) -> str:
    """A sentence with the number of an image's views and their causes; empty if it has one view."""
    parts = {
        "random_crop": max(int(options.random_crop), 1),
        "color_aug": options.color_aug + 1,
        "flip_aug": 1 + options.flip_aug,
    }
    num_views = len(views_of(options))
    if num_views == 1:
        return ""
    factors = " x ".join(f"{count} ({name})" for name, count in parts.items() if count > 1)
    return f"{num_views} versions of each image are encoded and stored, {num_views} times the time and disk: {factors}"


def view_geometry(geometry: Geometry, sample: Sample, view: ImageView) -> Geometry:
    """The crop of one view. ``geometry``: the plain view's geometry."""
    if view.crop:
        geometry = randomly_cropped(geometry, sample, view.crop)
    if view.flip and sample.given.crop is not None:  # an image is mirrored before it is cropped
        top, left = geometry.crop_top_left
        geometry = replace(geometry, crop_top_left=(top, geometry.resized_hw[1] - geometry.target_hw[1] - left))
    return geometry


def randomly_cropped(geometry: Geometry, sample: Sample, number: int) -> Geometry:
    """The geometry with one of the random crops of a sample, inside its given crop if it has one."""
    (top, left), (height, width) = window(geometry, sample.given.crop)
    spare_hw = (height - geometry.target_hw[0], width - geometry.target_hw[1])
    which = (number,) if number else ()
    down, right = (draw("crop", sample.key, axis, *which) % (spare + 1) for axis, spare in enumerate(spare_hw))
    return replace(geometry, crop_top_left=(top + down, left + right))


def window(geometry: Geometry, crop: Rectangle | None) -> tuple[Size, Size]:
    """(top, left) and (height, width) of the part of the scaled image that may be used; it contains the target."""
    if crop is None:
        return (0, 0), geometry.resized_hw
    left, top, width, height = crop
    rows = _scaled(top, height, geometry.original_hw[0], geometry.resized_hw[0], geometry.target_hw[0])
    columns = _scaled(left, width, geometry.original_hw[1], geometry.resized_hw[1], geometry.target_hw[1])
    return (rows[0], columns[0]), (rows[1], columns[1])


def _scaled(start: int, length: int, whole: int, resized: int, target: int) -> tuple[int, int]:
    """Start and length of a part after scaling ``whole`` to ``resized``; at least as long as ``target``."""
    size = min(max(round(length * resized / whole), target), resized)
    return min(round(start * resized / whole), resized - size), size


def within(geometry: Geometry, original_hw: Size, crop: Rectangle) -> Geometry:
    """The geometry of a whole image, of which only a given crop is used.

    Args:
        geometry: geometry of the given crop, treated as an image.
        original_hw: size of the whole image.
        crop: the given crop.
    """
    resized = [
        max(round(whole * size / part), target)
        for whole, size, part, target in zip(
            original_hw, geometry.resized_hw, geometry.original_hw, geometry.target_hw, strict=True
        )
    ]
    found = Geometry(original_hw, (resized[0], resized[1]), (0, 0), geometry.target_hw)
    (top, left), (height, width) = window(found, crop)
    centre = (top + (height - found.target_hw[0]) // 2, left + (width - found.target_hw[1]) // 2)
    return replace(found, crop_top_left=centre)


def colour_change(sample: Sample, view: ImageView) -> tuple[str, float] | None:
    """The change of colours of a view: ("hue", steps of HUE_STEPS) or ("gamma", exponent); None: none.

    Odd numbers are small turns of the hue, even numbers are gammas near 1. The limits are sd-scripts' limits.
    sd-scripts changes every third image, and takes the power of values up to 255; here values go up to 1.
    """
    if not view.colour:
        return None
    if view.colour % 2:
        steps = draw("hue", sample.key, view.colour) % (2 * MOST_HUE_STEPS)
        return "hue", float(steps - MOST_HUE_STEPS + (steps >= MOST_HUE_STEPS))  # never 0
    return "gamma", 1.0 + MOST_GAMMA * (2.0 * fraction("gamma", sample.key, view.colour) - 1.0)


def recoloured(image: Image.Image, change: tuple[str, float] | None) -> Image.Image:
    """An image in mode RGB with a ``colour_change``."""
    if change is None:
        return image
    from PIL import Image

    kind, amount = change
    if kind == "gamma":
        return image.point([round(255 * (value / 255) ** amount) for value in range(256)] * 3)
    hue, saturation, brightness = image.convert("HSV").split()
    turned = hue.point([(value + int(amount)) % HUE_STEPS for value in range(HUE_STEPS)])
    return Image.merge("HSV", (turned, saturation, brightness)).convert("RGB")
