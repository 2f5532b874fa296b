"""Texts of tables stay in their file, and take no memory."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from lora_rocm.dataset.rows.records import Completion, Conversation, Pair, part, read, record_of, written
from lora_rocm.dataset.rows.row_reference import joined, resolved, separated
from lora_rocm.dataset.sample_table import Samples
from lora_rocm.dataset.sources.text_scan import Scan, scan_texts
from lora_rocm.errors import DataError
from lora_rocm.recipe.schema import DataSection
from tests.wording import saying

ROWS: list[dict[str, Any]] = [
    {"text": "ü\n😀 " + "x" * 300},
    {"prompt": "a", "completion": "\u2028 b"},
    {"messages": [{"role": role, "content": str(n)} for n in range(3) for role in ("user", "assistant")]},
]


def cut(text: str) -> list[str]:
    """Conversations are cut into one sample for each answer."""
    record = read(text)
    turns = len(record.turns) if isinstance(record, Conversation) else 0
    return [written(part(record, number)) for number in range(turns)] or [text]


def scanned(path: Path) -> Scan:
    return scan_texts(DataSection(sources=[{"dataset": str(path)}]), parts=cut)


def write(path: Path, rows: list[dict[str, Any]], begins: bytes = b"") -> Path:
    """With a mark of UTF-8 before, and lines that are empty or wrong between."""
    lines = [b"\xef\xbb\xbf", begins, *(json.dumps(row).encode("ascii") + b"\r\n\n" for row in rows), b"no row\n"]
    path.write_bytes(b"".join(lines))
    return path


def stored(samples: Any) -> list[str]:
    assert isinstance(samples, Samples)
    return [sample.caption for sample in samples.stored]


def test_a_table_holds_where_texts_are_and_gives_them_as_if_it_held_them(tmp_path: Path) -> None:
    found = scanned(write(tmp_path / "c.jsonl", ROWS, b"x" * (1 << 25) + b"\n"))
    whole = tmp_path / "c.json"
    whole.write_text(json.dumps(ROWS), encoding="utf-8")
    wanted = [sample.caption for sample in scanned(whole).samples]
    assert [sample.caption for sample in found.samples] == wanted == stored(scanned(whole).samples)
    assert len(wanted) == 5 and len(found.set_aside) == 2
    assert all(len(text) < 50 for text in stored(found.samples)) and len(wanted[0]) > 300
    refs = stored(found.samples)
    (source,) = found.samples.sources
    assert separated(resolved(joined(refs), source)) == wanted and separated(refs[0]) == refs[:1]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_rows_of_other_tables_stay_there_too(kind: str, tmp_path: Path) -> None:
    """Rows of CSV have line ends within a cell, empty lines between, and a mark of UTF-8 before."""
    rows = [{"instruction": f"{n} ü\n😀", "output": '"x",\n' * 50 + str(n)} for n in range(3)]
    path = tmp_path / f"t.{kind}"
    if kind == "csv":
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, [*rows[0]])
        writer.writeheader()
        for row in rows:
            text.write("\r\n\n")
            writer.writerow(row)
        path.write_bytes(b"\xef\xbb\xbf" + text.getvalue().encode("utf-8"))
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    samples = scanned(path).samples
    wanted = [text for row in rows for text in cut(written(record_of(row)))]
    assert [sample.caption for sample in samples] == wanted
    assert all(len(text) < 50 for text in stored(samples))
    if kind == "csv":
        path.write_bytes(path.read_bytes().replace(b"2 ", b"3 "))
        assert samples[1].caption == wanted[1]
        with pytest.raises(DataError, check=saying("dataset/changed-while-they-were-in-use")):
            samples[2]


def test_a_pair_of_answers_is_read_again_as_one(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    found = scan_texts(DataSection(sources=[{"dataset": str(path)}]), pairs=True)
    assert read(found.samples[0].caption) == Pair(Completion("a", "b"), Completion("a", "c"))


@pytest.mark.parametrize("change", ["other", "shorter", "gone"])
def test_a_file_that_was_changed_since_is_no_other_text(change: str, tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", ROWS)
    samples = scanned(path).samples
    changed = [{**ROWS[0], "text": "y" * 300}, *ROWS[1:]] if change == "other" else ROWS[:0]
    if change == "gone":
        path.unlink()
    else:
        write(path, changed)
    with pytest.raises(DataError, check=saying("dataset/changed-while-they-were-in-use")) as caught:
        samples[-1 if change != "other" else 0]
    now = "no longer exists" if change == "gone" else f"the file has {path.stat().st_size} bytes, last written 2"
    assert now in caught.value.what
    assert "c.jsonl, byte " in caught.value.where


MEASURE = """
import sys
from pathlib import Path
from lora_rocm.dataset.sources.text_scan import scan_texts
from lora_rocm.recipe.schema import DataSection
samples = scan_texts(DataSection(sources=[{"dataset": sys.argv[1]}])).samples
assert sum(len(sample.caption) for sample in samples) > int(sys.argv[2])
status = Path("/proc/self/status").read_text()  # the peak of getrusage begins with that of the parent
print(int(status.split("VmHWM:")[1].split()[0]) >> 10)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory in Linux's unit")
def test_twice_as_large_a_file_takes_hardly_more_memory(tmp_path: Path) -> None:
    """200 MB and 400 MB of conversations, found and read once."""
    peaks_MiB, path = list[int](), tmp_path / "c.jsonl"
    answer = {"role": "assistant", "content": "word " * 1580}
    with path.open("w", encoding="utf-8") as file:
        for _ in range(2):
            for number in range(25_000):
                row = {"messages": [{"role": "user", "content": str(number)}, answer]}
                file.write(json.dumps(row) + "\n")
            file.flush()
            words = [sys.executable, "-c", MEASURE, str(path), str(path.stat().st_size * 9 // 10)]
            said = subprocess.run(words, capture_output=True, encoding="utf-8", check=True, timeout=600).stdout
            peaks_MiB.append(int(said))
    assert path.stat().st_size > 390e6
    assert peaks_MiB[1] < peaks_MiB[0] + 30 < 200, peaks_MiB
