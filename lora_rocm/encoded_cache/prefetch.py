"""Threads that support a loop: ``ahead`` prefetches its inputs, and ``BackgroundWriter`` writes its outputs.

The threads change only the speed. Results keep the order of the inputs, and errors are raised at the same place as in a
loop without threads (write errors slightly later). All threads have ended when ``ahead`` or the ``BackgroundWriter``
ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import TypeVar

from lora_rocm.errors import LoraRocmError, StoppedError
from lora_rocm.processes.cores import core_count

MAX_THREADS = 8  # decoding and scaling a photograph takes about as long as encoding it on a fast GPU
MAX_AHEAD_BYTES = 1 << 29
MAX_BEHIND = 16  # entries; half a MiB each for images of 1024x1024

Made = TypeVar("Made")
Wanted = TypeVar("Wanted")


def ahead(
    make: Callable[[Wanted], Made], wanted: Iterable[Wanted], bytes_of: Callable[[Wanted], int], threads: int = 0
) -> Generator[Made, None, None]:
    """Yield ``make`` of each item in order, like ``map``, but compute the next results in threads meanwhile.

    Close the generator if the loop ends early.

    Args:
        make: function that computes a result; called in threads.
        wanted: the items, iterated in the caller's thread.
        bytes_of: returns the memory in bytes that one result needs, including its computation. Pending results are
            limited to MAX_AHEAD_BYTES and to twice the number of threads. A larger result is computed alone.
        threads: number of threads; 0 for one per processor, up to MAX_THREADS.
    """
    count = threads or min(MAX_THREADS, core_count())
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


class BackgroundWriter:
    """A thread that executes writes in order. Use it in a ``with`` block; at the end, all writes are finished.

    If the block fails, its error propagates, and errors of the remaining writes are suppressed. A stop request does not
    count as a failure. Only complete writes remain.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "behind")
        self._waiting = deque[tuple[Future[None], Callable[[], None]]]()

    def __enter__(self) -> BackgroundWriter:
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
        """Queue a write. After it, ``then`` is called in the caller's thread.

        Raises:
            StorageError: an earlier write failed.
        """
        while len(self._waiting) >= MAX_BEHIND or (self._waiting and self._waiting[0][0].done()):
            self._finish_oldest()
        self._waiting.append((self._pool.submit(write), then))

    def _finish_oldest(self) -> None:
        written, then = self._waiting.popleft()
        written.result()
        then()
