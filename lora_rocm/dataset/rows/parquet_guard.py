"""Computes the unpacked size of an untrusted Parquet file without unpacking it.

A file may store a value once and refer to it in a million rows (dictionaries). Or it may store only the suffix that
differs from the previous value (delta byte arrays). The footer does not reveal this. Such columns are therefore read in
bounded batches of rows, without expanding dictionaries, and the sizes of their values are summed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

DICTIONARIES = frozenset({"PLAIN_DICTIONARY", "RLE_DICTIONARY"})
SWELLING = DICTIONARIES | {"DELTA_BYTE_ARRAY"}
KEPT_SHORT = DICTIONARIES | {"PLAIN", "RLE", "BIT_PACKED"}
"""Encodings of columns that Arrow can read as a dictionary, without expanding the values."""
WIDTHS_BYTES = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
OFFSET_BYTES = 4  # each text in a table takes these, even if it is empty
BATCH_BYTES, MAX_BATCH_ROWS = 1 << 26, 256
READ_BYTES = 1 << 20
DICTIONARY_BATCHES = 16
"""Approximate number of batches in which a column chunk with a dictionary is read. Each batch has a copy of the
dictionary.
"""
MAX_LIST_VALUES = 1 << 25
"""Maximum number of values in a chunk of lists that is read. Reading in batches of rows does not limit the memory for
lists, because one row may contain all values. Even a dictionary index takes a few bytes.
"""


def unpacked_bytes(file: Path, limit_bytes: int, little: float = 0.0) -> int:
    """Return the size in bytes of all columns with every value expanded, but at least the size stated in the footer.

    Counting stops above the limit, so a larger result is only a lower bound. Only columns in which one stored value may
    represent many are read. This needs memory of a few times BATCH_BYTES, or of one value. Lists need a few times the
    encoded size of a chunk.

    Args:
        file: the file.
        limit_bytes: the size above which counting stops.
        little: factor of growth up to which a chunk is ignored. The growth is estimated as the number of values times
            the longest value, divided by the compressed size.

    Raises:
        OSError, pyarrow.ArrowException (a ValueError or OSError): the file cannot be read, or is not Parquet.
    """
    from pyarrow import parquet

    # Sum the sizes given by the footer, and collect the columns that may expand.
    footer = parquet.read_metadata(file)
    total, swelling = 0, list[tuple[int, int]]()
    for group in range(footer.num_row_groups):
        for column in range(footer.num_columns):
            chunk, about = footer.row_group(group).column(column), footer.schema.column(column)
            is_bytes = chunk.physical_type == "BYTE_ARRAY"
            width = OFFSET_BYTES if is_bytes else WIDTHS_BYTES.get(chunk.physical_type, about.length)
            encoded, least = chunk.total_uncompressed_size, chunk.num_values * width
            total += encoded + least if is_bytes else max(encoded, least)
            if is_bytes and chunk.num_values and not SWELLING.isdisjoint(chunk.encodings):
                swelling.append((group, column))
    # Add the expansion of these columns by reading them.
    for group, column in swelling:
        if total > limit_bytes:
            break
        encoded = footer.row_group(group).column(column).total_uncompressed_size  # already in the total
        total += max(0, sum(_counted(file, footer, group, column, limit_bytes - total + encoded, little)) - encoded)
    return total


def _counted(file: Path, footer: Any, group: int, column: int, left_bytes: int, little: float) -> Iterator[int]:
    """Yield the bytes of a column chunk's values, batch by batch, until their sum exceeds ``left_bytes``."""
    from pyarrow import parquet

    chunk, about = footer.row_group(group).column(column), footer.schema.column(column)
    short = [about.path] if KEPT_SHORT.issuperset(chunk.encodings) else []
    if about.max_repetition_level and not (short and chunk.num_values <= MAX_LIST_VALUES):
        yield chunk.num_values * chunk.total_uncompressed_size  # not read: use the upper bound
        return
    rows = max(1, min(MAX_BATCH_ROWS, BATCH_BYTES // max(1, chunk.total_uncompressed_size)))
    if short:
        rows = max(1, footer.row_group(group).num_rows // DICTIONARY_BATCHES)
    how = {"read_dictionary": short, "buffer_size": READ_BYTES, "pre_buffer": False}  # do not load all of it at once
    where: dict[str, Any] = {"row_groups": [group], "columns": [about.path], "use_threads": False}
    with parquet.ParquetFile(file, metadata=footer, **how) as opened:
        longest_bytes = _longest_bytes(next(opened.iter_batches(1, **where)))
        if longest_bytes and chunk.num_values * longest_bytes <= little * chunk.total_compressed_size:
            return
        for batch in opened.iter_batches(rows, **where):
            counted = sum(map(_values_bytes, batch.columns))
            yield counted
            left_bytes -= counted
            if left_bytes < 0:
                return


def _longest_bytes(first: Any) -> int:
    """Return the length of the longest value in a chunk's dictionary; 0 if it cannot be determined.

    The dictionary is only known if the first row uses it. Otherwise, Arrow builds one from that row's values.

    Args:
        first: batch with only the first row of the chunk.
    """
    from pyarrow import compute, types

    values = _innermost(first.column(0))
    if first.num_columns > 1 or not types.is_dictionary(values.type) or len(values.dictionary) <= len(values):
        return 0
    return int(compute.max(compute.binary_length(values.dictionary)).as_py() or 0)


def _values_bytes(array: Any) -> int:
    """Return the size in bytes of a column's values, with dictionaries expanded."""
    from pyarrow import compute, types

    values = _innermost(array)
    if not types.is_dictionary(values.type):
        return int(values.nbytes)
    lengths = compute.binary_length(values.dictionary)
    return int(compute.sum(compute.take(lengths, values.indices)).as_py() or 0)


def _innermost(array: Any) -> Any:
    """Return the array of values inside nested lists and structs."""
    from pyarrow import types

    while types.is_nested(array.type):
        array = array.field(0) if types.is_struct(array.type) else array.flatten()
    return array
