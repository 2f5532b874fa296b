"""A DataLoader whose worker processes may hang, die or raise: what they have not handed over is read again by fewer.

Each group of workers is served by a thread of its own, and the caller waits for nothing but that thread's word, with a
deadline. So a worker that is stopped while it hands over a tensor, or was killed while it held a lock, leaves behind
one thread that waits, never a run that does. The thread has a second use: torch installs a handler that raises in the
middle of whatever the main thread does when a worker dies, but only for a DataLoader that the main thread iterates.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch
from torch.multiprocessing import get_sharing_strategy, set_sharing_strategy
from torch.utils.data import DataLoader, get_worker_info

from lora_rocm.loader.cached_dataset import BadEntry, Order, Orders, Read, Unequal
from lora_rocm.recipe.schema import RuntimeSection
from lora_rocm.rules.mitigations import Seen
from lora_rocm.rundir.exit_status import describe_exit

START_S = 120.0
"""The first batch of a new process may take so long, whatever the recipe says: it imports torch."""
POLL_S = 0.2
END_S = 1.0  # from a broken connection to the system's word that the process has ended
SPARE_DESCRIPTORS = 8  # for the sockets over which descriptors are handed over
KILL_WAIT_S = 5.0  # a process that is stuck inside a driver cannot die; it is left behind
NO_DESCRIPTORS = ("Too many open files", "items of ancdata")
"""In torch's messages: a file descriptor was wanted and there was none, on this side or on the other."""
WAITED = "DataLoader timed out"
"""In torch's message: it waited as long as the run does, and was first to say so."""

GivenUp = Callable[[Seen], None]
Result = Read | BadEntry | Unequal


class Source(Protocol):
    """A map-style dataset; it is sent to the worker processes."""

    def __getitem__(self, order: Order, /) -> Result: ...


class WorkersFailed(Exception):
    """A worker hung, died or raised; the message says which.

    Args:
        seen: in the words of the table of changes, where one that raised has died, too: it ended before its work.
    """

    def __init__(self, what: str, seen: Seen = "died") -> None:
        super().__init__(what)
        self.seen = seen


class Workers:
    """Reads orders with as many worker processes as work here. One a run: what did not work is not tried again.

    Args:
        source: what the workers read from.
        runtime: how many workers, how long they may be silent, and whether they are kept between two readings.
        say: gets a sentence for each change.
        given_up: called once, where from then on the rest is read without workers, with what was seen of the last one.
    """

    def __init__(
        self, source: Source, runtime: RuntimeSection, say: Callable[[str], None], given_up: GivenUp = lambda seen: None
    ) -> None:
        self.source, self._runtime, self._say, self._given_up = source, runtime, say, given_up
        self.count = runtime.workers_on(sys.platform)
        self.sharing = get_sharing_strategy()
        self._idle: list[Group] = []
        self._busy: list[Group] = []

    def reads(self, orders: Orders) -> Iterator[Result]:
        """What was read, in the order of ``orders``, however many workers there are and whatever befalls them."""
        given = 0
        while self.count:
            group = self._take()
            try:
                for result in group.reads(orders.after(given)):
                    given += 1
                    yield result
                return
            except WorkersFailed as failure:
                self._change(group, str(failure), failure.seen)
            finally:
                self._give_back(group)
        yield from one_ahead(data_loader(self.source, orders.after(given)))

    def close(self) -> None:
        """End all worker processes."""
        while self._idle or self._busy:
            (self._idle or self._busy).pop().close()

    def _take(self) -> Group:
        group = self._idle.pop() if self._idle else Group(self.source, self.count, self.sharing, self._runtime)
        self._busy.append(group)
        return group

    def _give_back(self, group: Group) -> None:
        """Keep the workers for the next reading where the recipe says so, and they are as many as work here."""
        if group not in self._busy:  # closed
            return
        self._busy.remove(group)
        as_wanted = (group.size, group.sharing) == (self.count, self.sharing)
        if self._runtime.persistent_workers and as_wanted:
            self._idle.append(group)
        else:
            group.close()

    def _change(self, group: Group, what: str, seen: Seen) -> None:
        """Decide how to go on after a failure, and say it."""
        had = self.count
        while self._idle:
            self._idle.pop().close()
        if group.sharing == "file_descriptor" and any(sign in what for sign in NO_DESCRIPTORS):
            self.sharing = "file_system"
            how = "batches are handed over through files instead of file descriptors"
        else:
            self.count = min(self.count, group.size // 2)
            how = f"going on with {self.count} workers" if self.count else "going on without workers"
        self._say(f"A loader worker failed: {what}; {how}. No sample is lost.")
        if had and not self.count:  # two readings can be under way, and the workers of both fail
            self._given_up(seen)


class Group:
    """Some worker processes, and the thread that serves them."""

    def __init__(self, source: Source, size: int, sharing: str, runtime: RuntimeSection) -> None:
        self.size, self.sharing = size, sharing
        self._timeout_s = runtime.worker_timeout_s
        self._given = 0
        self._closed = False
        self._processes: list[BaseProcess] = []
        self._asked: queue.SimpleQueue[Orders | str] = queue.SimpleQueue()
        self._told: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        given = _Given()
        longest_s = max(self._timeout_s, START_S)
        loader = data_loader(source, given, size, sharing, longest_s, runtime.persistent_workers)
        self._thread = threading.Thread(target=self._serve, args=(loader, given), daemon=True, name="loader")
        self._thread.start()

    def reads(self, orders: Orders) -> Iterator[Result]:
        """What the workers read.

        Raises:
            WorkersFailed: one hung, died or raised.
        """
        self._ask(orders)
        while (said := self._ask("next"))[0] == "read":
            self._given += 1
            yield said[1]

    def close(self) -> None:
        """Kill the workers: they hold nothing that could be lost."""
        self._closed = True
        self._asked.put("close")
        self._kill()
        self._thread.join(POLL_S)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(KILL_WAIT_S)

    def _ask(self, what: Orders | str) -> tuple[str, Any]:
        self._asked.put(what)
        starting = self._given < self.size  # they take turns, so each has its first batch among the first
        limit_s = max(self._timeout_s, START_S) if starting else self._timeout_s
        deadline = time.monotonic() + limit_s
        while True:
            try:
                said, value = self._told.get(timeout=POLL_S)
            except queue.Empty:
                self._look(deadline, limit_s)
                continue
            if said == "failed":
                self._wait_for_the_dead()
                raise WorkersFailed(value, "loader-hang" if WAITED in value else "died")
            return said, value

    def _look(self, deadline: float, limit_s: float) -> None:
        self._look_for_the_dead()
        if time.monotonic() > deadline:
            raise WorkersFailed(f"no batch came within {limit_s:g} s", "loader-hang")

    def _wait_for_the_dead(self) -> None:
        """A connection breaks, and the sentinel tells it, a moment before the system knows how the process ended."""
        deadline = time.monotonic() + END_S
        sentinels = [process.sentinel for process in self._processes]
        while time.monotonic() < deadline and wait(sentinels, deadline - time.monotonic()):
            self._look_for_the_dead()
            time.sleep(0.01)

    def _look_for_the_dead(self) -> None:
        """Leaving with 0 is how workers end that have nothing left to do."""
        for process in self._processes:
            if process.exitcode:
                raise WorkersFailed(f"process {process.pid} ended ({describe_exit(process.exitcode)})")

    def _serve(self, loader: DataLoader[Any], given: _Given) -> None:
        """The thread: does what it is asked until it is told to close. The iterator never leaves it."""
        batches: Iterator[Result] = iter(())
        while (asked := self._asked.get()) != "close":
            try:
                if isinstance(asked, Orders):
                    given.orders = asked
                    batches = self._opened(loader)
                    self._told.put(("open", None))
                else:
                    result = next(batches, None)
                    self._told.put(("end" if result is None else "read", result))
            except Exception as error:  # the edge of a thread: whatever a worker raised is raised again by who asked
                self._told.put(("failed", _reason(error)))

    def _opened(self, loader: DataLoader[Any]) -> Iterator[Result]:
        before = set(multiprocessing.active_children())
        try:
            return iter(loader)
        finally:
            self._processes += [child for child in multiprocessing.active_children() if child not in before]
            if self._closed:  # nobody waits any more
                self._kill()


class _Given:
    """A sampler over the orders of the reading at hand; a DataLoader that keeps its workers asks it anew for each."""

    orders: Orders

    def __iter__(self) -> Iterator[Order]:
        return iter(self.orders)


def one_ahead(results: Iterable[Result]) -> Iterator[Result]:
    """The same in the same order; the next one is read in a thread while this one is used.

    A step of a GPU leaves the host time to read; a read that comes after it leaves the GPU without work.
    """
    with ThreadPoolExecutor(1, "reader") as pool:
        waiting = iter(results)
        upcoming = pool.submit(next, waiting, None)
        while (result := upcoming.result()) is not None:
            upcoming = pool.submit(next, waiting, None)
            yield result


def data_loader(
    source: Source,
    orders: Orders | _Given,
    workers: int = 0,
    sharing: str = "",
    timeout_s: float = 0.0,
    persistent: bool = False,
) -> DataLoader[Any]:
    """A DataLoader over the orders. Workers never fork, and nobody waits for them for ever."""
    with_workers: dict[str, Any] = {}  # refused without workers
    if workers:
        with_workers = {
            "multiprocessing_context": "spawn",
            "timeout": timeout_s,
            "worker_init_fn": partial(_start_worker, sharing),
            "persistent_workers": persistent,
        }
    return DataLoader(
        source,  # type: ignore[arg-type]  # it needs no length: the sampler knows the order
        batch_size=None,
        sampler=orders,
        num_workers=workers,
        collate_fn=hand_over,  # type: ignore[arg-type]  # without batches of its own it hands on one item
        generator=torch.Generator().manual_seed(0),  # else it draws from the global generator, which others rely on
        **with_workers,
    )


def _start_worker(sharing: str, worker_id: int) -> None:
    torch.set_num_threads(1)
    set_sharing_strategy(sharing)


def hand_over(result: Result) -> Result:
    """Put what was read where the main process can get it; in the worker, so that what goes wrong is told.

    Raises:
        ValueError: a tensor is not in main memory. HIP cannot hand memory of a GPU to another process.
    """
    if isinstance(result, Read):
        named = (*result.tensors.items(), *result.fingerprints.items())
        for name, tensor in named:
            if tensor.device.type != "cpu":
                raise ValueError(f"{name} is on {tensor.device}; only CPU tensors may leave a loader worker")
            if get_worker_info() is not None:
                tensor.share_memory_()
        if get_worker_info() is not None and get_sharing_strategy() == "file_descriptor":
            _need_descriptors(len(named) + SPARE_DESCRIPTORS)
    return result


def _need_descriptors(count: int) -> None:
    """Find out whether there are so many: where they end later, torch drops the batch and only the log says why.

    Raises:
        OSError: there are fewer.
    """
    with contextlib.ExitStack() as opened:
        for _ in range(count):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))


def _reason(error: Exception) -> str:
    """The last line that says something: for an exception from a worker that is its own, under its traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = lines[-1].rstrip(".") if lines else ""
    return last if last.partition(":")[0].isidentifier() and ":" in last else f"{type(error).__name__}: {last}"
