"""Headers with false values are refused with the reason; sound ones are read."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from lora_rocm.foundation.safetensors_header import (
    MAX_HEADER_BYTES,
    DamagedHeader,
    OtherFile,
    TensorEntry,
    UnknownDtype,
    parse_header,
)
from tests.wording import saying


def tensor(begin: int, end: int, shape: list[Any], dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def file_of(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def parsed(content: bytes) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    return parse_header(io.BytesIO(content), len(content))


def test_a_sound_header() -> None:
    content = file_of({"__metadata__": {"a": "b"}, "y": tensor(8, 8, [0]), "x": tensor(0, 8, [2, 1])}, bytes(8))
    start = len(content) - 8
    entries = {"x": TensorEntry("F32", (2, 1), start, start + 8), "y": TensorEntry("F32", (0,), start + 8, start + 8)}
    assert parsed(content) == (entries, {"a": "b"})
    assert parsed(file_of({})) == ({}, {})


LIES = {
    "nothing": (b"", "ends inside"),
    "seven bytes": (bytes(7), "ends inside"),
    "a header that ends behind the file": (file_of({})[:-1], "ends inside"),
    "a header too large": ((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}", "ends inside"),
    "no JSON": (file_of(b"{"), "not readable"),
    "no text": (file_of(b"\xff"), "not readable"),
    "a list": (file_of([]), "not readable"),
    "too deep": (file_of(b"[" * 100_000), "not readable"),
    "a name twice": (file_of(b'{"a": 1, "a": 1}'), "not readable"),
    "a name without end": (file_of({"a" * 8_000_000: tensor(0, 0, [0])}), "8,000,000 letters"),
    "half a letter": (file_of({"\ud800": tensor(0, 0, [0])}), "not readable"),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}}), "not readable"),
    "a size that is no number": (file_of({"a": tensor(0, 4, [True])}, bytes(4)), "not readable"),
    "a size below zero": (file_of({"a": tensor(0, 4, [-1, -1])}, bytes(4)), "not readable"),
    "too many dimensions": (file_of({"a": tensor(0, 4, [1] * 9)}, bytes(4)), "not readable"),
    "a format that is no name": (file_of({"a": tensor(0, 4, [1], 3)}, bytes(4)), "not readable"),
    "another size than the shape's": (file_of({"a": tensor(0, 4, [2])}, bytes(4)), "match its shape"),
    "an overlap": (file_of({"a": tensor(0, 8, [2]), "b": tensor(4, 12, [2])}, bytes(12)), "overlap"),
    "a gap": (file_of({"a": tensor(0, 4, [1]), "b": tensor(8, 12, [1])}, bytes(12)), "overlap or leave a gap"),
    "more bytes": (file_of({"a": tensor(0, 4, [1])}, bytes(5)), "match its header"),
    "fewer bytes": (file_of({"a": tensor(0, 4, [1])}, bytes(3)), "match its header"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie(name: str) -> None:
    content, said = LIES[name]
    with pytest.raises(DamagedHeader, match=said):
        parsed(content)


def test_a_format_that_is_not_known_is_named() -> None:
    with pytest.raises(UnknownDtype, match=r"^F4\\x1b$"):
        parsed(file_of({"a": tensor(0, 4, [1], "F4\x1b")}, bytes(4)))


def test_what_torch_saves_is_named() -> None:
    with pytest.raises(DamagedHeader, match=r"torch\.save"):
        parsed(b"PK\x03\x04" + bytes(100))
    with pytest.raises(OtherFile, match="Git LFS"):
        parsed(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    with pytest.raises(OtherFile, check=saying("foundation/a-web-page")):
        parsed(b"<!DOCTYPE html><html>")
    text = b"{}".ljust(int.from_bytes(b"PK", "little"))  # a header of this length is one
    assert parsed(file_of(text)) == ({}, {})
