"""Threads around one loop: what comes next is made ready ahead of it, and what it made is written behind it.

Nothing depends on them but the time: what comes out has the order of what went in, an error is raised where a loop
without threads would have met it (one of the writing a little later), and no thread is left when either ends.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import TypeVar

from lora_rocm.errors import LoraRocmError, StoppedError

MAX_THREADS = 8  # decoding and scaling a photograph takes about as long as encoding it on a fast GPU
MAX_AHEAD_BYTES = 1 << 29
MAX_BEHIND = 16  # entries; of images of 1024x1024 half a MiB each

Made = TypeVar("Made")
Wanted = TypeVar("Wanted")


def ahead(
    make: Callable[[Wanted], Made], wanted: Iterable[Wanted], bytes_of: Callable[[Wanted], int], threads: int = 0
) -> Generator[Made, None, None]:
    """``map``, in threads: while one result is used the next ones are made. To be closed where it is left early.

    Args:
        make: called in threads.
        wanted: read in this thread.
        bytes_of: memory that making one takes, and its result. As many are under way as MAX_AHEAD_BYTES allow, and
            twice the threads; one that is larger than that alone is made alone.
        threads: 0: as many as there are processors, up to MAX_THREADS.
    """
    count = threads or min(MAX_THREADS, os.cpu_count() or 1)
    under_way = deque[tuple[Future[Made], int]]()
    taken_bytes = 0
    pool = ThreadPoolExecutor(count, "ahead")
    try:
        for each in wanted:
            num_bytes = bytes_of(each)
            while under_way and (taken_bytes + num_bytes > MAX_AHEAD_BYTES or len(under_way) >= 2 * count):
                yield under_way[0][0].result()
                taken_bytes -= under_way.popleft()[1]
            under_way.append((pool.submit(make, each), num_bytes))
            taken_bytes += num_bytes
        while under_way:
            yield under_way[0][0].result()
            under_way.popleft()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class Behind:
    """One thread that writes in the order it is told to. To be used in a ``with`` block, at whose end all is written.

    Where the block failed, that error is the one to be told; of the writing then only what is whole stays.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "behind")
        self._waiting = deque[tuple[Future[None], Callable[[], None]]]()

    def __enter__(self) -> Behind:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        failed = isinstance(error, Exception) and not isinstance(error, StoppedError)
        try:
            with suppress(*((LoraRocmError, OSError, RuntimeError, MemoryError) if failed else ())):
                while self._waiting:
                    self._finish_oldest()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def add(self, write: Callable[[], None], then: Callable[[], None] = lambda: None) -> None:
        """Have something written, and then ``then`` called in this thread.

        Raises:
            StorageError: what was added before could not be written.
        """
        while len(self._waiting) >= MAX_BEHIND or (self._waiting and self._waiting[0][0].done()):
            self._finish_oldest()
        self._waiting.append((self._pool.submit(write), then))

    def _finish_oldest(self) -> None:
        written, then = self._waiting.popleft()
        written.result()
        then()
