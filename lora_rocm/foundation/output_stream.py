"""Standard output that never fails: a run continues if its terminal or pipe is gone or the disk of its log is full."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class Outlasting(io.RawIOBase):
    """A raw stream that passes bytes on to a file and drops those that the file refuses.

    Args:
        file: the unbuffered file below a text stream.
        stream: that text stream. The reference keeps it alive, because it closes the file when collected.
    """

    def __init__(self, file: io.RawIOBase, stream: TextIO) -> None:
        self._file, self._stream = file, stream

    def write(self, data: ReadableBuffer, /) -> int:
        """Return the number of bytes that the file accepted, or all of them if it accepted none."""
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
    """The stream with failed writes dropped. A stream without a raw file below is returned unchanged."""
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
    """Replace ``sys.stdout`` by a stream that drops failed writes."""
    before = sys.stdout
    sys.stdout = outlive(before)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout = before
