"""The kinds of captions of the images in a folder are counted."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from lora_rocm.dataset.captions.caption_layout import caption_layout
from lora_rocm.errors import DataError


def image(path: Path, *captions: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8)).save(path)
    for suffix in captions:
        path.with_suffix(suffix).write_text("a cat", encoding="utf-8")


def test_extensions_are_counted_by_the_file_that_is_needed(tmp_path: Path) -> None:
    for number in range(3):
        image(tmp_path / f"{number}.png", ".caption")
    image(tmp_path / "both.png", ".txt", ".tags")
    image(tmp_path / "IMG_0042.png")
    image(tmp_path / "10_zwx cat" / "IMG_0043.png")
    image(tmp_path / "two cats.png")
    found = caption_layout(tmp_path)
    assert found.of_extension == {".caption": 3, ".txt": 1} and found.extensions == (".caption", ".txt")
    assert (found.num_images, found.missing) == (7, 3)
    assert (found.with_folder_name, found.with_file_name, found.with_metadata) == (1, 1, 0)


def test_metadata_counts_as_captions(tmp_path: Path) -> None:
    image(tmp_path / "a.png")
    image(tmp_path / "b.png")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "a cat"}\n', encoding="utf-8")
    found = caption_layout(tmp_path)
    assert (found.with_metadata, found.missing, found.of_extension) == (1, 1, {})


def test_a_folder_without_images(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError) as raised:
        caption_layout(tmp_path)
    assert raised.value.code == "data-folder-empty"
