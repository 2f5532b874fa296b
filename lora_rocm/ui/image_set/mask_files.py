"""The mask of an image, in the place where training finds it."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from lora_rocm.dataset.companions.masks import decode_mask, fits
from lora_rocm.dataset.images.image_io import UnreadableImage
from lora_rocm.errors import UserError
from lora_rocm.recipe.sections import BESIDE
from lora_rocm.ui.edits import MAX_FILE_BYTES, MISSING, Edits, SavedEdit
from lora_rocm.ui.image_set.changes import ChangeJournal
from lora_rocm.ui.image_set.listing import ImageListing
from lora_rocm.ui.image_set.saving import Resolve

if TYPE_CHECKING:
    from PIL import Image

MAX_SIDE_PX = 1536
"""Longest side of a mask that is made in the page. Training averages masks over the pixels of the latents anyway."""
MARK = "-masklabel"
"""End of the name of a mask that is next to its image."""


@dataclass(frozen=True)
class OpenMask:
    """The mask of an image as its editor shows it.

    Attributes:
        path: the mask's file, with links resolved; it may not exist.
        version: its version.
        size_wh: the size in which the editor paints it.
        is_read: whether the recipe reads masks from there. It is False if no recipe is chosen.
        is_alpha: whether the recipe takes the alpha channel of the images instead.
    """

    path: Path
    version: str
    size_wh: tuple[int, int]
    is_read: bool
    is_alpha: bool

    @property
    def exists(self) -> bool:
        return self.version != MISSING


def opened_mask(edits: Edits, resolve: Resolve, listing: ImageListing, name: str) -> OpenMask:
    """Return the mask of an image as its editor shows it.

    Raises:
        UserError: no-image; or image-unreadable; or outside-folders.
        StorageError: the mask cannot be read.
    """
    options, size = listing.reading.options, _size_of(listing, name)
    path = resolve(str(mask_place(listing, name)))
    scale = min(1.0, MAX_SIDE_PX / max(size))
    painted = (max(1, round(size[0] * scale)), max(1, round(size[1] * scale)))
    is_read = listing.reading.recipe is not None and options.mask_path is not None
    return OpenMask(path, edits.read(path)[1], painted, is_read, options.alpha_mask)


def mask_place(listing: ImageListing, name: str) -> Path:
    """Return the mask that training finds for an image, or the place of a new one.

    A new mask is in the recipe's folder of masks under the same name, else next to the image as NAME-masklabel.png.
    """
    found, folder = listing.mask(name), listing.reading.options.mask_path
    if found is not None:
        return found
    if folder is not None and folder != BESIDE:
        return Path(folder) / Path(listing.real_name(name)).with_suffix(".png")
    image = listing.path(name)
    return image.with_name(f"{image.stem}{MARK}.png")


def mask_picture(edits: Edits, mask: OpenMask) -> bytes:
    """Return the mask as a grey PNG of the size in which the editor paints it; white if it does not exist.

    Raises:
        UserError: image-unreadable: the file is not a mask.
        StorageError: it cannot be read.
    """
    from PIL import Image

    content, _ = edits.read(mask.path)
    picture = Image.new("L", mask.size_wh, 255) if content is None else _decoded(content, mask.path)
    return _encoded(picture.resize(mask.size_wh), ".png")


def save_mask(
    edits: Edits,
    resolve: Resolve,
    journal: ChangeJournal,
    listing: ImageListing,
    name: str,
    content: bytes | None,
    version: str,
) -> SavedEdit:
    """Save the mask of an image, or delete it if ``content`` is None. The image itself is never written.

    Args:
        edits: saves the file.
        resolve: see ``Resolve``.
        journal: the journal of the folder.
        listing: the listing with the image.
        name: the image.
        content: an image file, of which only the brightness is used.
        version: the version that the editor saw.

    Raises:
        EditConflict: the mask has changed since.
        UserError: mask-proportions, mask-of-alpha, mask-is-image, image-unreadable, no-image or outside-folders.
        StorageError: the file cannot be written.
    """
    size, place = _size_of(listing, name), mask_place(listing, name)
    if listing.reading.options.alpha_mask:
        fix = "Remove alpha_mask from the recipe, or change the alpha channel in another program."
        raise UserError("mask-of-alpha", "The recipe takes the alpha channels as masks.", where=name, fix=fix)
    if listing.is_image(place):
        fix = "Rename the file, or set mask_path of the recipe to a folder of masks."
        raise UserError("mask-is-image", "The mask would replace an image.", where=str(place), fix=fix)
    if content is not None:
        picture = _decoded(content, place)
        if not fits(picture.size, size):
            what = f"The mask is {picture.width}x{picture.height}, but the image is {size[0]}x{size[1]}."
            raise UserError("mask-proportions", what, where=name, fix="Open the image again.")
        content = _encoded(picture, place.suffix.lower())
    path = resolve(str(place))
    saved = edits.save(path, content, version)
    if saved.undo:
        journal.add("mask", [path])
    listing.note_mask()
    return saved


def _size_of(listing: ImageListing, name: str) -> tuple[int, int]:
    size = listing.size(name)
    if size is None:
        fix = "Open it with another program to examine it."
        raise UserError("image-unreadable", "This file cannot be read as an image.", where=name, fix=fix)
    return size


def _decoded(content: bytes, path: Path) -> Image.Image:
    try:
        return decode_mask(content, alpha=False)
    except UnreadableImage as error:
        what = f"This file cannot be read as a mask: {error}."
        raise UserError("image-unreadable", what, where=str(path), fix="Replace or delete it.") from error


def _encoded(picture: Image.Image, suffix: str) -> bytes:
    from PIL import Image

    buffer = BytesIO()
    kind = Image.registered_extensions().get(suffix, "PNG")
    picture.save(buffer, kind, **({"quality": 95} if kind == "JPEG" else {"lossless": True} if kind == "WEBP" else {}))
    if len(buffer.getvalue()) > MAX_FILE_BYTES:
        raise UserError("mask-too-large", "This mask is too large.", where=suffix, fix="Use a simpler mask.")
    return buffer.getvalue()
