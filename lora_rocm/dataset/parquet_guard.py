"""What a Parquet file from anybody unpacks to, found out before it is unpacked.

A file may hold a value once and name it in a million rows (dictionaries), or only what a value has beyond the one
before it (delta byte arrays). Its footer tells nothing of that, so such columns are counted value by value.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

SWELLING = frozenset({"PLAIN_DICTIONARY", "RLE_DICTIONARY", "DELTA_BYTE_ARRAY"})
KEPT_SHORT = frozenset({"PLAIN_DICTIONARY", "RLE_DICTIONARY", "PLAIN", "RLE", "BIT_PACKED"})
"""Encodings from which Arrow can make a dictionary instead of writing values out."""
BYTES_OR_TEXT = frozenset({"NONE", "STRING", "ENUM", "JSON", "BSON"})
"""Logical types that are counted. Any other of bytes (decimals) is taken for the most that it may be."""
WIDTHS_BYTES = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
OFFSET_BYTES = 4  # a text takes this in a table even where it is empty
BATCH_BYTES, MAX_BATCH_ROWS = 1 << 26, 256
READ_BYTES = 1 << 20
LIST_BATCHES = 64
"""A chunk of lists is read in about this many parts: each gets a copy of the dictionary."""
DICTIONARY_PAGE, STRUCT_FIELD_I32 = 2, 0x15  # in a page's header, which is Thrift's compact form
MAX_LIST_VALUES = 1 << 25
"""In a chunk of lists one row may hold all values: each takes some bytes also while it only stands in a dictionary."""


def unpacked_bytes(file: Path, limit_bytes: int) -> int:
    """What the values of all columns take when each is written out; never less than the footer says.

    Counted no further than needed: what is larger than the limit is only known to be so, and what is not may be less.
    Memory: a few times BATCH_BYTES, or one value; of lists a few times what a chunk holds encoded. Time: as for reading
    the columns in which a value may stand for many, and none where even the most that they may take is little.

    Raises:
        OSError, pyarrow.ArrowException (a ValueError or OSError): the file cannot be read, or is no Parquet.
    """
    from pyarrow import parquet

    footer = parquet.read_metadata(file)
    least, more = 0, dict[tuple[int, int], int]()  # chunk -> how much larger it may be than what it surely takes
    for group in range(footer.num_row_groups):
        row_group = footer.row_group(group)
        for column in range(row_group.num_columns):
            sure, most = _bounds(file, row_group.column(column), footer.schema.column(column))
            least += row_group.column(column).total_uncompressed_size + sure
            if most:
                more[group, column] = most
    most = least + sum(more.values())
    for (group, column), of_chunk in more.items():
        if least > limit_bytes or most <= limit_bytes:
            break
        if not _countable(footer, group, column):
            continue
        encoded = footer.row_group(group).column(column).total_uncompressed_size
        least, most = least - encoded, most - encoded - of_chunk
        for counted in _counted(file, footer, group, column):
            least, most = least + counted, most + counted
            if least > limit_bytes:
                break
    return least if least > limit_bytes else most


def _bounds(file: Path, chunk: Any, column: Any) -> tuple[int, int]:
    """What a chunk of a column surely takes beside its encoded bytes, and the most that it may take beyond that."""
    if chunk.physical_type != "BYTE_ARRAY":
        width = WIDTHS_BYTES.get(chunk.physical_type, column.length)
        return max(0, chunk.num_values * width - chunk.total_uncompressed_size), 0
    if SWELLING.isdisjoint(chunk.encodings):
        return chunk.num_values * OFFSET_BYTES, 0
    return chunk.num_values * OFFSET_BYTES, chunk.num_values * _longest_bytes(file, chunk)


def _longest_bytes(file: Path, chunk: Any) -> int:
    """No value that stands for many is longer: with a dictionary the size of its page, else that of the chunk.

    A chunk has no more than one dictionary: Arrow refuses a second one, and a page that is not as long as its header
    says.
    """
    whole = int(chunk.total_uncompressed_size)
    start = chunk.dictionary_page_offset if chunk.has_dictionary_page else None
    if not start or start >= chunk.data_page_offset or not KEPT_SHORT.issuperset(chunk.encodings):
        return whole
    with file.open("rb") as opened:
        opened.seek(start)
        header = opened.read(16)
    kind, rest = _first_number(header)
    size = _first_number(rest)[0]
    return size if kind == DICTIONARY_PAGE and size >= 0 else whole


def _first_number(fields: bytes) -> tuple[int, bytes]:
    """The number in the first of these fields, -1 where there is none or a negative one, and what follows it."""
    if not fields or fields[0] != STRUCT_FIELD_I32:
        return -1, b""
    number = 0
    for place, byte in enumerate(fields[1:6]):  # seven bits each, the lowest first; the last one has no highest bit
        number |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return (-1 if number & 1 else number >> 1), fields[place + 2 :]  # zigzag: odd ones are negative
    return -1, b""


def _countable(footer: Any, group: int, column: int) -> bool:
    """Whether a chunk can be gone through in bounded memory."""
    chunk, about = footer.row_group(group).column(column), footer.schema.column(column)
    paths = [footer.schema.column(number).path for number in range(footer.num_columns)]
    if about.logical_type.type not in BYTES_OR_TEXT or paths.count(about.path) > 1:  # columns are read by name
        return False
    if about.max_repetition_level == 0:
        return True
    return KEPT_SHORT.issuperset(chunk.encodings) and bool(chunk.num_values <= MAX_LIST_VALUES)


def _counted(file: Path, footer: Any, group: int, column: int) -> Iterator[int]:
    """Bytes of a chunk's values, a part at a time."""
    from pyarrow import parquet

    chunk, about = footer.row_group(group).column(column), footer.schema.column(column)
    if about.max_repetition_level > 0:
        rows, kept_short = max(1, footer.row_group(group).num_rows // LIST_BATCHES), [about.path]
    else:
        rows, kept_short = max(1, min(MAX_BATCH_ROWS, BATCH_BYTES // max(1, _longest_bytes(file, chunk)))), []
    how = {"read_dictionary": kept_short, "buffer_size": READ_BYTES, "pre_buffer": False}  # not all of it at once
    with parquet.ParquetFile(file, metadata=footer, **how) as opened:
        for batch in opened.iter_batches(rows, row_groups=[group], columns=[about.path], use_threads=False):
            yield _values_bytes(batch.column(0))


def _values_bytes(array: Any) -> int:
    """Of the one array of values that lists and structures hold inside, written out if it is a dictionary."""
    from pyarrow import compute, types

    while types.is_nested(array.type):
        array = array.field(0) if types.is_struct(array.type) else array.flatten()
    if not types.is_dictionary(array.type):
        return int(array.nbytes)
    lengths = compute.binary_length(array.dictionary)
    return int(compute.sum(compute.take(lengths, array.indices)).as_py() or 0)
