"""A small file is written whole, or stays as it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lora_rocm.errors import StorageError
from lora_rocm.host.files import write_atomic


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    file = tmp_path / "Zoë K" / "a.json"
    for text in ("one", "größer"):
        write_atomic(file, text.encode("utf-8"))
        assert file.read_text(encoding="utf-8") == text
    assert os.listdir(file.parent) == ["a.json"]


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_where_it_cannot_be_written_the_old_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    file = tmp_path / "a.json"
    write_atomic(file, b"old")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, broken, full)
    with pytest.raises(StorageError, match="disk is full"):
        write_atomic(file, b"new")
    assert file.read_text(encoding="utf-8") == "old" and os.listdir(tmp_path) == ["a.json"]
