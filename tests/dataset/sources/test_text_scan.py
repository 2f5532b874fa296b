"""Folders of texts: one sample per file, odd files are skipped, and nothing else is mentioned."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from lora_rocm.dataset.sources import text_scan
from lora_rocm.dataset.sources.text_scan import scan_texts
from lora_rocm.errors import DataError
from lora_rocm.recipe.schema import DataSection
from tests.wording import Worded, holds, saying, says, worded


def scanned(folder: Path, **keys: Any) -> text_scan.Scan:
    return scan_texts(DataSection(path=str(folder), **keys))


def write(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.txt").write_bytes(content)
    return folder


def test_each_file_is_a_sample_with_its_lines(tmp_path: Path) -> None:
    write(tmp_path, b=b"\xef\xbb\xbfone\r\n\r\ntwo\n", a=b"a")
    write(tmp_path / "10_more", c="größe".encode())
    found = scanned(tmp_path, repeats=3)
    assert [(sample.key, sample.caption) for sample in found.samples] == [
        ("10_more/c.txt", "größe"),
        ("a.txt", "a"),
        ("b.txt", "one\n\ntwo\n"),
    ]
    assert {sample.repeats for sample in found.samples} == {3}, "the number in a folder's name is kohya's, of images"
    assert found.lasting and not found.set_aside and not found.notices


def test_what_is_no_text_is_set_aside_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_scan, "MAX_TEXT_BYTES", 100)
    write(tmp_path, good=b"x", bytes=b"\xff\xfe", empty=b" \n", large=b"y" * 101)
    (tmp_path / "list.csv").touch()
    found = scanned(tmp_path, exclude=("nothing*",))
    assert [sample.key for sample in found.samples] == ["good.txt"] and not found.lasting
    assert [problem.what for problem in found.set_aside] == [
        worded("dataset/it-is-not-utf-8-text"),
        worded("dataset/the-text-is-empty"),
        worded("dataset/the-text-cannot-be-read-it-is"),
    ]
    unused, others, table = found.notices
    assert "nothing*" in unused and others == worded("dataset/1-file-is-left-out-for-only")
    assert says(table, "dataset/named-as-dataset-in-data-sources-not", path=tmp_path / "list.csv")


def test_folders_are_walked_as_the_recipe_says(tmp_path: Path) -> None:
    write(tmp_path / "below", inner=b"x")
    write(tmp_path, outer=b"y", draft=b"z")
    keys = [sample.key for sample in scanned(tmp_path, recursive=False, exclude=("draft.txt",)).samples]
    assert keys == ["outer.txt"]
    two = scan_texts(DataSection(sources=[{"path": str(tmp_path)}, {"path": str(tmp_path / "below")}]))
    assert [sample.key for sample in two.samples][-1] == "sources[1]/inner.txt"


@pytest.mark.parametrize(
    ("content", "code"), [({}, "data-folder-empty"), ({"a": b""}, "no-usable-texts"), (None, "data-folder-missing")]
)
def test_nothing_to_train_on_is_an_error(tmp_path: Path, content: dict[str, bytes] | None, code: str) -> None:
    folder = tmp_path / "data"
    if content is not None:
        write(folder, **content)
        (folder / "x.png").touch()
    with pytest.raises(DataError) as caught:
        scanned(folder)
    assert caught.value.code == code
    assert not any(word in str(caught.value) for word in ("image", "image", "caption"))


def test_a_table_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, check=saying("dataset/there-is-no", "dataset/none-jsonl")):
        scan_texts(DataSection(sources=[{"dataset": str(tmp_path / "none.jsonl")}]))


@pytest.mark.parametrize(
    ("table", "usable", "where", "what"),
    [
        ('prompt,completion\na,b\nc,"d\ne,f\ng,h\n', 1, "t.csv:3", "never closed"),
        ('prompt,completion\na,b\nc,"d\ne"\n', 2, "", ""),
        ("prompt,completion\na,b\nc,d, and more\n", 1, "t.csv:3", worded("dataset/it-has-3-cells-and-the-table")),
        ("prompt,completion\na,b,\n", 1, "", ""),
    ],
)
def test_rows_that_a_table_does_not_hold_are_named(
    tmp_path: Path, table: str, usable: int, where: str, what: str | Worded
) -> None:
    (tmp_path / "t.csv").write_text(table, encoding="utf-8", newline="")
    found = scan_texts(DataSection(sources=[{"dataset": str(tmp_path / "t.csv")}]))
    assert len(found.samples) == usable
    told = [(Path(entry.where).name, holds(entry.what, what)) for entry in found.set_aside]
    assert told == ([(where, True)] if where else [])


@pytest.mark.parametrize(
    ("table", "line", "words"),
    [
        ("prompt,completion\na,b\n".encode("utf-16"), 1, "not UTF-8"),
        ("prompt,completion\na,b\n".encode("utf-16-le"), 1, "not UTF-8"),
        ("prompt,größe\na,b\n".encode("latin-1"), 1, "not UTF-8"),
        (b"\nprompt,completion,prompt\na,b,c\n", 2, "Two columns have the name prompt"),
        (b"prompt;completion\na;b\n", 1, "separated by semicolons"),
        (b"prompt\tcompletion\na\tb\n", 1, "separated by tabs"),
        (b"prompt,completion\ra,b\r", 1, "carriage return"),
        (b'prompt,completion\r\n"a\r\nb",c\r\nd\re,f\r\n', 4, "carriage return"),
        (b"prompt,completion\na," + b"b" * (1 << 24) + b"\n", 2, "longer than 16 MiB"),
    ],
)
def test_a_table_that_cannot_be_told_apart_into_cells_is_refused(
    tmp_path: Path, table: bytes, line: int, words: str
) -> None:
    (tmp_path / "t.csv").write_bytes(table)
    with pytest.raises(DataError, match=words) as caught:
        scan_texts(DataSection(sources=[{"dataset": str(tmp_path / "t.csv")}]))
    assert caught.value.where.endswith(f"t.csv:{line}") and caught.value.fix


def test_a_table_of_very_many_columns_is_read_at_once(tmp_path: Path) -> None:
    names = [f"c{number}" for number in range(100_000)]
    (tmp_path / "t.csv").write_text(",".join((*names, "text")) + "\n" + "a," * len(names) + "b\n", encoding="utf-8")
    started = time.process_time()
    (notice,) = scan_texts(DataSection(sources=[{"dataset": str(tmp_path / "t.csv")}])).notices
    assert len(notice) < 4000 and "others" in notice
    (tmp_path / "t.csv").write_text(",".join((*names, "c7")) + "\na\n", encoding="utf-8")
    with pytest.raises(DataError, match="c7"):
        scan_texts(DataSection(sources=[{"dataset": str(tmp_path / "t.csv")}]))
    (tmp_path / "t.csv").write_text(",".join(names) + "\n" + "a," * (len(names) - 1) + "b\n", encoding="utf-8")
    with pytest.raises(DataError) as caught:
        scan_texts(DataSection(sources=[{"dataset": str(tmp_path / "t.csv")}]))
    assert len(str(caught.value)) < 4000
    assert time.process_time() - started < 20, "pairs of columns would take minutes"


def test_a_row_is_named_by_its_first_line(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b'prompt,completion,\n\n"a\nb",c,\n\nd\n')
    found = scan_texts(DataSection(sources=[{"dataset": str(tmp_path / "t.csv")}]))
    assert [sample.key for sample in found.samples] == ["t.csv:3"]
    (aside,) = found.set_aside
    assert aside.where.endswith("t.csv:6") and aside.what == worded("dataset/it-has-1-cell-and-the-table")


def test_a_json_array_of_other_values_is_set_aside_by_row(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('["hi", {"text": "a"}, null]')
    found = scan_texts(DataSection(sources=[{"dataset": str(tmp_path / "t.json")}]))
    assert len(found.samples) == 1
    assert [aside.what for aside in found.set_aside] == [worded("dataset/it-is-no-json-object")] * 2


@pytest.mark.parametrize(
    ("name", "words"),
    [("t.tsv", worded("dataset/not-read-from-a-tsv-file")), ("t.parquet", worded("dataset/has-no-rows"))],
)
def test_a_file_without_rows_or_of_another_kind_is_named(tmp_path: Path, name: str, words: Worded) -> None:
    parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), tmp_path / name)
    with pytest.raises(DataError, check=saying(words)):
        scan_texts(DataSection(sources=[{"dataset": str(tmp_path / name)}]))
