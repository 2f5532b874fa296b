from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lora_rocm.device.host_threads import threads_of_one_core


def test_each_thread_uses_one_core_and_others_as_many_as_before() -> None:
    before = torch.get_num_threads()
    with threads_of_one_core(2) as pool:
        found = list(pool.map(lambda _: (threading.get_ident(), torch.get_num_threads()), range(20)))
    assert len({thread for thread, _ in found}) <= 2 and {count for _, count in found} == {1}
    others: list[int] = []
    later = threading.Thread(target=lambda: others.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert [torch.get_num_threads(), *others] == [before, before]


def test_work_that_waits_is_cancelled_at_an_error() -> None:
    started, go_on, done = threading.Event(), threading.Event(), list[int]()

    def work(number: int) -> None:
        started.set()
        go_on.wait(10)
        done.append(number)

    with pytest.raises(KeyError), threads_of_one_core(1) as pool:
        futures = [pool.submit(work, number) for number in range(9)]
        started.wait(10)
        threading.Timer(0.05, go_on.set).start()
        raise KeyError
    assert done == [0] and all(future.cancelled() for future in futures[1:])


def test_pools_of_two_threads_leave_the_number_of_later_threads() -> None:
    """The second pool opens in a thread that starts while the first one is open, and closes after it."""
    before, opened, closes = torch.get_num_threads(), threading.Event(), threading.Event()

    def second() -> None:
        with threads_of_one_core(1) as pool:
            pool.submit(opened.set).result()
            closes.wait(10)

    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(1) as other:
            with threads_of_one_core(1) as pool:
                pool.submit(torch.get_num_threads).result()
                ended = other.submit(second)
                opened.wait(10)
            closes.set()
            ended.result()
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == 2
    finally:
        closes.set()
        torch.set_num_threads(before)
