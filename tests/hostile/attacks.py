"""Files that attack their readers. All of them are small but claim to be large."""

from __future__ import annotations

import functools
import io
import json
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

from PIL import Image

MARK = "HOSTILE_PAYLOAD"
"""In all code that attacks carry; the code writes a file of this name into its folder."""
STEERING = "\x1b]0;owned\x07\x1b[2J\x1b]8;;http://x.example\x1b\\click\x1b]8;;\x1b\\"
HTML = "<script>alert(1)</script><img src=x onerror=alert(1)>"


def payload(folder: Path) -> str:
    """Python code that leaves a trace."""
    return f"open({str(folder / MARK)!r}, 'w').close()  # {MARK}\n"


def image(kind: str = "PNG", side: int = 8, **options: Any) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (side, side), "red").save(content, kind, **options)
    return content.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_of(width: int, height: int, *chunks: bytes) -> bytes:
    """A PNG that claims a size; its pixels are a few bytes."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def png_full_of_zeros(side: int) -> bytes:
    """A sound PNG of one colour: a thousandth of the bytes that its pixels take."""
    rows = zlib.compressobj(9)
    data = b"".join(rows.compress(b"\0" * (1 + 3 * side)) for _ in range(side)) + rows.flush()
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@functools.cache
def zeros(mebibytes: int) -> bytes:
    """So many MiB of zeros, compressed."""
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(mebibytes)) + packer.flush()


def bmp_of(width: int, height: int) -> bytes:
    """Without pixels except a single row."""
    header = b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return header + (bytes(3 * width) if height == 1 else b"")


def gif_of(width: int, height: int) -> bytes:
    return (
        b"GIF89a"
        + struct.pack("<HHBBB", width, height, 0, 0, 0)
        + b"\x2c"
        + struct.pack("<HHHHBB", 0, 0, width, height, 0, 8)
        + b"\0;"
    )


def tiff_of(width: int, height: int) -> bytes:
    tags = [(256, width), (257, height), (258, 8), (259, 1), (262, 1), (273, 8), (277, 1), (278, height), (279, 1)]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(tags)) + entries + bytes(4)


def jpeg_of(width: int, height: int) -> bytes:
    content = bytearray(image("JPEG"))
    at = content.index(b"\xff\xc0")
    content[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(content)


def jpeg_with_exif(segments: int) -> bytes:
    sound = image("JPEG")
    segment = b"\xff\xe1\xff\xffExif\0\0" + bytes(65535 - 8)
    return sound[:2] + segment * segments + sound[2:]


def png_of_chunks(count: int) -> bytes:
    return png_of(8, 8, *([chunk(b"abCd", b"")] * count))


def ppm_with_comment(num_bytes: int) -> bytes:
    return b"P6\n#" + b"x" * num_bytes + b"\n8 8\n255\n" + bytes(192)


def eps(folder: Path) -> bytes:
    """PostScript that would write a file if anybody ran it."""
    text = f"({folder / MARK}) (w) file closefile"
    return (
        f"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n% {MARK}\n{text}\nshowpage\n%%EOF\n".encode()
    )


class _Pickled:
    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (self.code,)


def pickled(folder: Path) -> bytes:
    """A pickle that runs the payload when it is read."""
    return pickle.dumps(_Pickled(payload(folder)))


def safetensors(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
    """A file with any header: a value, or the raw text of one; ``length``: the claimed length of its header."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode("ascii")
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + body


def tensor(begin: int, end: int, shape: Any = None, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


LYING_WEIGHTS: dict[str, bytes] = {
    "length of 2**63": safetensors({"a": tensor(0, 4)}, bytes(4), 2**63),
    "length of 2**64 - 1": safetensors({"a": tensor(0, 4)}, bytes(4), 2**64 - 1),
    "length past the end": safetensors({"a": tensor(0, 4)}, bytes(4), 1000),
    "no JSON": safetensors(b"\xff" * 16),
    "nested without end": safetensors(b"[" * 100_000),
    "nested in a tensor": safetensors(b'{"a":' + b"[" * 90_000 + b"]" * 90_000 + b"}"),
    "a list": safetensors([]),
    "number": safetensors(3),
    "overlap": safetensors({"a": tensor(0, 8), "b": tensor(4, 12)}, bytes(12)),
    "gap": safetensors({"a": tensor(0, 4), "b": tensor(8, 12)}, bytes(12)),
    "gap at the start": safetensors({"a": tensor(4, 8)}, bytes(8)),
    "bytes behind": safetensors({"a": tensor(0, 4)}, bytes(8)),
    "ends before it begins": safetensors({"a": tensor(4, 0, [1])}, bytes(4)),
    "negative": safetensors({"a": tensor(-4, 0, [1])}, bytes(4)),
    "negative shape": safetensors({"a": tensor(0, 4, [-1, -1])}, bytes(4)),
    "shape overflows": safetensors({"a": tensor(0, 4, [2**32, 2**32])}, bytes(4)),
    "shape overflows to the right size": safetensors({"a": tensor(0, 4, [2**62 + 1, 4])}, bytes(16)),
    "terabytes": safetensors({"a": tensor(0, 4, [2**40])}, bytes(4)),
    "many dimensions": safetensors({"a": tensor(0, 4, [1] * 200_000)}, bytes(4)),
    "shape of huge numbers": safetensors({"a": tensor(0, 4, [10**4000] * 100)}, bytes(4)),
    "floats": safetensors({"a": tensor(0, 4, [1.0])}, bytes(4)),
    "infinite": safetensors(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,1e999]}}', bytes(4)),
    "texts": safetensors({"a": {"dtype": "F32", "shape": ["1"], "data_offsets": ["0", "4"]}}, bytes(4)),
    "truths": safetensors({"a": {"dtype": "U8", "shape": [True], "data_offsets": [False, True]}}, bytes(1)),
    "unknown dtype": safetensors({"a": tensor(0, 4, dtype="F31")}, bytes(4)),
    "dtype of another kind": safetensors({"a": tensor(0, 4, dtype=["F32"])}, bytes(4)),
    "three offsets": safetensors({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}}, bytes(4)),
    "no offsets": safetensors({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)),
    "name twice": safetensors(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"I32","shape":[1],"data_offsets":[0,4]}}',
        bytes(4),
    ),
    "half a letter": safetensors({"\ud800": tensor(0, 4)}, bytes(4)),
    "metadata are a list": safetensors({"__metadata__": [1], "a": tensor(0, 4)}, bytes(4)),
    "metadata are numbers": safetensors({"__metadata__": {"x": 1}, "a": tensor(0, 4)}, bytes(4)),
}
