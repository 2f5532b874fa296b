from __future__ import annotations

import threading

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
