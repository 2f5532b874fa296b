"""A DataLoader that survives workers which hang, die or raise: it reads the rest in the main process.

Each group of workers has its own thread. The caller only waits, with a deadline, for messages from that thread. So a
worker that stops while it sends a batch, or is killed while it holds a lock, blocks only that thread, never the run.
The thread has a second purpose. If the main thread iterates a DataLoader, torch installs a handler, which raises at an
arbitrary point of the main thread when a worker dies.
"""

from __future__ import annotations

import io
import multiprocessing
import queue
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, get_worker_info

from lora_rocm.loader.cached_dataset import BadEntry, Order, Orders, Read, Unequal
from lora_rocm.recipe.process_sections import RuntimeSection
from lora_rocm.rules.mitigations import Seen, change_event
from lora_rocm.rundir.exit_status import describe_exit
from lora_rocm.rundir.run_context import NOBODY, RunContext

START_S = 120.0
"""Minimum time limit for the first batch of a new process, which imports torch first."""
POLL_S = 0.2
END_S = 1.0  # from a broken connection until the system reports the process's exit code
KILL_WAIT_S = 5.0  # a process stuck inside a driver cannot be killed; it is abandoned
WAITED = "DataLoader timed out"
"""Part of torch's message if its own timeout expires before ours."""

Result = Read | BadEntry | Unequal


class SharedDataset(Protocol):
    """A map-style dataset that is sent to the worker processes."""

    def __getitem__(self, order: Order, /) -> Result: ...


class WorkersFailed(Exception):
    """A worker hung, died or raised; the message names the fault.

    Args:
        seen: the symptom for the table of mitigations, in which a worker that raised also counts as "died".
    """

    def __init__(self, what: str, seen: Seen = "died") -> None:
        super().__init__(what)
        self.seen = seen


class Workers:
    """Reads orders with worker processes until one of them fails, then without them.

    One instance serves a whole run, so workers that failed are not tried again.

    Args:
        source: the dataset that the workers read.
        runtime: number of workers, their timeout, and whether they are kept between two iterators.
        context: receives a notice per failure, and the change "workers-0" once.
    """

    def __init__(self, source: SharedDataset, runtime: RuntimeSection, context: RunContext = NOBODY) -> None:
        self.source, self._runtime, self._context = source, runtime, context
        self.count = runtime.workers_on(sys.platform)
        self._idle: list[WorkerPool] = []
        self._busy: list[WorkerPool] = []

    def reads(self, orders: Orders) -> Iterator[Result]:
        """The results in the order of ``orders``, independent of the number of workers and of their failures."""
        given = 0
        if self.count:
            group = self._idle.pop() if self._idle else WorkerPool(self.source, self.count, self._runtime)
            self._busy.append(group)
            try:
                for result in group.reads(orders):
                    given += 1
                    yield result
                return
            except WorkersFailed as failure:
                self._give_up(failure)
            finally:
                self._give_back(group)
        yield from one_ahead(data_loader(self.source, orders.after(given)))

    def close(self) -> None:
        """End all worker processes."""
        while self._idle or self._busy:
            (self._idle or self._busy).pop().close()

    def _give_back(self, group: WorkerPool) -> None:
        """Keep the workers for the next iterator if the recipe asks for it and no worker has failed."""
        if group not in self._busy:  # closed
            return
        self._busy.remove(group)
        if self._runtime.persistent_workers and self.count:
            self._idle.append(group)
        else:
            group.close()

    def _give_up(self, failure: WorkersFailed) -> None:
        """Read without workers from now on, and report it."""
        had, self.count = self.count, 0
        while self._idle:
            self._idle.pop().close()
        self._context.notice(f"A loader worker failed: {failure}; going on without workers. No sample is lost.")
        if had:  # only once: two iterators may be active, and both may fail
            self._context.emit(change_event("workers-0", failure.seen))


class WorkerPool:
    """A group of worker processes and the thread that serves them."""

    def __init__(self, source: SharedDataset, size: int, runtime: RuntimeSection) -> None:
        self._size, self._timeout_s = size, runtime.worker_timeout_s
        self._given = 0
        self._closed = False
        self._processes: list[BaseProcess] = []
        self._asked: queue.SimpleQueue[Orders | str] = queue.SimpleQueue()
        self._told: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        given = _OrderSampler()
        loader = data_loader(source, given, size, max(self._timeout_s, START_S), runtime.persistent_workers)
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
        starting = self._given < self._size  # workers take turns, so the first batches include each worker's first
        limit_s = max(self._timeout_s, START_S) if starting else self._timeout_s
        deadline = time.monotonic() + limit_s
        while True:
            try:
                said, value = self._told.get(timeout=POLL_S)
            except queue.Empty:
                self._check_alive()
                if time.monotonic() > deadline:
                    raise WorkersFailed(f"no batch came within {limit_s:g} s", "loader-hang") from None
                continue
            if said == "failed":
                self._wait_for_the_dead()
                raise WorkersFailed(value, "loader-hang" if WAITED in value else "died")
            return said, value

    def _wait_for_the_dead(self) -> None:
        """Wait for exit codes: a process's connection breaks and its sentinel fires slightly before its exit code."""
        deadline = time.monotonic() + END_S
        sentinels = [process.sentinel for process in self._processes]
        while time.monotonic() < deadline and wait(sentinels, deadline - time.monotonic()):
            self._check_alive()
            time.sleep(0.01)

    def _check_alive(self) -> None:
        """Raise WorkersFailed if a process has a non-zero exit code; workers without work left exit with 0."""
        for process in self._processes:
            if process.exitcode:
                raise WorkersFailed(f"process {process.pid} ended ({describe_exit(process.exitcode)})")

    def _serve(self, loader: DataLoader[Any], given: _OrderSampler) -> None:
        """The thread's loop: answers requests until "close". Only this thread uses the iterator."""
        batches: Iterator[bytes] = iter(())
        while (asked := self._asked.get()) != "close":
            try:
                if isinstance(asked, Orders):
                    given.orders = asked
                    batches = self._opened(loader)
                    self._told.put(("open", None))
                else:
                    packed = next(batches, None)
                    self._told.put(("end", None) if packed is None else ("read", unpacked(packed)))
            except Exception as error:  # the edge of a thread: ``_ask`` raises it again in the caller's thread
                self._told.put(("failed", _reason(error)))

    def _opened(self, loader: DataLoader[Any]) -> Iterator[bytes]:
        """A new iterator of the loader; records the processes that it starts."""
        before = set(multiprocessing.active_children())
        try:
            return iter(loader)
        finally:
            self._processes += [child for child in multiprocessing.active_children() if child not in before]
            if self._closed:  # closed while the workers started
                self._kill()


class _OrderSampler:
    """A sampler over the current orders. A DataLoader with persistent workers iterates it once per iterator."""

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
    source: SharedDataset,
    orders: Orders | _OrderSampler,
    workers: int = 0,
    timeout_s: float = 0.0,
    persistent: bool = False,
) -> DataLoader[Any]:
    """A DataLoader over the orders. Workers are spawned, never forked, and have a timeout."""
    with_workers: dict[str, Any] = {}  # DataLoader rejects these options without workers
    if workers:
        with_workers = {
            "multiprocessing_context": "spawn",
            "timeout": timeout_s,
            "worker_init_fn": _start_worker,
            "persistent_workers": persistent,
        }
    return DataLoader(
        source,  # type: ignore[arg-type]  # it needs no length: the sampler knows the order
        batch_size=None,
        sampler=orders,
        num_workers=workers,
        collate_fn=hand_over,  # type: ignore[arg-type]  # with batch_size=None it passes on one item at a time
        generator=torch.Generator().manual_seed(0),  # otherwise it would advance the global generator
        **with_workers,
    )


def _start_worker(worker_id: int) -> None:
    torch.set_num_threads(1)  # the workers share the cores


def hand_over(result: Result) -> Result | bytes:
    """In a worker: the result as bytes, which need neither shared memory nor file descriptors of the main process.

    Raises:
        ValueError: a tensor is not in main memory; HIP cannot send it to another process.
    """
    for name, tensor in result.tensors.items() if isinstance(result, Read) else ():
        if tensor.device.type != "cpu":
            raise ValueError(f"{name} is on {tensor.device}; only CPU tensors may leave a loader worker")
    if get_worker_info() is None:
        return result
    torch.save(result, packed := io.BytesIO())
    return packed.getvalue()


def unpacked(packed: bytes) -> Result:
    """The result that our own worker sent: ``Read``, ``BadEntry`` or ``Unequal``."""
    result: Result = torch.load(io.BytesIO(packed), weights_only=False)
    return result


def _reason(error: Exception) -> str:
    """The last non-empty line of the message: for a worker's exception, that is its own message below the traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = lines[-1].rstrip(".") if lines else ""
    return last if last.partition(":")[0].isidentifier() and ":" in last else f"{type(error).__name__}: {last}"
