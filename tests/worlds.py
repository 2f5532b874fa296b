"""Several ranks in one process: a thread each, sums by hand, words through a store in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import HashStore

from lora_rocm.device.process_group import World
from lora_rocm.hardware.ranks import Rank

Result = TypeVar("Result")
Spoil = Callable[[int, int, Tensor], None]
WAIT_S = 60.0


class Sum:
    """An all-reduce over threads. ``spoil`` (rank, number of the sum, result) may change what arrives at a rank."""

    def __init__(self, size: int, spoil: Spoil = lambda rank, number, flat_N: None) -> None:
        self.barrier, self.parts, self.spoil = threading.Barrier(size, timeout=WAIT_S), dict[int, Tensor](), spoil
        self.calls = [0] * size

    def of_rank(self, rank: int) -> Callable[[Tensor], None]:
        def all_reduce(flat_N: Tensor) -> None:
            self.parts[rank] = flat_N.clone()
            try:
                self.barrier.wait()
                total_N = torch.stack([self.parts[other] for other in sorted(self.parts)]).sum(dim=0)
                self.barrier.wait()
            except threading.BrokenBarrierError:
                raise RuntimeError("Connection closed by peer") from None
            flat_N.copy_(total_N)
            self.calls[rank] += 1
            self.spoil(rank, self.calls[rank], flat_N)

        return all_reduce


def in_threads(
    size: int, work: Callable[[World], Result], spoil: Spoil = lambda rank, number, flat_N: None
) -> list[Result | Exception]:
    """Run ``work`` on every rank of a world; its result per rank, or the exception. One that fails is gone for all."""
    store, total = HashStore(), Sum(size, spoil)

    def run(rank: int) -> Result | Exception:
        world = World(Rank(rank, size, rank, size), "gloo", _store=store, _all_reduce=total.of_rank(rank))
        try:
            return work(world)
        except Exception as error:
            total.barrier.abort()
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
