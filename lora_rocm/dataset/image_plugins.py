"""Plugins that teach Pillow formats which it does not read itself. Whoever opens an image comes by here first.

A plugin is taken where the user has installed it; nothing depends on one.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import BinaryIO

JXL_STARTS = (b"\xff\x0a", b"\0\0\0\x0cJXL \r\n\x87\n")
MAX_BOXES = 1000
# Width over height of an image, as JPEG XL numbers them (ISO/IEC 18181-1, table of SizeHeader).
JXL_RATIOS = {1: (1, 1), 2: (12, 10), 3: (4, 3), 4: (3, 2), 5: (16, 9), 6: (5, 4), 7: (2, 1)}
JXL_SIDE_BITS = (9, 13, 18, 30)
HEADER_BYTES = 16  # of a codestream: a size takes less


@cache
def plugin_faults() -> dict[str, str]:
    """Register every plugin that is installed. Returns package -> why it cannot be used, "" where it is missing."""
    faults = {}
    for package, register in (("pillow-heif", _register_heif), ("pillow-jxl-plugin", _register_jxl)):
        try:
            register()
        except ModuleNotFoundError as error:
            faults[package] = "" if error.name in ("pillow_heif", "pillow_jxl") else str(error)
        except (ImportError, OSError, AttributeError) as error:  # its own library is missing, or it is of another kind
            faults[package] = str(error) or type(error).__name__
    return faults


def _register_heif() -> None:
    plugin = import_module("pillow_heif")
    import_module("_pillow_heif")  # without it the plugin would fail when an image is opened, and not before
    plugin.register_heif_opener()


def _register_jxl() -> None:
    import_module("pillow_jxl")  # registers itself


def jxl_size(file: BinaryIO) -> tuple[int, int] | None:
    """(width, height) as JPEG XL's header has them; None for other formats. The position in the file stays.

    The plugin decodes an image when it is opened, and Pillow can only then compare its size with what is allowed.

    Raises:
        SyntaxError: the header is damaged.
    """
    position = file.tell()
    start = file.read(max(map(len, JXL_STARTS)))
    file.seek(position)
    if not start.startswith(JXL_STARTS):
        return None
    try:
        head = file.read(HEADER_BYTES) if start.startswith(JXL_STARTS[0]) else _codestream(file)
    finally:
        file.seek(position)
    if not head.startswith(JXL_STARTS[0]):
        raise SyntaxError("its header is damaged")
    return _size_header(int.from_bytes(head[2:], "little"))


def _codestream(file: BinaryIO) -> bytes:
    """The first bytes of the codestream in a container: a row of boxes, each with its length and type in front."""
    head = b""
    for _ in range(MAX_BOXES):
        box = file.read(8)
        length, kind, told = int.from_bytes(box[:4], "big"), box[4:], 8
        if length == 1:
            length, told = int.from_bytes(file.read(8), "big"), 16
        if kind == b"jxlp":  # a part; its number stands in front
            file.read(4)
            told += 4
        if kind in (b"jxlc", b"jxlp"):
            content = file.read(min(HEADER_BYTES, length - told) if length else HEADER_BYTES)
            told += len(content)
            head += content
            if len(head) >= HEADER_BYTES or kind == b"jxlc":
                return head
        if length < told:  # 0: to the end of the file
            break
        file.seek(length - told, 1)
    return head


def _size_header(bits: int) -> tuple[int, int]:
    def take(count: int) -> int:
        nonlocal bits
        value = bits & ((1 << count) - 1)
        bits >>= count
        return value

    def side() -> int:
        return (take(5) + 1) * 8 if small else take(JXL_SIDE_BITS[take(2)]) + 1

    small = take(1)
    height = side()
    ratio = JXL_RATIOS.get(take(3))
    return (height * ratio[0] // ratio[1] if ratio else side()), height
