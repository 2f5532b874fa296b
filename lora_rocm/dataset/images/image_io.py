"""Reads images with Pillow: sizes from headers, and pixels of any mode as 8-bit sRGB, resized and cropped."""

from __future__ import annotations

import errno
import math
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from lora_rocm.dataset.images.image_plugins import JXL_STARTS, jxl_size, plugin_faults
from lora_rocm.foundation.bounded_read import check_plain
from lora_rocm.foundation.quiet import EVERYTHING

if TYPE_CHECKING:
    from PIL import Image, ImageCms

    from lora_rocm.dataset.images.buckets import Geometry

# Supported formats; HEIF and JXL need a plugin. Pillow has more, but it detects the format by content, not by file
# name: for EPS it would run Ghostscript, for WMF the drawing code of Windows, and nobody trains on the others (FITS,
# SPIDER, ...).
READ = frozenset("AVIF BMP DDS DIB GIF HEIF ICO JPEG JPEG2000 JXL MPO PCX PNG PPM PSD QOI SGI TGA TIFF WEBP".split())
MAX_HEADER_COST, COST_OF_A_READ = 1 << 24, 64  # bytes
MAX_IMAGE_BYTES = 1 << 29  # 178 megapixels, Pillow's limit, take 512 MiB uncompressed
TAIL_BYTES = 65536
# A file without this mark near its end may be truncated. A complete file can lack it too: a motion photo has a video
# after the picture, and Pillow reads a PNG without IEND. A truncated WebP has no header for Pillow.
END_MARKS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND"}
GIF_END = b"\0;"  # the end of the last block, and the trailer (GIF89a, 27)
STRIPS, TILES = (273, 279), (324, 325)  # TIFF 6.0: tags of their places and of their numbers of bytes
# EXIF after a PNG's pixels is detected by these marks near the end of the file; reading it costs a full decode.
PNG_TAIL_MARKS = (b"eXIf", b"Raw profile type exif", b"tiff:Orientation")
SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that swap width and height
SEVERAL_FRAMES = ("GIF", "PNG", "TIFF", "WEBP")  # in other formats, further frames are thumbnails, layers, depths
DARK_SHARE = 16  # 12-bit values in 16 bits stay below 1/16 of white


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """Properties of an image that its header contains.

    size: (width, height) after applying EXIF orientation.
    several: whether the file has further frames or pages, which are ignored.
    deep_grey: whether the image is greyscale with more than 8 bits.
    transparent: whether the image has an alpha channel or a transparent colour.
    """

    size: tuple[int, int]
    several: bool = False
    deep_grey: bool = False
    transparent: bool = False


class UnreadableImage(Exception):
    """An image that cannot be read. The message is only the reason; the caller names the file."""


@lru_cache(maxsize=1)
def readable_formats() -> tuple[str, ...]:
    """Return Pillow's names of the supported formats, in the order in which they are tried: common ones first."""
    from PIL import Image

    Image.preinit()
    Image.init()
    plugin_faults()
    return tuple(name for name in Image.ID if name in READ)


@lru_cache(maxsize=1)
def readable_extensions() -> frozenset[str]:
    """Return the file extensions (".png", in lower case) of the supported formats."""
    from PIL import Image

    formats = readable_formats()
    return frozenset(extension for extension, name in Image.registered_extensions().items() if name in formats)


def read_header(file: Path | BinaryIO) -> ImageHeader:
    """Read an image's properties, normally without decoding pixels.

    Pixels are decoded in three cases. A PNG may have EXIF data after its pixels (see PNG_TAIL_MARKS). A file may look
    truncated, which only decoding confirms. The plugin for JPEG XL always decodes.

    Raises:
        UnreadableImage: the file is not an image, or is damaged, unreadable or too large to decode.
    """
    with EVERYTHING:  # Pillow warns about large images and unusual metadata
        try:
            if not isinstance(file, Path):
                return _header(file)
            check_plain(file, MAX_IMAGE_BYTES)
            with file.open("rb") as opened:
                return _header(opened)
        except _decode_errors() as error:
            raise UnreadableImage(_reason(error, file)) from error


def decode(content: bytes) -> Image.Image:
    """Decode an image (the first frame of an animation) to mode RGB.

    Applies the EXIF orientation. Converts an embedded colour profile to sRGB, but ignores a damaged or unusable
    profile. Composites transparency onto white, and scales 16-bit and 32-bit grey to 8 bits.

    Raises:
        UnreadableImage: the content is truncated, damaged, too large, or not an image.
    """
    return decode_as(_opaque_rgb, content)


def decode_as(convert: Callable[[Image.Image, bytes | None], Image.Image], content: bytes) -> Image.Image:
    """Decode an image (the first frame of an animation) and convert it with ``convert``.

    Args:
        convert: function that gets the upright image, with at most 8 bits per channel, and the colour profile or None.
        content: the file's bytes.

    Returns:
        The image that ``convert`` returned.

    Raises:
        UnreadableImage: the content is truncated, damaged, too large, or not an image.
    """
    with EVERYTHING:  # Pillow warns about large images and unusual metadata
        try:
            return convert(*_upright(content))
        except _decode_errors() as error:
            raise UnreadableImage(_reason(error, BytesIO(content))) from error


def _opaque_rgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    from PIL import Image

    if not image.has_transparency_data:
        return _to_srgb(image, profile)
    alpha = image.convert("RGBA").getchannel("A")
    opaque = image.convert("L") if image.mode in ("LA", "L") else image.convert("RGBA").convert("RGB")
    white = Image.new("RGB", image.size, (255, 255, 255))
    white.paste(_to_srgb(opaque, profile), mask=alpha)
    return white


def _upright(content: bytes) -> tuple[Image.Image, bytes | None]:
    """Decode an image, apply its EXIF orientation and reduce it to at most 8 bits per channel.

    Returns:
        The image and its colour profile, or None without a profile.
    """
    from PIL import ImageOps

    frugal = _Frugal(BytesIO(content))
    with _open(frugal) as opened:
        frugal.left = math.inf
        profile, bits = opened.info.get("icc_profile"), _bits_per_sample(opened)
        image = ImageOps.exif_transpose(opened)
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        image = _scaled_to_8_bit(image, bits)
    return image, profile


def is_dark(content: bytes) -> bool:
    """Whether all values of a 16-bit grey image are at most 1/16 of white.

    Such an image usually contains 12-bit data and looks almost black.

    Raises:
        UnreadableImage: see ``decode``.
    """
    with EVERYTHING:  # Pillow warns about large images and unusual metadata
        try:
            frugal = _Frugal(BytesIO(content))
            with _open(frugal) as image:
                frugal.left = math.inf
                peak = image.getextrema()[1]
                white = 2 ** _bits_per_sample(image) - 1
                return image.mode.startswith("I") and isinstance(peak, int | float) and 0 < DARK_SHARE * peak <= white
        except _decode_errors() as error:
            raise UnreadableImage(_reason(error, BytesIO(content))) from error


def resized_crop(image: Image.Image, geometry: Geometry, flip: bool) -> Image.Image:
    """Scale, optionally mirror, and crop an image as its geometry specifies.

    The image is mirrored before it is cropped, so crop_top_left has the same value for both views. kohya's trainer also
    conditions on the crop in the mirrored image (``crop_ltrb[2] is right, so target_size[0] - crop_ltrb[2] is left``).
    """
    from PIL import Image

    (height, width), (top, left) = geometry.resized_hw, geometry.crop_top_left
    image = image.resize((width, height), Image.Resampling.LANCZOS)
    if flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return image.crop((left, top, left + geometry.target_hw[1], top + geometry.target_hw[0]))


class _Frugal:
    """A file that limits how much is read from it, so that a hostile header cannot take minutes.

    Setting ``left`` to infinity removes the limit. Without a limit, Pillow copies the parts of a JPEG's EXIF data again
    and again (125 MB take minutes), keeps every chunk of a PNG, and reads a PPM comment byte by byte.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell
        position = file.tell()
        start = file.read(12)
        file.seek(position)
        # WebP, JPEG XL and the AVIF family are read whole by their own libraries; a TIFF can hold its layers in a tag.
        whole = start[8:12] == b"WEBP" or start[4:8] == b"ftyp" or start[:4] in (b"II*\0", b"MM\0*")
        whole = whole or start.startswith(JXL_STARTS)
        self.left: float = 2 * MAX_IMAGE_BYTES if whole else MAX_HEADER_COST

    def read(self, size: int = -1, /) -> bytes:
        return self._paid(self._file.read(size))

    def readline(self, size: int = -1, /) -> bytes:
        return self._paid(self._file.readline(min(size, MAX_HEADER_COST) if size >= 0 else MAX_HEADER_COST))

    def _paid(self, content: bytes) -> bytes:
        self.left -= max(len(content), COST_OF_A_READ)
        if self.left < 0:
            raise OSError(errno.EFBIG, "its header is too long")
        return content


def _open(file: _Frugal) -> Image.Image:
    """Open an image and read its header. Pillow's exceptions are raised unchanged, also if the image is too large."""
    from PIL import Image

    formats, as_file = readable_formats(), cast("BinaryIO", file)  # it has the methods that Pillow needs
    size = jxl_size(as_file) if "JXL" in formats else None
    if size is not None and size[0] * size[1] > 2 * (Image.MAX_IMAGE_PIXELS or MAX_IMAGE_BYTES):
        raise Image.DecompressionBombError(f"{size[0]}x{size[1]}")
    return Image.open(as_file, formats=formats)


def _header(file: BinaryIO) -> ImageHeader:
    frugal = _Frugal(file)
    with _open(frugal) as image:
        begin = file.tell()  # of the pixels: the data before them may contain a JPEG preview with its own end mark
        several = image.format in SEVERAL_FRAMES and _has_several_frames(image)
        frugal.left = math.inf
        (width, height), deep_grey = image.size, image.mode in ("I", "I;16", "I;16B", "I;16L", "I;16N")
        size = (height, width) if _orientation(image) in SIDEWAYS else (width, height)
        header = ImageHeader(size, several, deep_grey, image.has_transparency_data)
        if _may_be_truncated(image, file, begin):
            image.load()
        return header


def _may_be_truncated(image: Image.Image, file: BinaryIO, begin: int) -> bool:
    """Whether a file looks truncated, judged by its last bytes or by the offsets of its pixels.

    Returns False for formats without such a check.

    Args:
        image: the opened image.
        file: the image's file.
        begin: offset at which the header ends and the pixels begin.
    """
    from PIL import BmpImagePlugin, TiffImagePlugin

    tail, size = _tail(file, begin), file.seek(0, os.SEEK_END)
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        tags = image.tag_v2
        pairs = [pair for at, of in (STRIPS, TILES) for pair in zip(tags.get(at, ()), tags.get(of, ()), strict=False)]
        return max((sum(pair) for pair in pairs if {*map(type, pair)} == {int}), default=math.inf) > size
    if isinstance(image, BmpImagePlugin.BmpImageFile):
        codec, _, place, how = image.tile[0]  # of raw rows: mode, bytes per row, direction
        return codec != "raw" or not isinstance(how, tuple) or place + how[1] * image.height > size
    if image.format == "GIF":
        return not tail.endswith(GIF_END)
    mark = END_MARKS.get(image.format or "")
    return mark is not None and mark not in tail


def _has_several_frames(image: Image.Image) -> bool:
    """Whether the file has a second frame. Returns False if the frame is damaged or too far into the file."""
    try:
        return bool(getattr(image, "is_animated", False))
    except _decode_errors():
        return False


@lru_cache(maxsize=1)
def _decode_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that Pillow's readers raise on damaged files, as found by tests with such files."""
    from PIL import Image

    known = (OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, EOFError, RuntimeError)
    return (*known, struct.error, zlib.error, MemoryError, Image.DecompressionBombError)


def _reason(error: Exception, file: Path | BinaryIO) -> str:
    from PIL import Image, UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        empty = file.stat().st_size == 0 if isinstance(file, Path) else file.seek(0, os.SEEK_END) == 0
        return "the file is empty" if empty else "it is not an image in a supported format"
    if isinstance(error, Image.DecompressionBombError):
        return "it has too many pixels"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation that ``image.size`` does not include yet."""
    from PIL import ExifTags, Image

    if image.format == "TIFF":  # Pillow has already swapped the sides
        return 1
    if image.format == "PNG" and not _png_tail_has_exif(image):
        exif = Image.Image.getexif(image)  # PNG's own method decodes the image to find data after the pixels
    else:
        exif = image.getexif()
    orientation = exif.get(ExifTags.Base.Orientation, 1)
    return orientation if isinstance(orientation, int) else 1


def _png_tail_has_exif(image: Image.Image) -> bool:
    tail = _tail(image.fp)  # type: ignore[attr-defined]
    return any(mark in tail for mark in PNG_TAIL_MARKS)


def _tail(file: BinaryIO, begin: int = 0) -> bytes:
    """Return at most the last TAIL_BYTES of a file, but nothing before ``begin``. The file position stays the same."""
    position = file.tell()
    file.seek(max(begin, file.seek(0, os.SEEK_END) - TAIL_BYTES))
    tail = file.read(TAIL_BYTES)
    file.seek(position)
    return tail


def _bits_per_sample(image: Image.Image) -> int:
    """Return the bits per grey value of a file with 16-bit grey values.

    A 12-bit TIFF gives 12, because Pillow does not scale its values; all other files give 16.
    """
    from PIL import TiffImagePlugin

    declared = (
        image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE) if isinstance(image, TiffImagePlugin.TiffImageFile) else None
    )
    return 12 if declared == (12,) and image.mode == "I;16" else 16


def _scaled_to_8_bit(image: Image.Image, bits: int) -> Image.Image:
    """Convert grey of more than 8 bits to mode L. The maximum value, which becomes 255, depends on the mode.

    In mode I;16, it is 2**bits - 1. In mode I, it is 65535 if no value is greater (Pillow's PGM and 16-bit TIFF
    readers), else 2**31 - 1. In mode F, it is 1, 255 or 65535, the smallest that no value exceeds, else the greatest
    value.
    """
    import numpy as np
    from PIL import Image

    # float64 represents every 32-bit value exactly; NaN and infinity count as black.
    values = np.nan_to_num(np.asarray(image).astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    peak = float(values.max())
    if image.mode == "F":
        white = next((white for white in (1.0, 255.0, 65535.0) if peak <= white), peak)
    else:
        white = 2.0**bits - 1 if image.mode != "I" or peak <= 65535.0 else 2.0**31 - 1
    return Image.fromarray((np.clip(values / white, 0.0, 1.0) * 255.0 + 0.5).astype(np.uint8))


def _to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """Convert an opaque image to sRGB with its colour profile. Without a usable profile, convert it to mode RGB."""
    from PIL import ImageCms

    if profile:
        try:
            source = ImageCms.ImageCmsProfile(BytesIO(profile))
            converted = ImageCms.profileToProfile(_in_space_of(image, source), source, _srgb(), outputMode="RGB")
        except (ImageCms.PyCMSError, OSError, ValueError):
            return image.convert("RGB")
        assert converted is not None  # None is returned only for inPlace=True
        return converted
    return image.convert("RGB")


@lru_cache(maxsize=1)
def _srgb() -> ImageCms.ImageCmsProfile:
    from PIL import ImageCms

    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))


def _in_space_of(image: Image.Image, profile: ImageCms.ImageCmsProfile) -> Image.Image:
    """Convert the image to the mode that its profile expects. Grey and palette images often carry an RGB profile."""
    if profile.profile.xcolor_space.strip() == "RGB" and image.mode in ("1", "L", "P"):
        return image.convert("RGB")
    return image.convert("L") if image.mode == "1" else image
