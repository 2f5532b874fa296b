"""Files with the same content."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_rocm.dataset.sources import equal_files
from lora_rocm.foundation.bounded_read import read_plain


def test_groups_of_equal_files_and_only_equal_sizes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {"a": b"12", "b": b"21", "c": b"12", "d": b"123", "e": b"21", "f": b"12"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    read = list[str]()
    monkeypatch.setattr(
        equal_files, "read_plain", lambda path, most: (read.append(path.name), read_plain(path, most))[1]
    )
    paths = [tmp_path / name for name in ("missing", *contents)]
    found = equal_files.equal_files(paths)
    assert [[paths[place].name for place in group] for group in found] == [["a", "c", "f"], ["b", "e"]]
    assert sorted(read) == ["a", "b", "c", "e", "f"]
    assert equal_files.equal_files([]) == [] and equal_files.equal_files([tmp_path, tmp_path]) == [], "no files"
