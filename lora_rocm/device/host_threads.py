"""A pool of threads that each run tensor operations on one CPU core."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch


@contextmanager
def threads_of_one_core(most: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a thread pool of at most min(most, cores) single-threaded workers. Queued work is cancelled at the end.

    By default each worker would start one thread per core for every operation, and these would compete for the cores.
    """
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(min(most, os.cpu_count() or 1), initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)  # the workers set it to one, also for later threads
