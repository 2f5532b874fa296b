"""The unpacked size of a Parquet file, determined without unpacking it; memory of that check; and honest files, which
pass.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from lora_rocm.dataset.rows import parquet_guard
from lora_rocm.dataset.rows.parquet_guard import unpacked_bytes

MIB = 1 << 20
NO_LIMIT = 1 << 60
COPIES = 400
TEXT = "x" * 100_000
OFFSETS = range(COPIES + 1)


def repeated(value: str = TEXT, copies: int = COPIES) -> Any:
    """One value in many rows, which takes the memory of one."""
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * copies, pyarrow.int32()), pyarrow.array([value]))


def texts() -> Any:
    return repeated().cast(pyarrow.string())


def texts_of(sign: str) -> Any:
    return pyarrow.array([sign.ljust(len(TEXT), "y")])


def nested() -> dict[str, Any]:
    plain, nothing = texts(), pyarrow.nulls(COPIES, pyarrow.string())
    offsets = pyarrow.array(OFFSETS, pyarrow.int32())
    return {
        "text": plain,
        "bytes": plain.cast(pyarrow.binary()),
        "large": plain.cast(pyarrow.large_string()),
        "view": plain.cast(pyarrow.string_view()),
        "category": repeated(),
        "image": pyarrow.StructArray.from_arrays([plain.cast(pyarrow.binary()), nothing], ["bytes", "path"]),
        "list": pyarrow.ListArray.from_arrays(offsets, plain),
        "list of structures": pyarrow.ListArray.from_arrays(offsets, pyarrow.StructArray.from_arrays([plain], ["a"])),
    }


def write(path: Path, **how: Any) -> Path:
    columns = how.pop("columns")
    parquet.write_table(pyarrow.table(columns), path, compression="zstd", **how)
    return path


def says(file: Path) -> int:
    footer = parquet.read_metadata(file)
    return sum(footer.row_group(number).total_byte_size for number in range(footer.num_row_groups))


@pytest.mark.parametrize("kind", list(nested()))
@pytest.mark.parametrize("store_schema", [True, False])
def test_a_value_that_stands_in_many_rows_counts_in_each(tmp_path: Path, kind: str, store_schema: bool) -> None:
    file = write(tmp_path / "x.parquet", columns={"c": nested()[kind]}, store_schema=store_schema)
    whole = COPIES * len(TEXT)
    assert says(file) < 2 * len(TEXT), "the footer tells nothing of it"
    assert whole <= unpacked_bytes(file, whole + MIB) <= whole + MIB
    assert 2 * MIB < unpacked_bytes(file, 2 * MIB) < whole / 2, "it stops where it knows enough"


def test_what_stands_in_several_chunks_is_added_up(tmp_path: Path) -> None:
    file = write(tmp_path / "x.parquet", columns={"a": texts(), "b": texts()}, row_group_size=COPIES // 4)
    whole = 2 * COPIES * len(TEXT)
    assert whole <= unpacked_bytes(file, whole + MIB) <= whole + MIB
    assert unpacked_bytes(file, whole - 1) > whole - 1


def test_values_that_share_their_beginning(tmp_path: Path) -> None:
    values = [TEXT + str(number) for number in range(COPIES)]
    file = write(
        tmp_path / "x.parquet", columns={"c": values}, use_dictionary=False, column_encoding="DELTA_BYTE_ARRAY"
    )
    whole = sum(map(len, values))
    assert says(file) < 2 * len(TEXT) and whole <= unpacked_bytes(file, whole + MIB) <= whole + MIB


def test_lists_of_them_are_not_counted(tmp_path: Path) -> None:
    """One row may hold them all, and would be held whole."""
    values, how = [TEXT + str(number) for number in range(COPIES)], {"use_dictionary": False}
    file = write(tmp_path / "x.parquet", columns={"c": [values]}, column_encoding="DELTA_BYTE_ARRAY", **how)
    most = COPIES * says(file)
    assert unpacked_bytes(file, most // 2) >= most


def test_long_lists_are_taken_for_the_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "x.parquet", columns={"c": nested()["list"]})
    whole = COPIES * len(TEXT)
    assert unpacked_bytes(file, whole + MIB) <= whole + MIB
    monkeypatch.setattr(parquet_guard, "MAX_LIST_VALUES", COPIES - 1)
    chunk = parquet.read_metadata(file).row_group(0).column(0)
    assert unpacked_bytes(file, whole + MIB) >= COPIES * chunk.total_uncompressed_size


@pytest.mark.parametrize(("values", "width"), [(pyarrow.array([7] * 10**6), 8), (pyarrow.array([""] * 10**6), 4)])
def test_values_that_take_next_to_nothing_in_the_file(tmp_path: Path, values: Any, width: int) -> None:
    file = write(tmp_path / "x.parquet", columns={"c": values})
    assert says(file) < 10**5 and unpacked_bytes(file, NO_LIMIT) >= width * 10**6


def test_two_columns_of_one_name_both_count(tmp_path: Path) -> None:
    """Columns are read by name."""
    table = pyarrow.Table.from_arrays([texts(), texts()], ["c", "c"])
    parquet.write_table(table, tmp_path / "x.parquet", compression="zstd")
    assert unpacked_bytes(tmp_path / "x.parquet", NO_LIMIT - 1) >= 2 * COPIES * len(TEXT)
    assert unpacked_bytes(tmp_path / "x.parquet", MIB) > MIB


@pytest.mark.parametrize("use_dictionary", [True, False])
def test_what_is_in_a_file_once_counts_once(tmp_path: Path, use_dictionary: bool) -> None:
    images = [{"bytes": bytes([number % 256]) * 20_000 + str(number).encode(), "path": "a"} for number in range(500)]
    columns = {"image": images, "text": ["a photo", "a drawing"] * 250, "number": list(range(500))}
    file = write(tmp_path / "x.parquet", columns=columns, use_dictionary=use_dictionary)
    whole = 500 * 20_000
    assert whole <= unpacked_bytes(file, whole + MIB) <= whole + MIB


@pytest.mark.parametrize(
    ("values", "little", "parts"),
    [
        (["a photo", "a drawing"], 200, 0),
        (["a photo", "a drawing"], 1, parquet_guard.DICTIONARY_BATCHES),
        (["a photo"] * 2, 10**9, parquet_guard.DICTIONARY_BATCHES),  # the first row's size does not predict the others
    ],
)
def test_nothing_is_read_where_even_the_most_is_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: list[str], little: int, parts: int
) -> None:
    read: list[object] = []
    count = parquet_guard._values_bytes
    monkeypatch.setattr(parquet_guard, "_values_bytes", lambda array: read.append(array) or count(array))
    file = write(tmp_path / "x.parquet", columns={"c": values * 1000})
    assert unpacked_bytes(file, NO_LIMIT, little) and len(read) == parts


@pytest.mark.skipif(sys.platform != "linux", reason="the highest memory of a process is read from /proc")
@pytest.mark.slow
@pytest.mark.parametrize("how", ["counted", "read"])
def test_memory_while_counting_is_not_that_of_what_is_counted(tmp_path: Path, how: str) -> None:
    copies = 20_000  # 2 GB
    file = write(tmp_path / "x.parquet", columns={"c": repeated(copies=copies)}, store_schema=False)
    act = "unpacked_bytes(file, 1 << 30)" if how == "counted" else "parquet.read_table(file)"
    script = f"""
import resource, sys
from pathlib import Path
from pyarrow import compute, parquet
from lora_rocm.dataset.rows.parquet_guard import unpacked_bytes
file = Path(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
{act}
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""
    done = subprocess.run([sys.executable, "-c", script, str(file)], capture_output=True, encoding="utf-8", check=True)
    assert (int(done.stdout) < 600) == (how == "counted"), done.stdout
