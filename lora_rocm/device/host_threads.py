"""A pool of threads that each run tensor operations on one CPU core."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock

import torch

from lora_rocm.processes.cores import core_count

_lock = Lock()
_before = list[int]()
"""The process's number of threads before the first open pool, once for each open pool."""


@contextmanager
def threads_of_one_core(most: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a thread pool of at most min(most, cores) single-threaded workers. Queued work is cancelled at the end.

    By default each worker would start one thread per core for every operation, and these would compete for the cores.
    The workers set the number to one, also for threads that start later. The last pool to close restores it.
    """
    with _lock:  # a thread that started while a pool was open counts one
        _before.append(_before[0] if _before else torch.get_num_threads())
    pool = ThreadPoolExecutor(min(most, core_count()), initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        with _lock:
            before = _before.pop()
            if not _before:
                torch.set_num_threads(before)
