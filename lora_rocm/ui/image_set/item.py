"""One image as its editor shows it: its caption files, the texts that training reads, and its bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.dataset.captions.captions import as_read, variants
from lora_rocm.dataset.images.buckets import Geometry
from lora_rocm.dataset.sample_table import Sample
from lora_rocm.dataset.sources.given import Given, Rectangle
from lora_rocm.dataset.sources.scan import geometry_of
from lora_rocm.errors import Problem
from lora_rocm.ui.edits import Edits
from lora_rocm.ui.image_set.listing import ImageListing
from lora_rocm.ui.image_set.saving import OpenCaption, Resolve, opened

MAX_VARIANTS = 4


@dataclass(frozen=True)
class ShownImage:
    """An image in its editor.

    Attributes:
        name: the image.
        version: changes with its file.
        size_wh: width and height of the upright image; None if it cannot be read.
        captions: its caption files with their names; at least one, which may not exist.
        origin: see ``ImageCaption.origin``.
        metadata: the captions of a metadata file, which are used because it has no caption file.
        problem: why its captions cannot be read, or empty.
        trained: the first texts to train on.
        bucket: its bucket as text.
        lost_share: share of the area that is cropped away.
        too_small: why it has no bucket, or empty.
        crop: the part of the image that is used; None for all of it.
        has_mask: whether it has a mask.
    """

    name: str
    version: str
    size_wh: tuple[int, int] | None
    captions: Sequence[tuple[str, OpenCaption]]
    origin: str
    metadata: Sequence[str]
    problem: str
    trained: Sequence[str]
    bucket: str
    lost_share: float
    too_small: str
    crop: Rectangle | None
    has_mask: bool


def shown_image(edits: Edits, resolve: Resolve, listing: ImageListing, name: str, version: str) -> ShownImage:
    """Return an image as its editor shows it.

    Raises:
        UserError: no-image: there is no such image.
        StorageError: a caption file cannot be read.
    """
    caption, size, options = listing.caption(name), listing.size(name), listing.reading.options
    files = caption.files or (listing.caption_file(name),)
    texts = caption.texts or ("",)
    trained = dict.fromkeys(
        text for each in texts for text in variants(as_read(each, options), options, MAX_VARIANTS, 0)
    )
    found = None if size is None else geometry(listing, name, size)
    return ShownImage(
        name,
        version,
        size,
        [(file.name, opened(edits, resolve, file)) for file in files],
        caption.origin,
        caption.texts if caption.origin == "metadata" else (),
        caption.problem,
        [] if caption.problem or caption.origin == "none" else list(trained)[:MAX_VARIANTS],
        str(found.shape) if isinstance(found, Geometry) else "",
        found.lost_share if isinstance(found, Geometry) else 0.0,
        found.what if isinstance(found, Problem) else "",
        listing.crop(name),
        listing.mask(name) is not None,
    )


def geometry(listing: ImageListing, name: str, size_wh: tuple[int, int]) -> Geometry | Problem:
    """Return scaling and crop of an image as in training, or why it has none."""
    reading = listing.reading
    given = Given(crop=listing.crop(name)) if reading.options.crop_column else Given()
    path: Path = listing.path(name)
    sample = Sample(name, 0, "", path, "", *size_wh, 1, reading.options, given)
    return geometry_of(sample, reading.data)
