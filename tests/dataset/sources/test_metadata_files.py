"""Captions of an imagefolder: metadata.jsonl and metadata.csv next to the images."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lora_rocm.dataset.sources import metadata_files
from lora_rocm.dataset.sources.folders import walk
from lora_rocm.dataset.sources.metadata_files import SourceMetadata, names_files
from lora_rocm.dataset.sources.scan import Scan, scan
from lora_rocm.errors import DataError
from lora_rocm.foundation.names import NameIndex
from tests.wording import Worded, says, worded


def captions(found: Scan) -> dict[str, str]:
    return {sample.key: sample.caption for sample in found.samples}


def rows(path: Path, *lines: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), "utf-8")
    return path


def test_a_folder_with_metadata(tmp_path: Path, make: SimpleNamespace) -> None:
    for number, name in enumerate(("0.png", "sub/1 ü.png", "own/2.png", "3.png", "4.png")):
        make.image(tmp_path / name, seed=number)
    (tmp_path / "3.txt").write_text("the file", encoding="utf-8")
    listed = [("0.png", "zero\nin two lines"), ("sub\\1 ü.png", "one"), ("./3.png", "the row")]
    rows(tmp_path / "metadata.jsonl", *({"file_name": name, "text": text} for name, text in listed))
    rows(tmp_path / "own" / "metadata.csv", "text,file_name,more", '"two, with ""quotes""",2.png,1')
    found = scan(make.data(path=str(tmp_path)))
    assert captions(found) == {
        "0.png": "zero in two lines",
        "3.png": "the file",
        "4.png": "4",
        "own/2.png": 'two, with "quotes"',
        "sub/1 ü.png": "one",
    }
    assert found.notices == (
        worded("dataset/columns-of-metadata-that-nothing-reads-more"),
        worded("dataset/1-image-has-a-caption-file-and"),
        worded("dataset/1-image-has-no-caption-used-instead"),
    )


def test_another_column_or_none(tmp_path: Path, make: SimpleNamespace) -> None:
    make.image(tmp_path / "a.png")
    rows(tmp_path / "metadata.jsonl", {"file_name": "a.png", "prompt": "a cat", "width": 8})
    found = scan(make.data(path=str(tmp_path)))
    assert captions(found) == {"a.png": "a"}
    assert says(found.notices[0], "dataset/rows-of-metadata-without-the-column-text")
    assert captions(scan(make.data(sources=[{"path": str(tmp_path), "caption_column": "prompt"}]))) == {
        "a.png": "a cat"
    }
    silent = scan(make.data(sources=[{"path": str(tmp_path), "caption_column": None}]))
    assert captions(silent) == {"a.png": "a"} and len(silent.notices) == 1


def test_what_the_rows_have_wrong_is_counted_and_named(tmp_path: Path, make: SimpleNamespace) -> None:
    for number in range(3):
        make.image(tmp_path / f"{number}.png", seed=number)
    bad: list[Any] = [
        "no json",
        "[1]",
        '{"file_name": "0.png", "text": "a", "text": "b"}',
        {"text": "no name"},
        {"file_name": 7, "text": "x"},
        {"file_name": "0.png", "text": ["x", 1]},
        {"file_name": "0.png", "text": "x" * (metadata_files.MAX_CAPTION_BYTES + 1)},
        {"file_name": "0.png", "text": "y" * (metadata_files.MAX_ROW_BYTES + 9)},
        *({"file_name": name, "text": "x"} for name in ("../0.png", "/etc/passwd", "C:\\0.png", "\\\\host\\x", "a\0b")),
        "[" * 100_000,
        '{"file_name": "0.png", "text": "x", "n": ' + "9" * 5000 + "}",
    ]
    good = [{"file_name": "0.png", "text": "good"}, {"file_name": "0.png", "text": "again"}]
    more = [{"file_name": "gone.png", "text": "x"}, {"file_name": "1.png", "text": None}, ""]
    file = rows(tmp_path / "metadata.jsonl", *bad, *good, *more)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes() + b'{"file_name": "2.png", "text": "f\xfcr"}\n')
    found = scan(make.data(path=str(tmp_path)))
    assert captions(found) == {"0.png": "good", "1.png": "1", "2.png": "2"}
    assert says(found.notices[0], "dataset/value-rows-of-metadata-are-not-used", value=len(bad) + 1)
    assert found.notices[1] == worded("dataset/1-row-of-metadata-names-a-file")
    assert found.notices[2] == worded("dataset/1-row-of-metadata-names-an-image")
    assert all(len(notice) < 400 for notice in found.notices)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"file_name,text\n0.png,f\xfcr\n1.png,x\n", worded("dataset/no-utf-8-text-nothing-behind-it")),
        (b"file_name,text,text\n0.png,a,b\n", worded("dataset/a-column-stands-there-twice")),
        (b"file_name,text\n0.png\n", worded("dataset/another-number-of-columns")),
        (b'file_name,text\n0.png,"' + b"x" * 200_000 + b"\n", worded("dataset/nothing-behind-it-was-read")),
        (b"\0" * 300_000, worded("dataset/longer-than-256-kib")),
    ],
)
def test_damaged_tables(tmp_path: Path, make: SimpleNamespace, content: bytes, said: Worded) -> None:
    make.image(tmp_path / "0.png")
    (tmp_path / "metadata.csv").write_bytes(content)
    assert says(walk(tmp_path, ".txt").notices[0], said)


def test_a_file_that_is_none_or_too_large(
    tmp_path: Path, make: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    make.image(tmp_path / "0.png")
    rows(tmp_path / "metadata.jsonl", {"file_name": "0.png", "text": "x"})
    monkeypatch.setattr(metadata_files, "MAX_METADATA_BYTES", 10)
    found = walk(tmp_path, ".txt")
    assert found.notices == [worded("dataset/metadata-jsonl-cannot-be-read-it-is")] and not found.lasting


def test_parquet_is_for_datasets(tmp_path: Path, make: SimpleNamespace) -> None:
    make.image(tmp_path / "0.png")
    (tmp_path / "metadata.parquet").touch()
    assert walk(tmp_path, ".txt").notices == [worded("dataset/metadata-parquet-is-not-read-here-give")]


@pytest.mark.parametrize("name", metadata_files.READ_NAMES)
def test_damage_of_any_kind_is_a_notice(tmp_path: Path, name: str) -> None:
    rng, found = random.Random(name), SourceMetadata("text", NameIndex({"0.png": 0, "1.png": 1}.items()))
    lines = [{"file_name": f"{number % 3}.png", "text": f"ü {number}"} for number in range(8)]
    whole = rows(tmp_path / "whole.jsonl", *lines).read_bytes()
    if name.endswith(".csv"):
        whole = b"file_name,text\n" + b"".join(f'{n}.png,"ü {n}"\n'.encode() for n in range(3))
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(rng.randint(1, 6)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        path = tmp_path / name
        path.write_bytes(content[: rng.randint(0, len(content))])
        found.read(path, name)
        names_files(path)
    assert found.notices()


def test_of_many_rows_only_those_of_images_are_kept(tmp_path: Path) -> None:
    rows(tmp_path / "metadata.jsonl", *({"file_name": f"{number}.png", "text": "x"} for number in range(5000)))
    found = SourceMetadata("text", NameIndex([("7.png", 0)]))
    found.read(tmp_path / "metadata.jsonl", "metadata.jsonl")
    assert found.caption(0) == "x" and len(found.unknown) == 4999
    (notice,) = found.notices()
    assert notice.endswith("0.png, 1.png, 2.png and 4996 more.")


def test_kohya_s_file_gives_captions_and_tags(tmp_path: Path) -> None:
    images = {"a.png": 0, "b.png": 1, "sub/c.png": 2, "d.png": 3, "e.png": 4}
    rows = {
        "a": {"caption": "a cat", "tags": "red, big"},
        str(tmp_path / "b.png"): {"tags": "green"},
        "sub/c.png": "a dog",
        "d": {"train_resolution": [64, 64]},
        "e": {"caption": 5},
        "f": {"caption": "none"},
        "../a": {"caption": "out"},
    }
    file = tmp_path / "meta_lat.json"
    file.write_text(json.dumps(rows), encoding="utf-8")
    found = SourceMetadata("text", NameIndex(images.items()))
    found.read_json(file, tmp_path)
    assert [found.caption(position) for position in range(5)] == ["a cat, red, big", "green", "a dog", None, None]
    assert list(found.unknown) == ["f"] and "train_resolution (1 row)" in found.notices()[-1]
    assert list(found.bad) == [
        worded("dataset/meta-lat-json-e-its-caption-is"),
        worded("dataset/meta-lat-json-a-file-name-leads"),
    ]


def test_columns_and_keys_that_nothing_reads_are_named(tmp_path: Path, make: SimpleNamespace) -> None:
    make.image(tmp_path / "a.png")
    rows(tmp_path / "metadata.jsonl", {"file_name": "a.png", "text": "a", "w": 2.0, "note": "b", "empty": None})
    (said,) = scan(make.data(path=str(tmp_path))).notices
    assert "note (1 row)" in said and "w (1 row)" in said and "empty" not in said
    read = scan(make.data(sources=[{"path": str(tmp_path), "loss_weight_column": "w"}]))
    assert "note" in read.notices[0] and "w (" not in read.notices[0], "the control: this column is read"
    file, both = tmp_path / "meta.json", SourceMetadata("text", NameIndex([("a.png", 0)]))
    file.write_text(json.dumps({"a": {"caption": "a", "captions": ["b"], "tags": "c"}}), encoding="utf-8")
    both.read_json(file, tmp_path)
    assert both.caption(0) == ("b, c",) and "caption (1 row)" in both.notices()[0] and "tags" not in both.notices()[0]


def test_a_recipe_names_kohya_s_file(tmp_path: Path, make: SimpleNamespace) -> None:
    for number, name in enumerate(("a.png", "b.png", "c.png")):
        make.image(tmp_path / "pics" / name, seed=number)
    (tmp_path / "pics" / "c.txt").write_text("the file", encoding="utf-8")
    file = tmp_path / "meta.json"
    file.write_text(json.dumps({"a": {"caption": "a cat", "tags": "red"}, "c": "a dog"}), encoding="utf-8")
    assert captions(scan(make.data(path=str(tmp_path / "pics"), metadata_file=str(file)))) == {
        "a.png": "a cat, red",
        "b.png": "b",
        "c.png": "the file",
    }


@pytest.mark.parametrize("content", [b"[]", b"{", b'{"a": 1, "a": 2}', b"\xff", b"[" * 100_000])
def test_a_file_that_is_not_kohya_s_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "meta.json"
    file.write_bytes(content)
    with pytest.raises(DataError) as caught:
        SourceMetadata("text", NameIndex([("a.png", 0)])).read_json(file, tmp_path)
    assert caught.value.code == "metadata-unreadable" and str(file) in str(caught.value.where)
