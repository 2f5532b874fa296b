"""Worker processes that really hang, die and raise: the batches are those that are read without workers."""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import get_worker_info

from lora_rocm.dataset.images.buckets import image_shape
from lora_rocm.dataset.order.batch_plan import BatchPlan, Item
from lora_rocm.loader import worker_pool as under_test
from lora_rocm.loader.cached_dataset import Order, Orders, Read
from lora_rocm.loader.worker_pool import LoaderWorkers, WorkerPool, WorkersFailed, hand_over, one_ahead
from lora_rocm.recipe.process_sections import RuntimeSection
from lora_rocm.rundir.event_types import ChangeEvent, Event, NoticeEvent
from lora_rocm.rundir.run_context import RunContext
from tests.wording import says

COUNT = 9
FAULTY = 4
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the faults are POSIX signals")


@dataclass(frozen=True)
class Source:
    """Something that differs from order to order, and what befalls each worker at order ``FAULTY``."""

    fault: str = ""
    marks: Path = Path()

    def __getitem__(self, order: Order, /) -> Read:
        if self.fault and get_worker_info() is not None and order.iteration == FAULTY:
            (self.marks / str(os.getpid())).touch()
            FAULTS[self.fault]()
        values = torch.tensor([sum(key.encode("ascii")) for key in order.keys["image"]])
        return Read(order, {"x": values + torch.arange(20)[:, None]}, {"x": values})


def raise_error() -> None:
    raise KeyError("of the source")


FAULTS: dict[str, Callable[[], Any]] = {
    "hangs": lambda: time.sleep(600),
    "is stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crashes": lambda: ctypes.string_at(0),
    "raises": raise_error,
    "leaves": lambda: os._exit(3),
}
SAID = {
    "hangs": "no batch came within 1.5 s",
    "is stopped": "no batch came within 1.5 s",
    "is killed": "killed by signal SIGKILL",
    "crashes": "killed by signal SIGSEGV",
    "raises": "KeyError: 'of the source'",
    "leaves": "exit code 3",
}


@pytest.fixture
def orders() -> Orders:
    items = [Item(f"{number}.png", image_shape((64, 64)), {"image": ((f"k{number}",),)}) for number in range(COUNT)]
    return Orders(BatchPlan(items, 1, 1, 0), 0, COUNT)


def noting(said: list[str], given_up: list[str] | None) -> RunContext:
    """A context that notes messages, and symptoms of the change to no workers."""

    def emit(emitted: Event) -> None:
        if isinstance(emitted, NoticeEvent):
            said.append(emitted.text)
        elif isinstance(emitted, ChangeEvent) and given_up is not None:
            given_up.append(emitted.seen)
        else:
            pytest.fail(f"{emitted}")

    return RunContext(emit)


def read(
    source: Source, orders: Orders, said: list[str], given_up: list[str] | None = None, **runtime: Any
) -> list[Any]:
    """``given_up`` gets the symptom with which workers are given up; None where that is an error.

    Where nothing hangs on purpose, no busy machine reaches the limit.
    """
    timeout_s = 1.5 if source.fault in ("hangs", "is stopped") else 60
    workers = LoaderWorkers(
        source, RuntimeSection(**{"worker_timeout_s": timeout_s, **runtime}), noting(said, given_up)
    )
    try:
        return plain(workers.reads(orders))
    finally:
        workers.close()


def plain(results: Iterator[Any]) -> list[Any]:
    return [(read.order, read.tensors["x"].tolist(), read.fingerprints["x"].tolist()) for read in results]


SLOW = ("is stopped", "crashes", "is killed", "raises", "leaves")
"""The first two are "hangs" and "is killed" to the main process; tests below have workers that are killed and raise."""


@pytest.mark.parametrize("fault", [pytest.param(f, marks=pytest.mark.slow) if f in SLOW else f for f in SAID])
def test_a_worker_that_fails_costs_no_batch(fault: str, orders: Orders, tmp_path: Path) -> None:
    said: list[str] = []
    seen: list[str] = []
    started = time.monotonic()
    assert read(Source(fault, tmp_path), orders, said, seen, workers=1) == read(Source(), orders, [])
    assert seen == ["loader-hang" if fault in ("hangs", "is stopped") else "died"]
    assert len(said) == 1 and SAID[fault] in said[0] and says(said[0], "loader/going-on-without-workers"), said
    assert time.monotonic() - started < 120 and multiprocessing.active_children() == []
    assert len(list(tmp_path.iterdir())) == 1  # the fault did happen


def test_reading_that_forgets_its_position_gives_other_batches(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the tests above; the reading knows only that the workers failed."""

    def failing(self: WorkerPool, orders: Orders) -> Iterator[Any]:
        yield from (Source()[order] for order in itertools.islice(orders, FAULTY))
        raise WorkersFailed("it hung", "loader-hang")

    monkeypatch.setattr(WorkerPool, "reads", failing)
    assert read(Source(), orders, [], [], workers=1) == read(Source(), orders, [])
    monkeypatch.setattr(Orders, "after", lambda self, count: self)
    assert read(Source(), orders, [], [], workers=1) != read(Source(), orders, [])


@pytest.mark.slow  # the quick one is of a worker that is kept, below
def test_workers_that_are_sound_are_not_given_up(orders: Orders) -> None:
    said: list[str] = []
    assert read(Source(), orders, said, workers=2) == read(Source(), orders, [])
    assert said == []


def test_a_death_never_interrupts_what_the_main_process_does(orders: Orders) -> None:
    """torch's own handler raises in the main thread when a worker dies, wherever that thread is."""
    said: list[str] = []
    before = signal.getsignal(signal.SIGCHLD)
    workers = LoaderWorkers(Source(), RuntimeSection(workers=1), noting(said, []))
    reading = workers.reads(Orders(orders.plan, 0, 40))
    found = plain(itertools.islice(reading, 2))
    (child,) = multiprocessing.active_children()
    child.kill()
    time.sleep(0.3)
    assert signal.getsignal(signal.SIGCHLD) is before
    assert found + plain(reading) == read(Source(), Orders(orders.plan, 0, 40), [])
    assert len(said) == 1 and "SIGKILL" in said[0]


def test_what_failed_once_is_not_tried_again(orders: Orders, tmp_path: Path) -> None:
    said: list[str] = []
    workers = LoaderWorkers(Source("raises", tmp_path), RuntimeSection(workers=1), noting(said, []))
    whole = read(Source(), orders, [])
    assert plain(workers.reads(orders)) == whole == plain(workers.reads(orders))
    assert len(said) == 1 and SAID["raises"] in said[0] and workers.count == 0


@pytest.mark.parametrize("persistent", [pytest.param(False, marks=pytest.mark.slow), True])
def test_workers_are_kept_where_the_recipe_says_so(orders: Orders, persistent: bool) -> None:
    said: list[str] = []
    workers = LoaderWorkers(Source(), RuntimeSection(workers=1, persistent_workers=persistent), noting(said, None))
    whole, seen = read(Source(), orders, []), []
    for _ in range(2):
        assert plain(itertools.islice(workers.reads(orders), 3)) == whole[:3]  # left in the middle
        seen.append(multiprocessing.active_children())
    if persistent:
        assert plain(workers.reads(orders)) == whole
    assert workers.count == 1 and said == []  # sound ones are not given up
    assert (seen[0] == seen[1] != []) if persistent else (seen == [[], []])
    workers.close()
    assert multiprocessing.active_children() == []


def test_only_tensors_in_main_memory_leave_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    order, here, elsewhere = Order(0, 0, {}), torch.ones(1), torch.ones(1, device="meta")
    read = Read(order, {"x": here}, {})
    assert hand_over(read) is read
    monkeypatch.setattr(under_test, "get_worker_info", lambda: object())
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int64):
        there = under_test.unpacked(hand_over(Read(order, {"x": here.to(dtype)}, {})))  # type: ignore[arg-type]
        assert isinstance(there, Read) and there.tensors["x"].dtype is dtype and there.tensors["x"].float() == 1
    with pytest.raises(ValueError, match="x is on meta"):
        hand_over(Read(order, {"x": elsewhere}, {}))


@pytest.mark.parametrize(
    ("what", "seen"), [("RuntimeError: DataLoader timed out after 120 seconds", "loader-hang"), ("EOFError: ", "died")]
)
def test_torch_may_be_the_first_to_say_that_a_worker_hangs(
    orders: Orders, monkeypatch: pytest.MonkeyPatch, what: str, seen: str
) -> None:
    def serve(self: WorkerPool, loader: Any, given: Any) -> None:
        self._told.put(("failed", what))

    monkeypatch.setattr(WorkerPool, "_serve", serve)
    found: list[str] = []
    assert read(Source(), orders, [], found, workers=1) == read(Source(), orders, [])
    assert found == [seen]


def test_workers_of_two_readings_are_given_up_once(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation of the held-out images comes in the middle of a step's reading."""

    def failing(self: WorkerPool, orders: Orders) -> Iterator[Any]:
        yield Source()[next(iter(orders))]
        raise WorkersFailed("it hung", "loader-hang")

    monkeypatch.setattr(WorkerPool, "reads", failing)
    found: list[str] = []
    workers = LoaderWorkers(Source(), RuntimeSection(workers=1), noting([], found))
    one, other = workers.reads(orders), workers.reads(orders)
    begun = plain(itertools.islice(one, 1)), plain(itertools.islice(other, 1))
    assert [some + plain(rest) for some, rest in zip(begun, (one, other), strict=True)] == 2 * [
        read(Source(), orders, [])
    ]
    assert found == ["loader-hang"]
    workers.close()


def test_on_windows_workers_are_asked_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test.sys, "platform", "win32")
    assert LoaderWorkers(Source(), RuntimeSection(workers=2)).count == 0
    assert LoaderWorkers(Source(), RuntimeSection(workers=2, workers_on_windows=True)).count == 2


def test_what_the_data_loader_is_asked_for(orders: Orders) -> None:
    without = under_test.data_loader(Source(), orders)
    assert (without.num_workers, without.timeout, without.multiprocessing_context) == (0, 0, None)
    loader = under_test.data_loader(Source(), orders, 2, 77, True)
    assert (loader.num_workers, loader.timeout, loader.persistent_workers) == (2, 77, True)
    assert loader.multiprocessing_context.get_start_method() == "spawn" and not loader.pin_memory


def test_a_worker_has_one_thread() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        under_test._start_worker(0)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


# without workers


def test_the_next_is_read_while_one_is_used_and_no_further() -> None:
    read: list[int] = []
    arrived = [threading.Event() for _ in range(5)]

    def results() -> Iterator[Any]:
        for number in range(5):
            read.append(number)
            arrived[number].set()
            yield number + 1

    found = []
    for number, value in enumerate(one_ahead(results())):
        found.append(value)
        if number < 4:
            assert arrived[number + 1].wait(10.0), "nobody asked for it"
        time.sleep(0.01)
        assert len(read) <= number + 2
    assert found == [1, 2, 3, 4, 5]


def test_an_error_comes_where_it_would_have_come() -> None:
    def results() -> Iterator[Any]:
        yield 1
        yield 2
        raise KeyError("of the source")

    reading = one_ahead(results())
    assert [next(reading), next(reading)] == [1, 2]
    with pytest.raises(KeyError):
        next(reading)


def test_a_reading_that_is_left_early_leaves_no_thread() -> None:
    reading = one_ahead(itertools.count(1))  # type: ignore[arg-type]
    assert next(reading) == 1
    reading.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reader")]
