"""Registers plugins for image formats that Pillow does not read itself. Runs before any image is opened.

Plugins are optional: only those that the user has installed are registered.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import BinaryIO

JXL_STARTS = (b"\xff\x0a", b"\0\0\0\x0cJXL \r\n\x87\n")
MAX_BOXES = 1000
# Aspect ratios (width, height) by their JPEG XL code (ISO/IEC 18181-1, table of SizeHeader).
JXL_RATIOS = {1: (1, 1), 2: (12, 10), 3: (4, 3), 4: (3, 2), 5: (16, 9), 6: (5, 4), 7: (2, 1)}
JXL_SIDE_BITS = (9, 13, 18, 30)
HEADER_BYTES = 16  # of a codestream; the size field is shorter


@cache
def plugin_faults() -> dict[str, str]:
    """Register all installed plugins.

    Returns:
        Packages of plugins that cannot be used, each with the reason, or with "" if it is not installed.
    """
    faults = {}
    for package, register in (("pillow-heif", _register_heif), ("pillow-jxl-plugin", _register_jxl)):
        try:
            register()
        except ModuleNotFoundError as error:
            faults[package] = "" if error.name in ("pillow_heif", "pillow_jxl") else str(error)
        except (ImportError, OSError, AttributeError) as error:  # its shared library is missing, or its API differs
            faults[package] = str(error) or type(error).__name__
    return faults


def _register_heif() -> None:
    plugin = import_module("pillow_heif")
    import_module("_pillow_heif")  # fails now instead of when an image is opened
    plugin.register_heif_opener()


def _register_jxl() -> None:
    import_module("pillow_jxl")  # registers itself


def jxl_size(file: BinaryIO) -> tuple[int, int] | None:
    """Read (width, height) from a JPEG XL header; returns None for other formats. The file position stays the same.

    The plugin decodes an image as soon as it is opened, so Pillow's own check of the size would come too late.

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
    """Return the first bytes of the JPEG XL codestream in a file.

    The file may be a container: a sequence of boxes, each prefixed by its length and type.
    """
    head = b""
    for _ in range(MAX_BOXES):
        box = file.read(8)
        length, kind, told = int.from_bytes(box[:4], "big"), box[4:], 8
        if length == 1:
            length, told = int.from_bytes(file.read(8), "big"), 16
        if kind == b"jxlp":  # a partial codestream, prefixed by its number
            file.read(4)
            told += 4
        if kind in (b"jxlc", b"jxlp"):
            content = file.read(min(HEADER_BYTES, length - told) if length else HEADER_BYTES)
            told += len(content)
            head += content
            if len(head) >= HEADER_BYTES or kind == b"jxlc":
                return head
        if length < told:  # length 0: the box extends to the end of the file
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
