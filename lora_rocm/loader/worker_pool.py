"""A DataLoader that survives workers that hang, die or raise: it reads the remaining batches in the main process.

Each group of workers has its own thread. The caller waits, with a deadline, only for messages from that thread. So a
worker that stops while it sends a batch, or is killed while it holds a lock, blocks only that thread, never the run.
The thread also avoids torch's signal handler. torch installs it if the main thread iterates over a DataLoader. When a
worker dies, this handler raises an exception at an arbitrary point of the main thread.
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
"""Minimum time limit in seconds for the first batch of a new process, which has to import torch first."""
POLL_S = 0.2
END_S = 1.0  # from a broken connection until the system reports the process's exit code
KILL_WAIT_S = 5.0  # a process stuck inside a driver cannot be killed; it is abandoned
WAITED = "DataLoader timed out"
"""Part of torch's error message if torch's time limit ends before the limit of this module."""

Result = Read | BadEntry | Unequal


class SharedDataset(Protocol):
    """A map-style dataset that can be sent to worker processes."""

    def __getitem__(self, order: Order, /) -> Result: ...


class WorkersFailed(Exception):
    """A worker hung, died or raised. The message describes the fault.

    Args:
        what: the message.
        seen: the symptom to look up in the table of mitigations. "died" also includes a worker that raised.
    """

    def __init__(self, what: str, seen: Seen = "died") -> None:
        super().__init__(what)
        self.seen = seen


class LoaderWorkers:
    """Reads orders with worker processes until one of them fails, and then in the main process.

    A run has one instance, so it never tries failed workers again.

    Args:
        source: the dataset that the workers read.
        runtime: the recipe's section with the number of workers and their time limit. It also sets whether workers are
            reused by the next iterator.
        context: receives a notice per failure, and once the event of the mitigation "workers-0".
    """

    def __init__(self, source: SharedDataset, runtime: RuntimeSection, context: RunContext = NOBODY) -> None:
        self.source, self._runtime, self._context = source, runtime, context
        self.count = runtime.workers_on(sys.platform)
        self._idle: list[WorkerPool] = []
        self._busy: list[WorkerPool] = []

    def reads(self, orders: Orders) -> Iterator[Result]:
        """Yield the results in the order of ``orders``, for any number of workers and even if workers fail."""
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
        """Keep the workers for the next iterator if the recipe requests it and none has failed. Else, close them."""
        if group not in self._busy:  # closed
            return
        self._busy.remove(group)
        if self._runtime.persistent_workers and self.count:
            self._idle.append(group)
        else:
            group.close()

    def _give_up(self, failure: WorkersFailed) -> None:
        """Stop using workers from now on, and report the failure."""
        had, self.count = self.count, 0
        while self._idle:
            self._idle.pop().close()
        self._context.notice(
            f"A loader worker failed: {failure}. The run continues without workers, and no sample is lost."
        )
        if had:  # only once: two iterators may be active, and both may fail
            self._context.emit(change_event("workers-0", failure.seen))


class WorkerPool:
    """A group of worker processes, and the thread that communicates with them."""

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
        """Yield the results of the workers in order.

        Raises:
            WorkersFailed: a worker hung, died or raised.
        """
        self._ask(orders)
        while (said := self._ask("next"))[0] == "read":
            self._given += 1
            yield said[1]

    def close(self) -> None:
        """Kill the workers. They have no state that could be lost."""
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
        """Send a request to the thread and return its answer.

        Args:
            what: the orders to read next, or the word "next" to request a result.

        Returns:
            The kind of answer ("open", "read" or "end"), and the result if it is "read".

        Raises:
            WorkersFailed: a worker failed, or there was no answer within the time limit.
        """
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
        """Wait for the exit code of a dead process, and raise WorkersFailed with it.

        When a process dies, its connection breaks and its sentinel is set slightly before its exit code is known. If no
        exit code appears in time, the method returns.
        """
        deadline = time.monotonic() + END_S
        sentinels = [process.sentinel for process in self._processes]
        while time.monotonic() < deadline and wait(sentinels, deadline - time.monotonic()):
            self._check_alive()
            time.sleep(0.01)

    def _check_alive(self) -> None:
        """Raise WorkersFailed if a process has a non-zero exit code. Workers that have no work left exit with 0."""
        for process in self._processes:
            if process.exitcode:
                raise WorkersFailed(f"process {process.pid} ended ({describe_exit(process.exitcode)})")

    def _serve(self, loader: DataLoader[Any], given: _OrderSampler) -> None:
        """Answer requests until "close" is received. Runs in the thread, which alone uses the iterator.

        Args:
            loader: the DataLoader with the worker processes.
            given: the loader's sampler, which receives the requested orders.
        """
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
            except Exception as error:  # edge: ``_ask`` raises it again in the caller's thread
                self._told.put(("failed", _reason(error)))

    def _opened(self, loader: DataLoader[Any]) -> Iterator[bytes]:
        """Return a new iterator of the loader, and record the processes that it starts."""
        before = set(multiprocessing.active_children())
        try:
            return iter(loader)
        finally:
            self._processes += [child for child in multiprocessing.active_children() if child not in before]
            if self._closed:  # closed while the workers started
                self._kill()


class _OrderSampler:
    """A sampler that yields the current orders, which can be replaced before each new iterator.

    A DataLoader with persistent workers keeps its sampler and iterates over it once per iterator.
    """

    orders: Orders

    def __iter__(self) -> Iterator[Order]:
        return iter(self.orders)


def one_ahead(results: Iterable[Result]) -> Iterator[Result]:
    """Yield the results unchanged. A thread reads the next result while the caller uses the current one.

    So the host reads during a GPU step. If it read after the step, the GPU would be idle.
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
    """Return a DataLoader that reads the orders. Its workers are spawned, never forked, and have a time limit."""
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
    """Convert a result to bytes if this is a worker process; else return it unchanged.

    Sending bytes needs neither shared memory nor file descriptors of the main process.

    Raises:
        ValueError: a tensor is not in main memory. HIP cannot send it to another process.
    """
    for name, tensor in result.tensors.items() if isinstance(result, Read) else ():
        if tensor.device.type != "cpu":
            raise ValueError(f"{name} is on {tensor.device}; only CPU tensors may leave a loader worker")
    if get_worker_info() is None:
        return result
    torch.save(result, packed := io.BytesIO())
    return packed.getvalue()


def unpacked(packed: bytes) -> Result:
    """Return the result from the bytes that one of our own workers sent."""
    result: Result = torch.load(io.BytesIO(packed), weights_only=False)
    return result


def _reason(error: Exception) -> str:
    """Return the reason for an error as one line: the last non-empty line of its message.

    If a worker raised, the message contains a traceback, and the worker's own message is its last line.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = lines[-1].rstrip(".") if lines else ""
    return last if last.partition(":")[0].isidentifier() and ":" in last else f"{type(error).__name__}: {last}"
