"""Skipped files of a folder are counted and named, and nothing else is reported."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lora_rocm.dataset.images.image_io import readable_extensions
from lora_rocm.dataset.skipped_files import Patterns
from lora_rocm.dataset.sources import folders
from lora_rocm.dataset.sources.file_kinds import companion_match, kinds
from lora_rocm.dataset.sources.folders import walk
from lora_rocm.dataset.sources.scan import scan
from lora_rocm.errors import DataError
from tests.wording import mentions, phrase, says, worded

HARMLESS = frozenset(kinds().harmless_suffixes)


def names(found: folders.Folder) -> list[str]:
    return [relative for _, relative in found.images]


def test_each_format_that_is_not_read_is_counted_and_named(tmp_path: Path, make: SimpleNamespace) -> None:
    make.image(tmp_path / "a.png", caption="x")
    for name in ("1.CR2", "2.nef", "3.dng", "4.arw", "clip.mp4", "drawing.svg", "all.zip", "star.fits"):
        (tmp_path / name).touch()
    (tmp_path / "1.txt").write_text("of the raw one", encoding="utf-8")
    notices = walk(tmp_path, ".txt").notices
    assert notices[0] == worded("dataset/4-files-are-left-out-raw-camera")
    assert [notice.split(phrase("dataset/are-not-read"))[0] for notice in notices[1:]] == [
        worded("dataset/1-file-is-left-out-archives"),
        worded("dataset/1-file-is-left-out-videos"),
        worded("dataset/1-file-is-left-out-drawings-and"),
        worded("dataset/1-file-is-left-out-images-in"),
    ]


def test_of_files_that_are_no_images_there_is_no_word(tmp_path: Path, make: SimpleNamespace) -> None:
    make.image(tmp_path / "a.png", caption="x")
    for name in ("a.npz", "a_sdxl.safetensors", "Thumbs.db", "desktop.ini", "a.json", "notes.md", "a.AAE", "LICENSE"):
        (tmp_path / name).touch()
    assert walk(tmp_path, ".txt").notices == []


def test_files_whose_names_say_nothing_are_named(tmp_path: Path, make: SimpleNamespace) -> None:
    make.image(tmp_path / "a.png", caption="x")
    for name in ("photo", "b.jpg_large", "c.png~"):
        (tmp_path / name).touch()
    (notice,) = walk(tmp_path, ".txt").notices
    assert says(notice, "dataset/3-files-are-left-out-for-the")


def test_no_suffix_is_of_two_kinds() -> None:
    suffixes = [suffix for unread in kinds().unread for suffix in unread.suffixes]
    assert len(suffixes) == len(set(suffixes)) and HARMLESS.isdisjoint(suffixes)
    assert all(suffix == suffix.lower() and suffix.startswith(".") for suffix in (*suffixes, *HARMLESS))
    assert HARMLESS.isdisjoint(readable_extensions())


@pytest.mark.parametrize("seed", range(20))
def test_every_file_is_an_image_or_has_its_word(tmp_path: Path, make: SimpleNamespace, seed: int) -> None:
    """In a folder of arbitrary files, each file is a training sample, is counted as skipped, or is harmless."""
    rng = random.Random(seed)
    suffixes = [*readable_extensions(), *HARMLESS, *(s for unread in kinds().unread for s in unread.suffixes)]
    make.image(tmp_path / "sure.png")
    places = ["", "sub/", "masks/", "_controls/", "10_x/"]
    for number in range(40):
        end = rng.choice([rng.choice(suffixes), rng.choice([".png", "-masklabel.png", "", ".what"])])
        path = tmp_path / f"{rng.choice(places)}{rng.choice(['sure', number])}{end}"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    found = walk(tmp_path, ".txt")
    said = sum(int(notice.split()[0]) for notice in found.notices if "skipped" in notice or "not used" in notice)
    harmless = sum(path.suffix in HARMLESS for path in tmp_path.rglob("*") if path.is_file())
    assert len(names(found)) + said + harmless == sum(path.is_file() for path in tmp_path.rglob("*"))


# masks and control images of other trainers


def test_masks_and_controls_are_counted_and_not_trained_on(tmp_path: Path, make: SimpleNamespace) -> None:
    data = tmp_path / "data"
    for name in ("0.png", "1.jpg", "sub/2.png"):
        make.image(data / name, caption="x")
    masks = ("0-masklabel.png", "1-MaskLabel.png", "masks/0.png", "sub/masks/2_mask.png", "Alpha Masks/1.png")
    controls = ("1-condlabel.png", "_controls/0.depth.jpg", "conditioning/sub/2.png")
    for number, name in enumerate((*masks, *controls)):
        make.image(data / name, seed=number, caption="of a mask")
    found = scan(make.data(path=str(data)))
    assert [sample.key for sample in found.samples] == ["0.png", "1.jpg", "sub/2.png"]
    first, second = (notice for notice in found.notices if "not used" in notice)
    assert says(first, "dataset/5-masks-are-not-used-data-mask")
    assert says(second, "dataset/3-control-images-are-not-used-data")
    assert says(first, "dataset/rename-them-or-their-folder") and not mentions(
        found.notices, "dataset/trained-on-as-usual"
    )


def test_a_folder_called_masks_is_data_where_it_is_given_or_has_no_partners(
    tmp_path: Path, make: SimpleNamespace
) -> None:
    make.image(tmp_path / "masks" / "venice.png", caption="a mask")
    make.image(tmp_path / "people.png", seed=1, caption="x")
    assert names(walk(tmp_path / "masks", ".txt")) == ["venice.png"] and not walk(tmp_path / "masks", ".txt").notices
    found = walk(tmp_path, ".txt")
    assert names(found) == ["masks/venice.png", "people.png"]
    (notice,) = found.notices
    assert (
        says(notice, "dataset/1-image-lies-in-a-folder-with")
        and says(notice, "dataset/trained-on-as-usual")
        and "data.exclude" in notice
    )
    make.image(tmp_path / "venice.png", seed=2, caption="x")
    assert names(walk(tmp_path, ".txt")) == ["people.png", "venice.png"]
    both = scan(make.data(sources=[{"path": str(tmp_path)}, {"path": str(tmp_path / "masks")}]))
    assert len(both.samples) == 3, "as a source of its own it is trained on"


def test_masks_alone_are_no_data(tmp_path: Path, make: SimpleNamespace) -> None:
    make.image(tmp_path / "0-masklabel.png")
    with pytest.raises(DataError, match="mask_path"):
        walk(tmp_path, ".txt")


@pytest.mark.parametrize("name", ["mask.png", "unmasked/a.png", "10_masks/a.png", "a-masklabels.png", "a/masked.png"])
def test_ordinary_names_are_no_masks(name: str) -> None:
    assert companion_match(name) is None


def test_the_table_of_companions_has_no_name_twice() -> None:
    folders_named = [name for row in kinds().companion for name in (*row.folders, *row.paired_folders)]
    assert len(folders_named) == len(set(folders_named)) and all(name == name.lower() for name in folders_named)


# data.recursive and data.exclude


def test_without_sub_folders(tmp_path: Path, make: SimpleNamespace) -> None:
    make.image(tmp_path / "a.png", caption="x")
    make.image(tmp_path / "sub" / "b.png", seed=1, caption="x")
    assert len(scan(make.data(path=str(tmp_path))).samples) == 2
    found = scan(make.data(path=str(tmp_path), recursive=False))
    assert [sample.key for sample in found.samples] == ["a.png"] and found.notices == ()
    sources = [{"path": str(tmp_path), "recursive": True}, {"path": str(tmp_path)}]
    assert len(scan(make.data(sources=sources, recursive=False)).samples) == 3


@pytest.mark.parametrize(
    ("pattern", "left"),
    [
        ("old", ["a.png", "b-mask.png", "sub/b-mask.png", "sub/c.JPG"]),
        ("OLD/", ["a.png", "b-mask.png", "sub/b-mask.png", "sub/c.JPG"]),
        ("*-mask.png", ["a.png", "old/d.png", "sub/c.JPG"]),
        ("*.jpg", ["a.png", "b-mask.png", "old/d.png", "sub/b-mask.png"]),
        ("sub/*", ["a.png", "b-mask.png", "old/d.png"]),
        ("./sub\\b-mask.png", ["a.png", "b-mask.png", "old/d.png", "sub/c.JPG"]),
        ("[ao]*", ["b-mask.png", "sub/b-mask.png", "sub/c.JPG"]),
    ],
)
def test_patterns(tmp_path: Path, make: SimpleNamespace, pattern: str, left: list[str]) -> None:
    for name in ("a.png", "b-mask.png", "old/d.png", "sub/b-mask.png", "sub/c.JPG"):
        make.image(tmp_path / name, caption="x")
    found = walk(tmp_path, ".txt", exclude=(pattern,))
    assert names(found) == left
    (notice,) = found.notices
    assert says(notice, "dataset/left-out-by-data-exclude")


def test_only_what_is_included_is_used(tmp_path: Path, make: SimpleNamespace) -> None:
    for name in ("a.png", "b.png", "old/a.png", "sub/c.JPG"):
        make.image(tmp_path / name, caption="x")
    found = walk(tmp_path, ".txt", include=("a.*", "sub/*", "none"), exclude=("old",))
    assert names(found) == ["a.png", "sub/c.JPG"] and found.captions.num_of_each() == {".txt": 3}
    data = make.data(path=str(tmp_path), include=["a.*", "sub/*"], exclude=["old"])
    assert [sample.key for sample in scan(data).samples] == ["a.png", "sub/c.JPG"], "as a recipe says it"
    assert len(found.notices) == 3
    assert says(found.notices, "dataset/1-file-is-left-out-for-it")
    assert says(found.notices, "dataset/left-out-by-data-exclude-old")
    assert says(found.notices, "dataset/data-include-nothing-here-is-called-none")
    with pytest.raises(DataError) as caught:
        walk(tmp_path, ".txt", include=("none",))
    assert caught.value.code == "data-folder-empty"
    assert caught.value.fix == worded("dataset/correct-the-patterns-of-data-include")
    with pytest.raises(DataError) as caught:
        walk(tmp_path, ".txt", exclude=("*",))
    assert caught.value.fix == worded("dataset/correct-the-patterns-of-data-exclude")


@pytest.mark.parametrize("pattern", [{"exclude": ["*"]}, {"include": ["none"]}])
def test_the_key_is_named_where_it_is_given(
    tmp_path: Path, make: SimpleNamespace, pattern: dict[str, list[str]]
) -> None:
    (name,) = pattern
    for folder in ("a", "b"):
        make.image(tmp_path / folder / "a.png", caption="x")
    a, b = ({"path": str(tmp_path / folder)} for folder in ("a", "b"))
    with pytest.raises(DataError) as caught:
        scan(make.data(sources=[a, b | pattern]))
    assert caught.value.fix == worded("dataset/correct-the-patterns-of-data-sources-1", name=name)
    assert f"data.sources[1].{name}" in caught.value.what
    with pytest.raises(DataError) as caught:
        scan(make.data(sources=[a, b], **pattern))
    assert caught.value.fix == worded("dataset/correct-the-patterns-of-data-name", name=name), (
        "the default of all sources"
    )


def test_a_folder_with_the_name_of_a_caption_is_said(tmp_path: Path, make: SimpleNamespace) -> None:
    make.image(tmp_path / "a.png")
    (tmp_path / "a.txt").mkdir()
    (notice,) = walk(tmp_path, ".txt").notices
    assert says(notice, "dataset/1-folder-is-named-like-a-caption") and "a.txt/" in notice


def test_a_pattern_that_fits_nothing_is_said(tmp_path: Path, make: SimpleNamespace) -> None:
    make.image(tmp_path / "a.png", caption="x")
    assert walk(tmp_path, ".txt", exclude=("olde", "*.gif")).notices == [
        worded("dataset/data-exclude-nothing-here-is-called-olde")
    ]


def test_a_pattern_takes_no_longer_than_its_length() -> None:
    assert not Patterns(["*a" * 40 + "b"]).fit("a" * 4000)


# links, captions


def test_a_link_that_may_not_be_read_is_left_out(
    tmp_path: Path, make: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /proc/1/cwd for anybody but root: Python 3.11 raises where it resolves the link."""
    make.image(tmp_path / "data" / "a.png", caption="x")
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "data" / "link.png"
    link.symlink_to(tmp_path / "elsewhere")
    readlink: Callable[..., Any] = os.readlink

    def refused(path: Any, *more: Any, **how: Any) -> Any:
        if os.fspath(path) == str(link):
            raise PermissionError(13, "Permission denied", str(path))
        return readlink(path, *more, **how)

    monkeypatch.setattr(os, "readlink", refused)
    found = scan(make.data(path=str(tmp_path / "data")))
    assert [sample.key for sample in found.samples] == ["a.png"]
    assert found.notices == (worded("dataset/1-link-leads-to-a-place-that"),)


def test_captions_with_another_extension_are_pointed_out(tmp_path: Path, make: SimpleNamespace) -> None:
    for number in range(3):
        make.image(tmp_path / f"{number}.png", seed=number)
        (tmp_path / f"{number}.Caption").write_text("x", encoding="utf-8")
    (tmp_path / "0.txt").write_text("read", encoding="utf-8")
    (notice,) = walk(tmp_path, ".txt").notices
    assert says(notice, "dataset/2-images-have-a-caption-file-beside")
    assert walk(tmp_path, "caption").notices == [], "0.png has both; the one that is asked for is read"
