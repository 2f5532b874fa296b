"""Messages to children that train together, and the child with the failure that counts."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.errors import LoraRocmError, MachineError, StoppedError, TransferError, WorkerDiedError
from lora_rocm.hardware.ranks import Rank, rank_of
from lora_rocm.supervisor import worker_group
from lora_rocm.supervisor.worker_group import End, environments, free_port, verdict


def test_one_child_gets_what_was_planned_and_no_more() -> None:
    assert environments({"A": "1"}, 1) == [{"A": "1"}]


def test_several_get_numbers_one_port_and_their_share_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group, "core_count", lambda: 32)
    envs = environments({"A": "1"}, 3)
    assert [rank_of(env) for env in envs] == [Rank(number, 3, number, 3) for number in range(3)]
    assert len({env["MASTER_PORT"] for env in envs}) == 1
    assert all(env["A"] == "1" and env["OMP_NUM_THREADS"] == "10" for env in envs)
    assert {env["OMP_NUM_THREADS"] for env in environments({"OMP_NUM_THREADS": "4"}, 3)} == {"4"}
    monkeypatch.setattr(worker_group, "core_count", lambda: 1)
    assert environments({}, 2)[0]["OMP_NUM_THREADS"] == "1"


def test_the_port_is_free() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", free_port()))


class Ended:
    """A worker that has ended so."""

    def __init__(self, rank: int, how: int | LoraRocmError, ended_in: int = 1, *, given_up: bool = False) -> None:
        self.rank, self.how, self.ended_in, self.given_up = rank, how, ended_in, given_up

    def verdict(self) -> int:
        if isinstance(self.how, LoraRocmError):
            raise self.how
        return self.how


LOST = MachineError("rank-lost", "Another is gone.", where="the sum")
DIED = WorkerDiedError("worker-died", "It ended without a word.")
BAD = TransferError("transfer-failed", "Data arrived changed.", where="iteration 3")


@pytest.mark.parametrize(
    ("workers", "rank", "code"),
    [
        ([Ended(0, LOST, 1), Ended(1, DIED, 2)], 1, "worker-died"),
        ([Ended(0, LOST, 1), Ended(1, BAD, 9)], 1, "transfer-failed"),
        ([Ended(0, DIED, 3), Ended(1, BAD, 2)], 1, "transfer-failed"),
        ([Ended(0, BAD, 2), Ended(1, DIED, 2)], 1, "worker-died"),
        ([Ended(0, LOST, 4), Ended(1, DIED, 4, given_up=True)], 0, "rank-lost"),
        ([Ended(0, 0, 1), Ended(1, BAD, 2)], 1, "transfer-failed"),
    ],
)
def test_the_failure_that_the_others_followed_from(workers: list[Any], rank: int, code: str) -> None:
    found = verdict(workers)
    assert isinstance(found, End) and (found.worker.rank, found.error.code) == (rank, code)
    assert found.error.where.startswith(f"rank {rank}")


def test_one_code_for_all_and_a_stop_is_a_stop() -> None:
    both: list[Any] = [Ended(0, 0), Ended(1, 0)]
    assert verdict(both) == 0
    stopped: list[Any] = [Ended(0, 130), Ended(1, 130)]
    assert verdict(stopped) == 130
    killed: list[Any] = [Ended(0, LOST), Ended(1, StoppedError("killed", "The run was killed."))]
    with pytest.raises(StoppedError):
        verdict(killed)


def test_a_single_worker_is_not_numbered(tmp_path: Path) -> None:
    alone: list[Any] = [Ended(0, TransferError("transfer-failed", "x", where="there"))]
    found = verdict(alone)
    assert isinstance(found, End) and found.error.where == "there"
