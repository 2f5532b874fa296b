"""A DataLoader that survives worker processes that hang, die or raise: fewer workers read the missing batches again.

Each group of workers is served by its own thread, and the caller only waits for messages of that thread, with a
deadline. So if a worker is stopped while it hands over a tensor, or is killed while it holds a lock, only that thread
stays blocked, never the run. The thread has a second purpose: if the main thread iterates a DataLoader, torch installs
a handler that raises at an arbitrary point of the main thread when a worker dies.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch
from torch.multiprocessing import get_sharing_strategy, set_sharing_strategy
from torch.utils.data import DataLoader, get_worker_info

from lora_rocm.foundation.units import count_text
from lora_rocm.loader.cached_dataset import BadEntry, Order, Orders, Read, Unequal
from lora_rocm.recipe.process_sections import RuntimeSection
from lora_rocm.rules.mitigations import Seen, change_event
from lora_rocm.rundir.exit_status import describe_exit
from lora_rocm.rundir.run_context import NOBODY, RunContext

START_S = 120.0
"""Minimum time limit for the first batch of a new process, which imports torch first."""
POLL_S = 0.2
END_S = 1.0  # from a broken connection until the system reports the process's exit code
SPARE_DESCRIPTORS = 8  # for the sockets that transfer descriptors
KILL_WAIT_S = 5.0  # a process stuck inside a driver cannot be killed; it is abandoned
NO_DESCRIPTORS = ("Too many open files", "items of ancdata")
"""Parts of torch's messages if it runs out of file descriptors, in either process."""
WAITED = "DataLoader timed out"
"""Part of torch's message if its own timeout expires before ours."""

Result = Read | BadEntry | Unequal


class Source(Protocol):
    """A map-style dataset that is sent to the worker processes."""

    def __getitem__(self, order: Order, /) -> Result: ...


class WorkersFailed(Exception):
    """A worker hung, died or raised; the message says which.

    Args:
        seen: the symptom for the table of mitigations, in which a worker that raised also counts as "died".
    """

    def __init__(self, what: str, seen: Seen = "died") -> None:
        super().__init__(what)
        self.seen = seen


class Workers:
    """Reads orders with as many worker processes as work on this machine.

    One instance serves a whole run, so a setting that failed is not tried again.

    Args:
        source: the dataset that the workers read.
        runtime: number of workers, their timeout, and whether they are kept between two readings.
        context: receives a notice for each change, and once the change "workers-0", when the rest is read without
            workers.
    """

    def __init__(self, source: Source, runtime: RuntimeSection, context: RunContext = NOBODY) -> None:
        self.source, self._runtime, self._context = source, runtime, context
        self.count = runtime.workers_on(sys.platform)
        self.sharing = get_sharing_strategy()
        self._idle: list[Group] = []
        self._busy: list[Group] = []

    def reads(self, orders: Orders) -> Iterator[Result]:
        """The results in the order of ``orders``, independent of the number of workers and of their failures."""
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
        """Keep the workers for the next reading if the recipe says so and their settings are still current."""
        if group not in self._busy:  # closed
            return
        self._busy.remove(group)
        as_wanted = (group.size, group.sharing) == (self.count, self.sharing)
        if self._runtime.persistent_workers and as_wanted:
            self._idle.append(group)
        else:
            group.close()

    def _change(self, group: Group, what: str, seen: Seen) -> None:
        """Choose new settings after a failure, and report them."""
        had = self.count
        while self._idle:
            self._idle.pop().close()
        if group.sharing == "file_descriptor" and any(sign in what for sign in NO_DESCRIPTORS):
            self.sharing = "file_system"
            how = "batches are handed over through files instead of file descriptors"
        else:
            self.count = min(self.count, group.size // 2)
            how = f"going on with {count_text(self.count, 'worker')}" if self.count else "going on without workers"
        self._context.notice(f"A loader worker failed: {what}; {how}. No sample is lost.")
        if had and not self.count:  # only once: two readings may be active, and both may fail
            self._context.emit(change_event("workers-0", seen))


class Group:
    """A group of worker processes and the thread that serves them."""

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
        """The results of the workers, in order.

        Raises:
            WorkersFailed: a worker hung, died or raised.
        """
        self._ask(orders)
        while (said := self._ask("next"))[0] == "read":
            self._given += 1
            yield said[1]

    def close(self) -> None:
        """Kill the workers, which hold no state that could be lost."""
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
        """Send a request to the thread and wait for its answer; raises WorkersFailed on failure or timeout."""
        self._asked.put(what)
        starting = self._given < self.size  # workers take turns, so the first batches include each worker's first
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
        """Wait for exit codes: a process's connection breaks and its sentinel fires slightly before its exit code."""
        deadline = time.monotonic() + END_S
        sentinels = [process.sentinel for process in self._processes]
        while time.monotonic() < deadline and wait(sentinels, deadline - time.monotonic()):
            self._look_for_the_dead()
            time.sleep(0.01)

    def _look_for_the_dead(self) -> None:
        """Raise WorkersFailed if a process has a non-zero exit code; workers without work left exit with 0."""
        for process in self._processes:
            if process.exitcode:
                raise WorkersFailed(f"process {process.pid} ended ({describe_exit(process.exitcode)})")

    def _serve(self, loader: DataLoader[Any], given: _Given) -> None:
        """The thread's loop: answers requests until "close". Only this thread uses the iterator."""
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
            except Exception as error:  # the edge of a thread: ``_ask`` raises it again in the caller's thread
                self._told.put(("failed", _reason(error)))

    def _opened(self, loader: DataLoader[Any]) -> Iterator[Result]:
        """A new iterator of the loader; records the processes that it starts."""
        before = set(multiprocessing.active_children())
        try:
            return iter(loader)
        finally:
            self._processes += [child for child in multiprocessing.active_children() if child not in before]
            if self._closed:  # closed while the workers started
                self._kill()


class _Given:
    """A sampler over the current orders; a DataLoader with persistent workers iterates it again for each reading."""

    orders: Orders

    def __iter__(self) -> Iterator[Order]:
        return iter(self.orders)


def one_ahead(results: Iterable[Result]) -> Iterator[Result]:
    """Prefetch by one: the results in the same order, with the next one read in a thread while the current one is used.

    The host has time to read during a GPU step; reading after the step would leave the GPU idle.
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
    """A DataLoader over the orders. Workers are spawned, never forked, and have a timeout."""
    with_workers: dict[str, Any] = {}  # DataLoader rejects these options without workers
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
        generator=torch.Generator().manual_seed(0),  # otherwise it would advance the global generator
        **with_workers,
    )


def _start_worker(sharing: str, worker_id: int) -> None:
    torch.set_num_threads(1)
    set_sharing_strategy(sharing)


def hand_over(result: Result) -> Result:
    """Move the tensors to shared memory. Runs in the worker, so that an error is reported to the main process.

    Raises:
        ValueError: a tensor is not in main memory. HIP cannot share GPU memory with another process.
        OSError: there are too few file descriptors.
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
    """Check that this many file descriptors are free. If they run out later, torch drops the batch and only logs why.

    Raises:
        OSError: fewer are free.
    """
    with contextlib.ExitStack() as opened:
        for _ in range(count):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))


def _reason(error: Exception) -> str:
    """The last non-empty line of the message: for a worker's exception, that is its own message below the traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = lines[-1].rstrip(".") if lines else ""
    return last if last.partition(":")[0].isidentifier() and ":" in last else f"{type(error).__name__}: {last}"
