"""Makes standard output safe: a run continues if its terminal or pipe is gone, or the disk of its log is full."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class Outlasting(io.RawIOBase):
    """A raw stream that passes bytes to a file, and drops them if the file cannot be written.

    Args:
        file: the unbuffered file of a text stream.
        stream: the text stream. It is kept referenced: if it were garbage-collected, it would close the file.
    """

    def __init__(self, file: io.RawIOBase, stream: TextIO) -> None:
        self._file, self._stream = file, stream

    def write(self, data: ReadableBuffer, /) -> int:
        """Write bytes; return the number of bytes that the file accepted.

        If the write failed, all bytes count as written.
        """
        try:
            taken = self._file.write(data)
        except OSError:  # the reader is gone, the disk is full or the terminal is closed
            taken = None
        return memoryview(data).nbytes if taken is None else taken  # a full non-blocking pipe also gives None

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._file.isatty()

    def fileno(self) -> int:
        return self._file.fileno()


def outlive(stream: TextIO) -> TextIO:
    """Return a stream that writes to the same file as ``stream``, but ignores failures.

    A stream without a raw file is returned unchanged.
    """
    below = getattr(stream, "buffer", None)
    file = below if isinstance(below, io.RawIOBase) else getattr(below, "raw", None)
    if not isinstance(file, io.RawIOBase):
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(Outlasting(file, stream)), encoding=stream.encoding, errors="replace", line_buffering=True
    )


def drop_unwritten(stream: TextIO) -> None:
    """Drop text that a stream cannot write: Python would print a traceback about it at its end."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # writes: the system's null device


@contextmanager
def outliving_stdout() -> Iterator[None]:
    """Replace ``sys.stdout`` within this context by a stream that ignores failed writes."""
    before = sys.stdout
    sys.stdout = outlive(before)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout = before
