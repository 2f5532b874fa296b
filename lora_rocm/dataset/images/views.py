"""Views: the variations of an image (mirrored, cropped, recoloured) that are cached. Each step draws one of them."""

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
    """One variation of an image.

    flip: whether the image is mirrored.
    crop: number of the random crop.
    colour: number of the colour change; 0 means unchanged.
    """

    flip: bool = False
    crop: int = 0
    colour: int = 0


PLAIN = ImageView()


def views_of(options: SourceOptions) -> tuple[ImageView, ...]:
    """Return the views of every image of a source. The plain view is first, and all mirrored views are last."""
    flips = (False, True) if options.flip_aug else (False,)
    crops, colours = range(max(int(options.random_crop), 1)), range(options.color_aug + 1)
    return tuple(ImageView(*each) for each in product(flips, crops, colours))


def view_count(options: SourceOptions) -> str:
    """Return a sentence with the number of views per image and the options that cause them; "" if there is only one."""
    parts = {
        "random_crop": max(int(options.random_crop), 1),
        "color_aug": options.color_aug + 1,
        "flip_aug": 1 + options.flip_aug,
    }
    num_views = len(views_of(options))
    if num_views == 1:
        return ""
    factors = " x ".join(f"{count} ({name})" for name, count in parts.items() if count > 1)
    cost = f"which takes {num_views} times the time and disk space"
    return f"{num_views} versions of each image are encoded and stored, {cost}: {factors}"


def view_geometry(geometry: Geometry, sample: Sample, view: ImageView) -> Geometry:
    """Return the geometry of one view. ``geometry``: geometry of the plain view."""
    if view.crop:
        geometry = randomly_cropped(geometry, sample, view.crop)
    if view.flip and sample.given.crop is not None:  # an image is mirrored before it is cropped
        top, left = geometry.crop_top_left
        geometry = replace(geometry, crop_top_left=(top, geometry.resized_hw[1] - geometry.target_hw[1] - left))
    return geometry


def randomly_cropped(geometry: Geometry, sample: Sample, number: int) -> Geometry:
    """Return the geometry with a random crop, which stays inside the crop that the user specified, if any.

    Args:
        geometry: geometry of the plain view.
        sample: the sample; its key seeds the random crop.
        number: number of the random crop.
    """
    (top, left), (height, width) = window(geometry, sample.given.crop)
    spare_hw = (height - geometry.target_hw[0], width - geometry.target_hw[1])
    which = (number,) if number else ()
    down, right = (draw("crop", sample.key, axis, *which) % (spare + 1) for axis, spare in enumerate(spare_hw))
    return replace(geometry, crop_top_left=(top + down, left + right))


def window(geometry: Geometry, crop: Rectangle | None) -> tuple[Size, Size]:
    """Return the usable part of the scaled image as (top, left) and (height, width); at least as large as the target.

    Args:
        geometry: scaling and target size of the image.
        crop: part of the original image that may be used; None for the whole image.
    """
    if crop is None:
        return (0, 0), geometry.resized_hw
    left, top, width, height = crop
    rows = _scaled(top, height, geometry.original_hw[0], geometry.resized_hw[0], geometry.target_hw[0])
    columns = _scaled(left, width, geometry.original_hw[1], geometry.resized_hw[1], geometry.target_hw[1])
    return (rows[0], columns[0]), (rows[1], columns[1])


def _scaled(start: int, length: int, whole: int, resized: int, target: int) -> tuple[int, int]:
    """Return start and length of an interval after scaling an axis from ``whole`` to ``resized`` pixels.

    The interval is enlarged to ``target`` pixels if it would be shorter.
    """
    size = min(max(round(length * resized / whole), target), resized)
    return min(round(start * resized / whole), resized - size), size


def within(geometry: Geometry, original_hw: Size, crop: Rectangle) -> Geometry:
    """Return the geometry of a whole image if only a part of it, specified by the user, may be used.

    Args:
        geometry: geometry that the part would have as a separate image.
        original_hw: size of the whole image.
        crop: the part that the user specified.
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
    """Return the colour change of a view: ("hue", steps of HUE_STEPS), ("gamma", exponent), or None if unchanged.

    Odd colour numbers rotate the hue a little; even ones apply a gamma near 1. The limits are the same as in
    sd-scripts. sd-scripts changes only every third image and applies its gamma to values up to 255; here, values are
    scaled to 1.
    """
    if not view.colour:
        return None
    if view.colour % 2:
        steps = draw("hue", sample.key, view.colour) % (2 * MOST_HUE_STEPS)
        return "hue", float(steps - MOST_HUE_STEPS + (steps >= MOST_HUE_STEPS))  # never 0
    return "gamma", 1.0 + MOST_GAMMA * (2.0 * fraction("gamma", sample.key, view.colour) - 1.0)


def recoloured(image: Image.Image, change: tuple[str, float] | None) -> Image.Image:
    """Return an image in mode RGB after applying a change from ``colour_change``."""
    if change is None:
        return image
    from PIL import Image

    kind, amount = change
    if kind == "gamma":
        return image.point([round(255 * (value / 255) ** amount) for value in range(256)] * 3)
    hue, saturation, brightness = image.convert("HSV").split()
    turned = hue.point([(value + int(amount)) % HUE_STEPS for value in range(HUE_STEPS)])
    return Image.merge("HSV", (turned, saturation, brightness)).convert("RGB")
