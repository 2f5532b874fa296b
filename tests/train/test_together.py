"""The loop on several ranks (threads, each with its own rig): the updates of one, even if something happens to one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lora_rocm.device import process_group as module
from lora_rocm.device.process_group import World
from lora_rocm.device.transfer import METHODS, DeviceTransfer
from lora_rocm.errors import MachineError, TransferError
from lora_rocm.loader.batch import Batch
from lora_rocm.memory import oom_recovery
from tests.memory.test_oom_recovery import FullAt
from tests.train.test_loop import EFFECTIVE_BATCH, Corruptor, Rig, batches, same
from tests.wording import says
from tests.worlds import Spoil, in_threads

STEPS = 6
CLOSE = {"rtol": 1e-5, "atol": 1e-7}


def sliced(
    open_batches: Callable[[int], Iterator[Batch]], size: int, rank: int, accumulation: int = 1
) -> Callable[[int], Iterator[Batch]]:
    """The micro-batches of one rank, ``accumulation`` per update."""
    return lambda first: (
        replace(batch, is_last=batch.micro // size + 1 == accumulation)
        for batch in open_batches(first)
        if batch.micro % size == rank
    )


class Ranks:
    """As many rigs as ranks, which train together."""

    def __init__(
        self, size: int, accumulation: int = 1, *, change: dict[int, dict[str, Any]] | None = None, **how: Any
    ):
        self.rigs = [
            Rig(accumulation=size * accumulation, **{**how, **(change or {}).get(rank, {})}) for rank in range(size)
        ]
        for rank, rig in enumerate(self.rigs):
            value = how.get("value", float("nan"))
            whole = batches(size * accumulation, how.get("poison"), value)
            rig.trainer.open_batches = sliced(whole, size, rank, accumulation)

    def fit(self, steps: int = STEPS, spoil: Spoil = lambda rank, number, flat_N: None) -> list[Any]:
        def work(world: World) -> bool:
            rig = self.rigs[world.me.rank]
            rig.trainer.world = world
            return rig.fit(steps).finished

        return in_threads(len(self.rigs), work, spoil)

    def incidents(self) -> list[list[str]]:
        return [[event["kind"] for event in rig.of_type("incident")] for rig in self.rigs]

    @property
    def agree(self) -> bool:
        """All hold the same bytes and are at the same place."""
        first, *others = self.rigs
        return all(same(first, other) and first.trainer.position == other.trainer.position for other in others)


def close(left: Rig, right: Rig) -> bool:
    mine, theirs = left.weights(), right.weights()
    return all(torch.allclose(mine[name], theirs[name], **CLOSE) for name in mine)  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize(("size", "accumulation"), [(2, 1), (4, 1), (2, 2)])
def test_the_updates_are_those_of_one_rank(size: int, accumulation: int, scale: bool) -> None:
    one, ranks = Rig(scale=scale).fit(STEPS), Ranks(size, accumulation, scale=scale)
    assert ranks.fit() == [True] * size
    assert ranks.agree and close(ranks.rigs[0], one)
    for mine, theirs in zip(ranks.rigs[-1].of_type("step"), one.of_type("step"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)


def test_without_the_sum_they_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "_reduce", lambda self, flat_N: None)
    monkeypatch.setattr(module, "TOLERANCE", 1e9)
    monkeypatch.setattr(World, "sum_", lambda self, flat_N, votes_K, stamp: module.Summed(torch.zeros(()), votes_K))
    ranks = Ranks(2)
    ranks.fit()
    assert not ranks.agree and not close(ranks.rigs[0], Rig().fit(STEPS))


def test_a_batch_that_arrives_changed_on_one_rank_is_made_again_by_all() -> None:
    clean = Ranks(2)
    clean.fit()
    ranks = Ranks(2, change={1: {"copy": Corruptor({2}, ("unpinned",))}})
    assert ranks.fit() == [True, True]
    assert ranks.incidents() == [[], ["transfer"]] and ranks.agree and same(ranks.rigs[0], clean.rigs[0])
    assert [rig.trainer.transfer.failures for rig in ranks.rigs] == [0, 1]


def test_without_the_guard_the_same_fault_reaches_all(monkeypatch: pytest.MonkeyPatch) -> None:
    clean = Ranks(2)
    clean.fit()
    monkeypatch.setattr(DeviceTransfer, "compare", lambda *args: None)
    ranks = Ranks(2, change={1: {"copy": Corruptor({2}, ("unpinned",))}})
    ranks.fit()
    assert ranks.agree and not same(ranks.rigs[0], clean.rigs[0])


def test_one_that_ends_takes_the_others_with_it() -> None:
    ranks = Ranks(2, change={1: {"copy": Corruptor(set(range(3, 99)), METHODS)}})
    lost, guilty = ranks.fit()
    assert isinstance(guilty, TransferError) and isinstance(lost, MachineError) and lost.code == "rank-lost"
    assert ranks.rigs[0].trainer.position.updates == 1


@pytest.mark.parametrize("at", [3, 40])
def test_memory_that_runs_out_on_one_rank_costs_no_sample(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oom_recovery, "empty_pools", lambda: None)
    clean, ranks, mode = Ranks(2), Ranks(2), FullAt(at)
    clean.fit()
    trainer = ranks.rigs[1].trainer
    work_of = trainer._work

    def work(waiting: Iterator[Batch]) -> Any:
        with mode:
            mode.counting = True
            found = work_of(waiting)
            mode.counting = False
        return found

    trainer._work = work  # type: ignore[method-assign]
    assert ranks.fit() == [True, True]
    assert ranks.incidents() == [[], ["out-of-memory"]] and ranks.agree
    assert close(ranks.rigs[0], clean.rigs[0])
    assert [rig.trainer.relief.parts for rig in ranks.rigs] == [1, 2]
    assert [len(rig.of_type("step")) for rig in ranks.rigs] == [STEPS, STEPS]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_that_one_hears_stops_all_at_the_same_place(rank: int) -> None:
    whole = Ranks(2)
    whole.fit()
    ranks = Ranks(2, change={rank: {"stop_after": 3}})
    assert ranks.fit() == [False, False]
    assert ranks.agree and ranks.rigs[0].trainer.position.updates == 3
    for rig in ranks.rigs:
        rig.trainer.context = replace(rig.trainer.context, should_stop=lambda: False)
        rig.trainer._stopping = False
    assert ranks.fit() == [True, True] and same(ranks.rigs[0], whole.rigs[0])


@pytest.mark.parametrize("scale", [False, True])
def test_a_sample_that_is_not_finite_on_one_rank_is_skipped_by_all(scale: bool) -> None:
    """The second image of the batch is the first rank's: only it can name it, but both know that it is the data."""
    ranks = Ranks(2, poison=3, scale=scale)
    assert ranks.fit() == [True, True]
    assert ranks.incidents() == [["nonfinite"], ["nonfinite"]] and ranks.agree
    named, other = (rig.of_type("incident")[0] for rig in ranks.rigs)
    assert named["samples"] == ["image-3-1"] and says(other["detail"], "train/on-another-gpu")
    assert EFFECTIVE_BATCH // 2 == len(other["samples"])


def halved(times: int) -> Spoil:
    """The sums of some updates arrive wrong at rank 0; each update has two."""

    def spoil(rank: int, number: int, flat_N: Tensor) -> None:
        if rank == 0 and 5 <= number < 5 + 2 * times and number % 2 == 1:
            flat_N[: len(flat_N) // 2] = 0.0

    return spoil


def test_a_wrong_sum_is_no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    clean, ranks = Ranks(2), Ranks(2)
    clean.fit()
    assert ranks.fit(spoil=halved(2)) == [True, True]
    assert ranks.agree and same(ranks.rigs[0], clean.rigs[0]) and ranks.incidents() == [["transfer"] * 2] * 2
    monkeypatch.setattr(module, "TOLERANCE", 1e9)
    unguarded = Ranks(2)
    unguarded.fit(spoil=halved(2))
    assert not unguarded.agree


def test_sums_that_stay_wrong_end_the_run() -> None:
    ranks = Ranks(2)
    errors = ranks.fit(spoil=halved(9))
    told = [error for error in errors if isinstance(error, TransferError)]
    assert told and all(error.code == "sum-wrong" and "NCCL_P2P_DISABLE" in error.fix for error in told)
    lost = [error for error in errors if error not in told]  # who asks for the next sum after the other has left
    assert all(isinstance(error, MachineError) and error.code == "rank-lost" for error in lost)
    assert [rig.trainer.position.updates for rig in ranks.rigs] == [2, 2]
