"""What the user's tables say of single images besides a caption: weight of the loss, crop, further captions."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lora_rocm.foundation.json_text import BadJson, parse_json

MAX_LOSS_WEIGHT = 1000.0
Rectangle = tuple[int, int, int, int]
"""(left, top, width, height) in pixels of the upright image."""


class UnusableValue(Exception):
    """A value of a table that says nothing usable of an image; the message says why."""


@dataclass(frozen=True, slots=True)
class Given:
    """What a table says of one image.

    loss_weight: factor of its loss beside that of its source.
    crop: the part of the image that is used; None: all of it.
    captions: its captions after the first.
    """

    loss_weight: float = 1.0
    crop: Rectangle | None = None
    captions: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """As text for ``of_text``; empty if nothing is said."""
        return "" if self == Given() else json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> Given:
        """The value that ``text`` was made from."""
        if not text:
            return cls()
        values = json.loads(text)
        crop = values["crop"]
        return cls(values["loss_weight"], None if crop is None else rectangle(crop), tuple(values["captions"]))


def loss_weight(value: object) -> float:
    """The weight in a cell of a table: a number, or text that is one.

    Raises:
        UnusableValue: it is none above 0 and up to MAX_LOSS_WEIGHT.
    """
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not 0.0 < number <= MAX_LOSS_WEIGHT:  # rows of weight 0 fill up batches
        raise UnusableValue(f"its weight is no number above 0 and up to {MAX_LOSS_WEIGHT:g}: {value!r:.60}")
    return number


def rectangle(value: object) -> Rectangle:
    """The crop in a cell of a table: [x, y, width, height] as a list, or as text.

    Raises:
        UnusableValue: it is no rectangle.
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
    raise UnusableValue(f"its crop is no [x, y, width, height] in whole pixels: {value!r:.60}")
