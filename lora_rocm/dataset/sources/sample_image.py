"""Reads and decodes a sample's image from a file, a clip's folder, or a cell of a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lora_rocm.dataset.images.image_io import MAX_IMAGE_BYTES, UnreadableImage, decode
from lora_rocm.dataset.rows.hf_datasets import DatasetRow, EmptyCell, UnreadableCell, image_in
from lora_rocm.dataset.sample_table import Sample
from lora_rocm.dataset.sources.clips import video_bytes
from lora_rocm.dataset.sources.folders import shown, source_folder
from lora_rocm.errors import DataError
from lora_rocm.foundation.bounded_read import read_plain

if TYPE_CHECKING:
    from PIL import Image

UNREADABLE_FIX = "Replace or remove the file."


def image_bytes(sample: Sample) -> bytes:
    """Return the undecoded bytes of a sample's image, for decoding and hashing.

    Raises:
        DataError: the image can no longer be read.
    """
    try:
        if sample.frames:
            options, video = sample.options, Path(str(sample.location))
            return video_bytes(video, source_folder(options.path or "", options.index), options, sample.frames)
        return bytes_at(sample.location)
    except OSError as error:
        raise unreadable(sample, error.strerror or str(error)) from error
    except UnreadableCell as error:
        raise unreadable(sample, str(error)) from error


def bytes_at(place: Path | DatasetRow) -> bytes:
    """Return the undecoded bytes of an image.

    ``place``: the image's file, or a cell that contains the image or the path of its file.

    Raises:
        OSError: the file can no longer be read.
        UnreadableCell: the cell can no longer be used.
    """
    content = place if isinstance(place, Path) else image_in(place)
    if content is None:
        raise EmptyCell("the cell is empty")
    return read_plain(content, MAX_IMAGE_BYTES) if isinstance(content, Path) else bytes(content)


def load_image(sample: Sample, content: bytes | None = None) -> Image.Image:
    """Decode a sample's image to mode RGB and apply its EXIF orientation; see ``image_io.decode``.

    ``content``: the image's undecoded bytes; None to read them.

    Raises:
        DataError: "image-unreadable", with the file's name.
    """
    try:
        image = decode(image_bytes(sample) if content is None else content)
    except UnreadableImage as error:
        raise unreadable(sample, str(error)) from error
    if image.size != (sample.width, sample.height):
        raise unreadable(sample, f"it is {image.width}x{image.height}, not {sample.width}x{sample.height} as before")
    return image


def unreadable(sample: Sample, reason: str) -> DataError:
    """Return the error "image-unreadable" for a sample. ``reason``: end of the message."""
    return DataError(
        "image-unreadable", f"The image cannot be read: {reason}.", where=shown(sample.location), fix=UNREADABLE_FIX
    )
