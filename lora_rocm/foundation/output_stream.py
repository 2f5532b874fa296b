"""Standard output that outlives its reader: a run goes on when its terminal or pipe is gone, or its log's disk full."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class Outlasting(io.RawIOBase):
    """Passes bytes on to a file, and drops those that it does not take.

    Args:
        file: the unbuffered file below a text stream.
        stream: that stream. It is kept, because it closes the file when nobody has it any more.
    """

    def __init__(self, file: io.RawIOBase, stream: TextIO) -> None:
        self._file, self._stream = file, stream

    def write(self, data: ReadableBuffer, /) -> int:
        """Write as much as the file takes; all of it counts as written where it takes nothing."""
        try:
            taken = self._file.write(data)
        except OSError:  # nobody reads any more, the disk is full, the terminal is closed
            taken = None
        return memoryview(data).nbytes if taken is None else taken  # None: also of a full pipe that does not wait

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._file.isatty()

    def fileno(self) -> int:
        return self._file.fileno()


def outlive(stream: TextIO) -> TextIO:
    """The same stream, but what cannot be written is dropped. One that no file is below is returned as it is."""
    below = getattr(stream, "buffer", None)
    file = below if isinstance(below, io.RawIOBase) else getattr(below, "raw", None)
    if not isinstance(file, io.RawIOBase):
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(Outlasting(file, stream)), encoding=stream.encoding, errors="replace", line_buffering=True
    )


@contextmanager
def outliving_stdout() -> Iterator[None]:
    """Drop what standard output does not take."""
    before = sys.stdout
    sys.stdout = outlive(before)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout = before
