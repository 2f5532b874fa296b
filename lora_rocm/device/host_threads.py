"""Threads that each do tensor operations on one CPU core."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch


@contextmanager
def threads_of_one_core(most: int) -> Iterator[ThreadPoolExecutor]:
    """A pool of at most so many threads, and no more than there are cores. Work that waits is cancelled at the end.

    Each thread by itself would start a team of threads for an operation, and the teams would wait for cores.
    """
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(min(most, os.cpu_count() or 1), initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)  # those of the pool had set it to one, for threads to come too
