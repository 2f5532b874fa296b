"""Reading images with Pillow: the size from the header, and any mode as 8-bit sRGB."""

from __future__ import annotations

import errno
import math
import os
import struct
import threading
import warnings
import zlib
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from lora_rocm.dataset.image_plugins import JXL_STARTS, jxl_size, plugin_faults
from lora_rocm.foundation.bounded_read import check_plain

if TYPE_CHECKING:
    from PIL import Image, ImageCms

    from lora_rocm.dataset.buckets import Geometry

# Formats that people keep images in; HEIF and JXL where a plugin has taught them to Pillow. It knows more, but a file
# is of the format that its content says, whatever its name: for EPS it would run Ghostscript, for WMF the drawing code
# of Windows, and what is left (FITS, SPIDER, ...) nobody trains on.
READ = frozenset("AVIF BMP DDS DIB GIF HEIF ICO JPEG JPEG2000 JXL MPO PCX PNG PPM PSD QOI SGI TGA TIFF WEBP".split())
MAX_HEADER_COST, COST_OF_A_READ = 1 << 24, 64  # bytes
MAX_IMAGE_BYTES = 1 << 29  # 178 megapixels, the most that Pillow opens, take 512 MiB without any compression
# EXIF after a PNG's pixels is found by these marks near the end of the file; reading it costs a full decode.
PNG_TAIL_BYTES = 65536
PNG_TAIL_MARKS = (b"eXIf", b"Raw profile type exif", b"tiff:Orientation")
SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that exchange width and height
SEVERAL_FRAMES = ("GIF", "PNG", "TIFF", "WEBP")  # of other formats the further images are thumbnails, layers, depths
DARK_SHARE = 16  # 12-bit values in 16 bits stay below 1/16 of white


@dataclass(frozen=True, slots=True)
class Header:
    """What a header says of an image. size: (width, height) after EXIF orientation.

    several: it has further frames or pages, which are not read. deep_grey: grey of more than 8 bits.
    transparent: it has an alpha channel, or a colour that stands for transparency.
    """

    size: tuple[int, int]
    several: bool = False
    deep_grey: bool = False
    transparent: bool = False


class UnreadableImage(Exception):
    """An image that cannot be read; the message says why, for a sentence that already names the file."""


@lru_cache(maxsize=1)
def readable_formats() -> tuple[str, ...]:
    """Pillow's names of the formats that are read, in the order in which they are tried: the common ones first."""
    from PIL import Image

    Image.preinit()
    Image.init()
    plugin_faults()
    return tuple(name for name in Image.ID if name in READ)


@lru_cache(maxsize=1)
def readable_extensions() -> frozenset[str]:
    """Extensions (".png", lower case) of the formats that are read."""
    from PIL import Image

    formats = readable_formats()
    return frozenset(extension for extension, name in Image.registered_extensions().items() if name in formats)


def read_header(file: Path | BinaryIO) -> Header:
    """Size and kind of an image: no pixels are decoded (but see PNG_TAIL_BYTES; the plugin for JPEG XL always decodes).

    Raises:
        UnreadableImage: not an image, or a damaged or unreadable one, or one too large to be decoded.
    """
    with quiet:
        try:
            if not isinstance(file, Path):
                return _header(file)
            check_plain(file, MAX_IMAGE_BYTES)
            with file.open("rb") as opened:
                return _header(opened)
        except _decode_errors() as error:
            raise UnreadableImage(_reason(error, file)) from error


def decode(content: bytes) -> Image.Image:
    """The image (of an animation, the first frame) in mode RGB.

    EXIF orientation is applied, an embedded colour profile is converted to sRGB (one that is damaged or of another
    kind is taken for sRGB), transparency is put on white, and grey of 16 or 32 bits is scaled to 8.

    Raises:
        UnreadableImage: truncated, damaged, too large, or not an image.
    """
    from PIL import Image

    with quiet:
        try:
            image, profile = _upright(content)
            if not image.has_transparency_data:
                return _to_srgb(image, profile)
            alpha = image.convert("RGBA").getchannel("A")
            opaque = image.convert("L") if image.mode in ("LA", "L") else image.convert("RGBA").convert("RGB")
            white = Image.new("RGB", image.size, (255, 255, 255))
            white.paste(_to_srgb(opaque, profile), mask=alpha)
            return white
        except _decode_errors() as error:
            raise UnreadableImage(_reason(error, BytesIO(content))) from error


def decode_mask(content: bytes, alpha: bool) -> Image.Image:
    """A mask in mode L, upright: 255 counts, 0 does not, nor do places that are transparent.

    ``alpha``: of the alpha channel alone; an image without one counts everywhere.

    Raises:
        UnreadableImage: as ``decode``.
    """
    from PIL import Image, ImageChops

    with quiet:
        try:
            image, _ = _upright(content)
            white = Image.new("L", image.size, 255)
            opacity = image.convert("RGBA").getchannel("A") if image.has_transparency_data else white
            return opacity if alpha else ImageChops.multiply(image.convert("L"), opacity)
        except _decode_errors() as error:
            raise UnreadableImage(_reason(error, BytesIO(content))) from error


def _upright(content: bytes) -> tuple[Image.Image, bytes | None]:
    """The image with EXIF orientation applied and at most 8 bits a channel, and its colour profile."""
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
    """Whether grey of 16 bits has no value above 1/16 of white: as a rule 12-bit values, which come out almost black.

    Raises:
        UnreadableImage: as ``decode``.
    """
    with quiet:
        try:
            frugal = _Frugal(BytesIO(content))
            with _open(frugal) as image:
                frugal.left = math.inf
                peak = image.getextrema()[1]
                white = 2 ** _bits_per_sample(image) - 1
                return image.mode.startswith("I") and isinstance(peak, int | float) and 0 < DARK_SHARE * peak <= white
        except _decode_errors() as error:
            raise UnreadableImage(_reason(error, BytesIO(content))) from error


def cut(image: Image.Image, geometry: Geometry, flip: bool) -> Image.Image:
    """Scale, mirror, crop: the pixels that a geometry means.

    Mirrored before it is cropped, so that crop_top_left is true of both variants: kohya's trainer too gives the crop as
    it lies in the mirrored image ("crop_ltrb[2] is right, so target_size[0] - crop_ltrb[2] is left").
    """
    from PIL import Image

    (height, width), (top, left) = geometry.resized_hw, geometry.crop_top_left
    image = image.resize((width, height), Image.Resampling.LANCZOS)
    if flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return image.crop((left, top, left + geometry.target_hw[1], top + geometry.target_hw[0]))


class _Quiet:
    """Pillow warns of large images and odd metadata; neither matters here.

    Python's filters for warnings belong to the process. Where threads read images, the one that waits for them holds
    this all the while: else one would put back what it found while another is still at it.
    """

    def __init__(self) -> None:
        self._lock, self._holders, self._filters = threading.Lock(), 0, warnings.catch_warnings()

    def __enter__(self) -> None:
        with self._lock:
            if self._holders == 0:
                self._filters = warnings.catch_warnings()
                self._filters.__enter__()
                warnings.simplefilter("ignore")
            self._holders += 1

    def __exit__(self, *details: object) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                self._filters.__exit__(None, None, None)


quiet = _Quiet()


class _Frugal:
    """A file that is read for its header, at a bounded cost; afterwards like any other.

    Pillow joins the parts of a JPEG's EXIF data again and again (125 MB of them take minutes), keeps every chunk of a
    PNG, and reads the comment of a PPM letter by letter.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell
        position = file.tell()
        start = file.read(12)
        file.seek(position)
        # WebP, JPEG XL and the family of AVIF are handed as a whole to their own libraries; a TIFF can have its layers
        # in a tag
        whole = start[8:12] == b"WEBP" or start[4:8] == b"ftyp" or start[:4] in (b"II*\0", b"MM\0*")
        whole = whole or start.startswith(JXL_STARTS)
        self.left: float = 2 * MAX_IMAGE_BYTES if whole else MAX_HEADER_COST

    def read(self, size: int = -1, /) -> bytes:
        content = self._file.read(size)
        self.left -= max(len(content), COST_OF_A_READ)
        if self.left < 0:
            raise OSError(errno.EFBIG, "its header has no end")
        return content

    def readline(self, size: int = -1, /) -> bytes:
        content = self._file.readline(min(size, MAX_HEADER_COST) if size >= 0 else MAX_HEADER_COST)
        self.left -= max(len(content), COST_OF_A_READ)
        if self.left < 0:
            raise OSError(errno.EFBIG, "its header has no end")
        return content


def _open(file: _Frugal) -> Image.Image:
    """The image, its header read. Raises what Pillow raises, and where it is too large."""
    from PIL import Image

    formats, as_file = readable_formats(), cast("BinaryIO", file)  # all that Pillow asks of one
    size = jxl_size(as_file) if "JXL" in formats else None
    if size is not None and size[0] * size[1] > 2 * (Image.MAX_IMAGE_PIXELS or MAX_IMAGE_BYTES):
        raise Image.DecompressionBombError(f"{size[0]}x{size[1]}")
    return Image.open(as_file, formats=formats)


def _header(file: BinaryIO) -> Header:
    frugal = _Frugal(file)
    with _open(frugal) as image:
        several = image.format in SEVERAL_FRAMES and _has_several_frames(image)
        frugal.left = math.inf
        (width, height), deep_grey = image.size, image.mode in ("I", "I;16", "I;16B", "I;16L", "I;16N")
        size = (height, width) if _orientation(image) in SIDEWAYS else (width, height)
        return Header(size, several, deep_grey, image.has_transparency_data)


def _has_several_frames(image: Image.Image) -> bool:
    """Whether there is a second frame. Where it is damaged, or far away, there is none that could be used."""
    try:
        return bool(getattr(image, "is_animated", False))
    except _decode_errors():
        return False


@lru_cache(maxsize=1)
def _decode_errors() -> tuple[type[Exception], ...]:
    """What Pillow's readers raise on damaged files, found by feeding them damaged files."""
    from PIL import Image

    known = (OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, EOFError, RuntimeError)
    return (*known, struct.error, zlib.error, MemoryError, Image.DecompressionBombError)


def _reason(error: Exception, file: Path | BinaryIO) -> str:
    from PIL import Image, UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        empty = file.stat().st_size == 0 if isinstance(file, Path) else file.seek(0, os.SEEK_END) == 0
        return "the file is empty" if empty else "it is not an image of a format that can be read"
    if isinstance(error, Image.DecompressionBombError):
        return "it has too many pixels"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _orientation(image: Image.Image) -> int:
    """EXIF orientation that is still to be applied to ``image.size``."""
    from PIL import ExifTags, Image

    if image.format == "TIFF":  # Pillow has already exchanged the sides
        return 1
    if image.format == "PNG" and not _png_tail_has_exif(image):
        exif = Image.Image.getexif(image)  # PNG's own method decodes the image to look behind its pixels
    else:
        exif = image.getexif()
    orientation = exif.get(ExifTags.Base.Orientation, 1)
    return orientation if isinstance(orientation, int) else 1


def _png_tail_has_exif(image: Image.Image) -> bool:
    file = image.fp  # type: ignore[attr-defined]
    position = file.tell()
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - PNG_TAIL_BYTES))
    tail = file.read()
    file.seek(position)
    return any(mark in tail for mark in PNG_TAIL_MARKS)


def _bits_per_sample(image: Image.Image) -> int:
    """Bits of a grey value as the file declares them: TIFF also has 12, which Pillow hands on unscaled in 16."""
    from PIL import TiffImagePlugin

    declared = (
        image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE) if isinstance(image, TiffImagePlugin.TiffImageFile) else None
    )
    return 12 if declared == (12,) and image.mode == "I;16" else 16


def _scaled_to_8_bit(image: Image.Image, bits: int) -> Image.Image:
    """Grey of more than 8 bits as mode L.

    I;16 has 2**bits - 1 as white. Mode I has 65535 where its values allow it (Pillow's PGM and 16-bit TIFF readers),
    else 2**31 - 1. Mode F has the smallest of 1, 255, 65535 that holds its values, else their maximum.
    """
    import numpy as np
    from PIL import Image

    values = np.nan_to_num(np.asarray(image).astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    peak = float(values.max())
    if image.mode == "F":
        white = next((white for white in (1.0, 255.0, 65535.0) if peak <= white), peak)
    else:
        white = 2.0**bits - 1 if image.mode != "I" or peak <= 65535.0 else 2.0**31 - 1
    return Image.fromarray((np.clip(values / white, 0.0, 1.0) * 255.0 + 0.5).astype(np.uint8))


def _to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """An opaque image as RGB, through its profile where that can be used."""
    from PIL import ImageCms

    if profile:
        try:
            source = ImageCms.ImageCmsProfile(BytesIO(profile))
            converted = ImageCms.profileToProfile(_in_space_of(image, source), source, _srgb(), outputMode="RGB")
        except (ImageCms.PyCMSError, OSError, ValueError):
            return image.convert("RGB")
        assert converted is not None  # None is for inPlace=True
        return converted
    return image.convert("RGB")


@lru_cache(maxsize=1)
def _srgb() -> ImageCms.ImageCmsProfile:
    from PIL import ImageCms

    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))


def _in_space_of(image: Image.Image, profile: ImageCms.ImageCmsProfile) -> Image.Image:
    """Grey and palette images often carry an RGB profile."""
    if profile.profile.xcolor_space.strip() == "RGB" and image.mode in ("1", "L", "P"):
        return image.convert("RGB")
    return image.convert("L") if image.mode == "1" else image
