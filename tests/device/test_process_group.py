"""Sums and decisions of ranks; each rank is a thread here, but in the last test."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lora_rocm.device import process_group as module
from lora_rocm.device.process_group import World, join
from lora_rocm.errors import MachineError, TransferError, UserError
from lora_rocm.hardware.ranks import Rank
from lora_rocm.supervisor.worker_group import environments, free_port
from tests.wording import worded
from tests.worlds import in_threads

ROOT = Path(__file__).parents[2]
NONE_K = torch.zeros(0)


def summed(flat_N: Tensor, votes_K: Tensor = NONE_K, stamp: int = 5) -> object:
    def work(world: World) -> tuple[Tensor, bool, list[float]]:
        mine_N = flat_N * (world.me.rank + 1)
        found = world.sum_(mine_N, votes_K, stamp + (world.me.rank if stamp < 0 else 0))
        return mine_N, bool(found.wrong), found.votes_K.tolist()

    return work


def test_one_that_is_alone_adds_nothing_and_waits_for_nobody() -> None:
    world, flat_N = World(), torch.ones(3)
    found = world.sum_(flat_N, torch.tensor([2.0]), 0)
    assert flat_N.tolist() == [1.0] * 3 and not found.wrong and found.votes_K.tolist() == [2.0]
    assert world.exchange("x", "mine") == ["mine"] and world.is_first
    world.require_same("x", {"a": "1"})
    world.close()
    assert join(Rank(), torch.device("cpu")).size == 1


@pytest.mark.parametrize("size", [2, 4])
def test_gradients_and_votes_are_added_up(size: int) -> None:
    flat_N = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    for found in in_threads(size, summed(flat_N, torch.tensor([1.0, 0.5]))):  # type: ignore[arg-type]
        total_N, wrong, votes = found  # type: ignore[misc]
        assert torch.allclose(total_N, flat_N * sum(range(1, size + 1)), rtol=1e-5) and not wrong
        assert votes == [size, size * 0.5]


def zeroed(flat_N: Tensor) -> None:
    flat_N[-20:] = 0.0


def stale(flat_N: Tensor) -> None:
    flat_N.copy_(torch.arange(len(flat_N)) * 1e-3)


def unsummed(flat_N: Tensor) -> None:
    flat_N *= 0.5


@pytest.mark.parametrize("fault", [zeroed, stale, unsummed])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_sum_that_is_not_the_sum_is_seen_by_all(fault: object, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the two sums of each update, the first is the gradients' sum."""
    flat_N = torch.randn(1000, generator=torch.Generator().manual_seed(2))

    def spoil(at: int, number: int, arrived_N: Tensor) -> None:
        if at == rank and number == 1:
            fault(arrived_N)  # type: ignore[operator]

    assert [found[1] for found in in_threads(2, summed(flat_N), spoil)] == [True, True]  # type: ignore[arg-type,index]
    monkeypatch.setattr(module, "TOLERANCE", 1e9)
    assert [found[1] for found in in_threads(2, summed(flat_N), spoil)] == [False, False]  # type: ignore[arg-type,index]


def test_an_overflow_is_no_fault_of_the_sum() -> None:
    flat_N = torch.tensor([1.0, float("inf"), float("nan")])
    assert [found[1] for found in in_threads(2, summed(flat_N))] == [False, False]  # type: ignore[arg-type,index]


def test_ranks_at_different_places_do_not_mix_their_gradients() -> None:
    assert [found[1] for found in in_threads(2, summed(torch.ones(4), stamp=-3))] == [True, True]  # type: ignore[arg-type,index]


@pytest.mark.parametrize("stops", [(), (1,), (0, 1, 2)])
@pytest.mark.parametrize("saves", [(), (0,), (1,), (0, 1)])
def test_all_ranks_learn_who_asks_to_stop_and_whether_the_first_asks_to_save(
    stops: tuple[int, ...], saves: tuple[int, ...]
) -> None:
    def work(world: World) -> list[float]:
        zero, losses_B = torch.zeros(()), torch.tensor([1.0, float("nan")])
        asks = {"stop": world.me.rank in stops, "save": world.me.rank in saves}
        agreed = world.reduce_step(torch.ones(4), zero, losses_B[0], losses_B, **asks, stamp=3)
        return [float(each) for each in (agreed.stops, agreed.saves, agreed.guilty, agreed.loss, agreed.blocked)]

    assert in_threads(3, work) == [[len(stops), 0 in saves, 3, 3, 0]] * 3


def test_words_are_exchanged_in_order_and_as_often_as_asked() -> None:
    def work(world: World) -> list[list[str]]:
        return [world.exchange("a", f"{round}é{world.me.rank}") for round in range(3)]

    assert in_threads(3, work) == [[[f"{round}é{rank}" for rank in range(3)] for round in range(3)]] * 3


def test_the_first_acts_before_the_others_go_on() -> None:
    done: list[str] = []

    def work(world: World) -> list[str]:
        world.first("it", lambda: (time.sleep(0.1), done.append("acted"))[1])
        return list(done)

    assert in_threads(3, work) == [["acted"]] * 3


def test_who_waits_says_so_and_not_for_ever() -> None:
    beats: list[str] = []

    def work(world: World) -> None:
        world.beat = beats.append
        if world.is_first:
            world.exchange("never", limit_s=0.1)

    error, _ = in_threads(2, work)
    assert isinstance(error, MachineError) and error.code == "rank-lost" and "0.1 s" in error.where
    assert set(beats) == {"ranks"}


def test_differences_are_named_on_every_rank() -> None:
    def work(world: World) -> None:
        second = world.me.rank == 1
        facts = {"torch": "2.13", "lora.rank": "8" if second else "16"} | ({"only": "here"} if second else {})
        world.require_same("the recipe", facts)

    for error in in_threads(3, work):
        assert isinstance(error, UserError) and error.code == "ranks-differ" and "the recipe" in error.what
        assert error.where == worded("device/lora-rank-rank-0-has-16-rank")
    assert in_threads(2, lambda world: world.require_same("x", {"a": "1"})) == [None, None]


@pytest.mark.parametrize("differ", ["facts", "weights"])
def test_a_rank_that_ends_first_leaves_the_difference_to_the_others(differ: str) -> None:
    """Rank 0 ends while rank 1 is about to look again; the store ends with rank 0."""
    asked, ended = threading.Event(), threading.Event()

    def look_late(activity: str) -> None:
        asked.set()
        if ended.wait(0.3):
            raise RuntimeError("Connection closed by peer")

    def work(world: World) -> None:
        if world.is_first:
            asked.wait()
        else:
            world.beat = look_late
        try:
            if differ == "facts":
                world.require_same("x", {"a": str(world.me.rank)})
            else:
                world.require_in_step(str(world.me.rank), 4)
        finally:
            ended.set()

    errors = in_threads(2, work)
    assert [getattr(error, "code", None) for error in errors] == [
        "ranks-differ" if differ == "facts" else "ranks-parted"
    ] * 2, errors


def test_ranks_with_other_weights_write_nothing() -> None:
    errors = in_threads(3, lambda world: world.require_in_step("7" if world.me.rank < 2 else "8", 4))
    assert all(isinstance(error, TransferError) and "rank 2" in error.where for error in errors)
    assert in_threads(2, lambda world: world.require_in_step("7", 4)) == [None, None]


def test_a_build_without_distributed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    with pytest.raises(MachineError, match="no torch.distributed") as caught:
        join(Rank(0, 2), torch.device("cpu"))
    assert "Windows" in caught.value.fix


def test_errors_of_memory_stay_what_they_are() -> None:
    def full(flat_N: Tensor) -> None:
        raise torch.OutOfMemoryError("HIP out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        World(Rank(0, 2), "gloo", _all_reduce=full).sum_(torch.ones(1), NONE_K, 0)


CHILD = """
import os, sys, torch
from lora_rocm.device.process_group import join
from lora_rocm.errors import LoraRocmError, MachineError
from lora_rocm.hardware.ranks import rank_of
me, (end, port, *devices) = rank_of(os.environ), sys.argv[1:]
if devices:
    try:
        join(me, torch.device(devices[me.rank]), timeout_s=60)
    except LoraRocmError as error:
        print(error.code, error.where)
    os.environ["MASTER_PORT"] = port  # rank 1 may still hold on to the store of the first
world = join(me, torch.device("cpu"), timeout_s=60)
mine = torch.full((4,), float(world.me.rank + 1))
print(world.sum_(mine, torch.ones(1), 1).votes_K.tolist(), mine.tolist(), world.exchange("x", str(world.me.rank)))
if end == "leave":
    world.close()
elif world.me.rank == 1:
    os._exit(9)
else:
    try:
        world.sum_(mine, torch.ones(1), 2)
    except MachineError as error:
        print(error.code)
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.mark.parametrize("end", [pytest.param("leave", marks=pytest.mark.slow), "die"])
def test_real_processes_over_gloo(end: str) -> None:
    """Those that die have tried to join as a GPU and a processor before.

    The backends of these differ, so the refusal comes before they meet. Rank 1 may find rank 0, and its store, gone.
    """
    mixed = [] if end == "leave" else ["cpu", "cuda"]
    envs = environments({**os.environ, "PYTHONPATH": str(ROOT)}, 2)
    command = [sys.executable, "-c", CHILD, end, str(free_port()), *mixed]
    children = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, encoding="utf-8") for env in envs]
    said = [child.communicate(timeout=100)[0].splitlines() for child in children]
    if mixed:  # a PyTorch that is built for GPUs names the backends as well
        refused, _ = (lines.pop(0) for lines in said)
        assert refused.startswith("ranks-differ ") and refused.endswith(
            "runtime.device: rank 0 has cpu, rank 1 has cuda"
        )
    assert [lines[0] for lines in said] == ["[2.0] [3.0, 3.0, 3.0, 3.0] ['0', '1']"] * 2
    assert said[0][1:] == ([] if end == "leave" else ["rank-lost"])
    assert [child.returncode for child in children] == ([0, 0] if end == "leave" else [0, 9])


@pytest.mark.gpu
def test_an_update_of_several_ranks_waits_for_no_gpu() -> None:
    gpu = torch.device("cuda", 0)
    world = World(Rank(0, 2), "nccl", _all_reduce=lambda flat_N: None)
    flat_N, losses_B = torch.ones(1000, device=gpu), torch.ones(2, device=gpu)
    world.reduce_step(
        flat_N, losses_B[0], losses_B[0], losses_B, stop=False, save=False, stamp=2
    )  # makes its table of flags
    torch.cuda.set_sync_debug_mode("error")
    try:
        world.reduce_step(flat_N, losses_B[0], losses_B[0], losses_B, stop=True, save=True, stamp=3)
        with pytest.raises(RuntimeError, match="synchroniz"):  # an assignment copies its number from main memory
            flat_N[0] = 1.0
    finally:
        torch.cuda.set_sync_debug_mode("default")
