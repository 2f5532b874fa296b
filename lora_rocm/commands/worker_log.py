"""Shows the log of training while it is written (``--verbose``)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.5
MAX_READ_BYTES = 1 << 16
"""Maximum number of bytes that are read at once."""


@contextmanager
def followed(log: Path, show: Callable[[str], None]) -> Iterator[None]:
    """Pass each line that is appended to a file to ``show``, in a thread, until the end of the context.

    Args:
        log: the file, which may not exist yet. Its earlier content is not shown.
        show: receives a line.
    """
    try:
        position = log.stat().st_size
    except OSError:  # there is no log yet
        position = 0
    ended = threading.Event()
    thread = threading.Thread(target=_follow, args=(log, position, show, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _follow(log: Path, position: int, show: Callable[[str], None], ended: threading.Event) -> None:
    begun, is_last = b"", False
    while not is_last:
        is_last = ended.wait(POLL_S)
        position, found = _read_from(log, position)
        *lines, begun = (begun + found).split(b"\n")
        for line in [*lines, begun] if is_last and begun else lines:
            show(line.decode("utf-8", "replace").rstrip("\r"))


def _read_from(log: Path, position: int) -> tuple[int, bytes]:
    """Return the end position of a file, and the bytes between ``position`` and the end."""
    parts = []
    try:
        with log.open("rb") as file:
            file.seek(position)
            while part := file.read(MAX_READ_BYTES):
                parts.append(part)
    except OSError:  # there is no log yet, or it is locked for a moment
        pass
    content = b"".join(parts)
    return position + len(content), content
