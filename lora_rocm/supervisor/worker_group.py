"""The training processes of one start, one per GPU. They are started and ended together, and have one joint result."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lora_rocm.errors import LoraRocmError, RestartCode, StoppedError
from lora_rocm.hardware.ranks import HERE, Rank
from lora_rocm.processes.cores import core_count
from lora_rocm.processes.process import Asked, stop_signals
from lora_rocm.rundir.event_types import Event
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.worker_process import Worker, follow

DIED: RestartCode = "worker-died"
LOST: RestartCode = "rank-lost"
"""Error code of a rank that ends because another one has ended. It is never the cause of a failure."""

OnRankEvent = Callable[[int, Event], None]


@dataclass(frozen=True)
class End:
    """A worker that failed, and its error."""

    worker: Worker
    error: LoraRocmError


def ranks(count: int) -> list[Rank]:
    """Return the ranks of ``count`` processes on one machine."""
    return [Rank(number, count, number, count) for number in range(count)]


def environments(env: Mapping[str, str], count: int) -> list[dict[str, str]]:
    """Return the environment of each worker process.

    If there are several, each also gets its rank and the port of the process group. They share the CPU's cores, because
    threads that outnumber the cores wait for each other.
    """
    if count == 1:
        return [dict(env)]
    port, threads = free_port(), max(core_count() // count, 1)
    return [{"OMP_NUM_THREADS": str(threads), **env, **rank.variables(port)} for rank in ranks(count)]


def free_port() -> int:
    """Return a free port. If another process takes it first, the start fails, and the next start uses another port."""
    with contextlib.closing(socket.socket()) as found:
        found.bind((HERE, 0))
        return int(found.getsockname()[1])


def verdict(workers: Sequence[Worker]) -> int | End:
    """Return the joint result of the workers: their exit code, or the failure that caused the others.

    Raises:
        StoppedError: the workers were killed on the user's request.
    """
    codes: list[int] = []
    ends: list[End] = []
    for worker in workers:
        if worker.given_up:
            continue
        try:
            codes.append(worker.verdict())
        except StoppedError:
            raise
        except LoraRocmError as error:
            ends.append(End(worker, error if len(workers) == 1 else _of_rank(error, worker.rank)))
    if ends:
        return min(ends, key=lambda end: (end.error.code == LOST, end.worker.ended_in, end.error.code != DIED))
    return max(codes)


def _of_rank(error: LoraRocmError, rank: int) -> LoraRocmError:
    """Return the same error, with the rank added to its location."""
    error.where = f"rank {rank}: {error.where}" if error.where else f"rank {rank}"
    return error


def run_workers(
    run_dir: RunDir,
    env: Mapping[str, str],
    size: int,
    on_event: OnRankEvent,
    command: Sequence[str],
    notify: Callable[[str], None],
    asked: Asked | None = None,
) -> int:
    """Run several workers without hang detection until they end, and return their exit code.

    If one fails, all are ended.

    Raises:
        LoraRocmError: the error of a failed worker, as in ``worker_process.Worker.verdict``.
    """
    run_dir.stop.unlink(missing_ok=True)  # writes: removes the link, where there is one
    listening = stop_signals() if asked is None else contextlib.nullcontext(asked)
    with listening as asked, contextlib.ExitStack() as stack:
        envs = environments(env, size)
        workers = [stack.enter_context(Worker(run_dir, own, command, rank)) for rank, own in enumerate(envs)]
        follow(workers, asked, on_event, notify)
        found = verdict(workers)
    if isinstance(found, End):
        raise found.error
    return found
