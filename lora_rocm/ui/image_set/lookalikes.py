"""Finds images that occur twice: files with exactly the same content, and similar images.

An image is divided into 9 x 9 fields. Its 144 bits compare each field's brightness with the next field in its row and
its column. Two images are similar if at most MAX_BITS bits differ, and if their colours in 4 x 4 fields differ by up to
MAX_COLOUR on average. This finds copies that were scaled, compressed or slightly changed. It does not find mirrored or
cropped copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lora_rocm.dataset.images.image_io import UnreadableImage, decode
from lora_rocm.dataset.sources.equal_files import equal_files
from lora_rocm.errors import UserError
from lora_rocm.ui.image_set.listing import ImageListing
from lora_rocm.ui.thumbnails import SIDES_PX, thumbnail

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FIELDS, COLOUR_FIELDS = 9, 4
NUM_BYTES = 18
"""Bytes of an image's bits: twice FIELDS * (FIELDS - 1) bits."""
MAX_BITS, MAX_COLOUR = 12, 10.0
ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class AlikeImages:
    """Images that occur several times. is_exact: whether their files have exactly the same content."""

    names: tuple[str, ...]
    is_exact: bool


def alike_images(
    listing: ImageListing, resolve: Callable[[str], Path], advance: Callable[[int, int], None]
) -> list[AlikeImages]:
    """Return the groups of equal files, and then the groups of similar images.

    Skips images that cannot be read, and links to files outside of the named folders.

    Args:
        listing: the images.
        resolve: ``Folders.resolve``.
        advance: called with the number of finished images and of all; it may raise to cancel.
    """
    import numpy as np

    # describe each image
    names, bits, colours = list[str](), [], []
    for number, name in enumerate(listing.names):
        advance(number, len(listing.names))
        with contextlib.suppress(UserError, UnreadableImage, OSError):
            small, _ = thumbnail(resolve(str(listing.path(name))), SIDES_PX[0])
            bits_of_image, colours_of_image = described(small)
            names.append(name)
            bits.append(bits_of_image)
            colours.append(colours_of_image)
    if not names:
        return []
    # equal files
    equal = equal_files([listing.path(name) for name in names])
    groups = [AlikeImages(tuple(names[place] for place in group), True) for group in equal]
    first_of = {name: group.names[0] for group in groups for name in group.names}
    # similar images; a group of equal files counts once
    alone = [place for place, name in enumerate(names) if first_of.get(name, name) == name]
    found = _alike(np.stack([bits[place] for place in alone]), np.stack([colours[place] for place in alone]), advance)
    groups += [AlikeImages(tuple(names[alone[place]] for place in group), False) for group in found]
    return groups


def described(content: bytes) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return the bits and the colours that are compared.

    Raises:
        UnreadableImage: see ``image_io.decode``.
    """
    import numpy as np
    from PIL import Image

    image = decode(content)
    grey_HW = np.asarray(image.convert("L").resize((FIELDS, FIELDS), Image.Resampling.BOX), np.int16)
    brighter = (grey_HW[:, :-1] > grey_HW[:, 1:], grey_HW[:-1] > grey_HW[1:])
    colours = np.asarray(image.resize((COLOUR_FIELDS, COLOUR_FIELDS), Image.Resampling.BOX), np.float32)
    return np.packbits(np.concatenate([each.ravel() for each in brighter])), colours.ravel()


def _alike(
    bits_NB: NDArray[np.uint8], colours_NC: NDArray[np.float32], advance: Callable[[int, int], None]
) -> list[list[int]]:
    """Return groups of similar images, as positions. An image belongs to the group of any image like it."""
    import numpy as np

    groups = list(range(len(bits_NB)))

    def group_of(place: int) -> int:
        while groups[place] != place:
            groups[place] = groups[groups[place]]
            place = groups[place]
        return place

    words_NW = np.zeros((len(bits_NB), 24), np.uint8)
    words_NW[:, :NUM_BYTES] = bits_NB
    words = words_NW.view(np.uint64)
    for start in range(0, len(words), ROWS_AT_ONCE):
        advance(start, len(words))
        rows = words[start : start + ROWS_AT_ONCE]
        differing = sum(np.bitwise_count(rows[:, None, word] ^ words[None, :, word]) for word in range(3))
        for row, column in zip(*np.nonzero(differing <= MAX_BITS), strict=True):
            one, other = start + int(row), int(column)
            if one < other and np.abs(colours_NC[one] - colours_NC[other]).mean() <= MAX_COLOUR:
                groups[group_of(other)] = group_of(one)
    found = dict[int, list[int]]()
    for place in range(len(groups)):
        found.setdefault(group_of(place), []).append(place)
    return [group for group in found.values() if len(group) > 1]
