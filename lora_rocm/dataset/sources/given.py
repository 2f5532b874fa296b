"""Values that a user's table specifies for single images: loss weight, crop, further captions."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lora_rocm.foundation.json_text import BadJson, parse_json

MAX_LOSS_WEIGHT = 1000.0
CROP_COLUMN = "crop"
"""The column of crops, unless a recipe names another."""
Rectangle = tuple[int, int, int, int]
"""A crop as (left, top, width, height), in pixels of the image after applying EXIF orientation."""


class UnusableValue(Exception):
    """A value in a user's table that cannot be used. The message is the reason."""


@dataclass(frozen=True, slots=True)
class Given:
    """Values that a user's table specifies for one image.

    loss_weight: factor of the image's loss, in addition to the source's factor.
    crop: the part of the image to use; None for the whole image.
    captions: the image's captions after the first.
    """

    loss_weight: float = 1.0
    crop: Rectangle | None = None
    captions: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The values as text for ``of_text``; "" if all are defaults."""
        return "" if self == Given() else json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> Given:
        """Return the values that the property ``text`` converted to text."""
        if not text:
            return cls()
        values = json.loads(text)  # json: a record that this process made
        crop = values["crop"]
        return cls(values["loss_weight"], None if crop is None else rectangle(crop), tuple(values["captions"]))


def loss_weight(value: object) -> float:
    """Return the loss weight in a table's cell, which contains a number or a number as text.

    Raises:
        UnusableValue: the cell is not a number above 0 and up to MAX_LOSS_WEIGHT.
    """
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not 0.0 < number <= MAX_LOSS_WEIGHT:  # weight 0 marks the rows that pad batches
        raise UnusableValue(f"its weight is not a number above 0 and up to {MAX_LOSS_WEIGHT:g}: {value!r:.60}")
    return number


def rectangle(value: object) -> Rectangle:
    """Return the crop in a table's cell, which contains [x, y, width, height] as a list or as text.

    Raises:
        UnusableValue: the cell is not a rectangle.
    """
    found = value
    if isinstance(value, str):
        try:
            found = parse_json(f"[{value.strip().removeprefix('[').removesuffix(']')}]")
        except BadJson:
            found = None
    if isinstance(found, Sequence) and len(found) == 4 and all(type(number) is int for number in found):
        left, top, width, height = found
        if left >= 0 and top >= 0 and width > 0 and height > 0:
            return left, top, width, height
    raise UnusableValue(f"its crop is not [x, y, width, height] in whole pixels: {value!r:.60}")
