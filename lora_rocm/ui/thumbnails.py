"""Small versions of images, decoded with the bounds of the training data's decoder, and cached on the disk."""

from __future__ import annotations

import contextlib
import hashlib
from io import BytesIO
from pathlib import Path

from lora_rocm.errors import StorageError, UserError
from lora_rocm.foundation.bounded_read import FileVersion, read_plain
from lora_rocm.foundation.files import write_atomic
from lora_rocm.hardware.app_dir import own_app_dir

SIDES_PX = (128, 256, 512, 1024)
"""The sizes that exist; a request gets the next larger one."""
MAX_IMAGE_BYTES = 1 << 28
MEDIA_TYPE = "image/jpeg"


def thumbnail(path: Path, side_px: int) -> tuple[bytes, str]:
    """Return an image that fits into a square, as JPEG, and its version for the browser's cache.

    Args:
        path: the image, from ``Folders.resolve``.
        side_px: length of the square's side.

    Raises:
        UserError: no-image: there is no such file, for example because its run was deleted. image-unreadable: it is not
            an image that can be decoded.
    """
    side_px = next((side for side in SIDES_PX if side >= side_px), SIDES_PX[-1])
    try:
        version = FileVersion.of(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    key = hashlib.sha256(f"{version}|{side_px}".encode("utf-8", "replace")).hexdigest()
    kept = own_app_dir() / "ui" / "thumbnails" / key[:2] / key
    with contextlib.suppress(OSError):
        return read_plain(kept, MAX_IMAGE_BYTES), key
    content = _made(path, side_px)
    with contextlib.suppress(StorageError):  # a full disk costs only time
        write_atomic(kept, content, read_back=False)
    return content, key


def _made(path: Path, side_px: int) -> bytes:
    from lora_rocm.dataset.images.image_io import UnreadableImage, decode

    try:
        image = decode(read_plain(path, MAX_IMAGE_BYTES))
    except (UnreadableImage, OSError) as error:
        raise _unreadable(path, error) from error
    image.thumbnail((side_px, side_px))
    buffer = BytesIO()
    image.save(buffer, "JPEG", quality=88)
    return buffer.getvalue()


def _unreadable(path: Path, error: Exception) -> UserError:
    if isinstance(error, FileNotFoundError):
        return UserError("no-image", "There is no such image.", where=str(path), fix="Reload the page.")
    what = f"This file cannot be shown as an image: {error}"
    return UserError("image-unreadable", what, where=str(path), fix="Open it with another program to examine it.")
