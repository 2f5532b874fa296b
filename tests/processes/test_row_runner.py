"""Children that measure row by row: one that hangs or crashes is ended, and the others' rows are kept."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.errors import StoppedError, UserError, WorkerDiedError
from lora_rocm.processes import row_runner
from lora_rocm.processes.jobs import TuneProductsJob
from lora_rocm.processes.row_runner import run_rows
from tests.golden import HOSTS
from tests.wording import saying, worded

CHILD = "tests.supervisor.fake_trials"
DONE = {"seconds": 0.5}


class Runner:
    """Runs the fake child with the outcomes of its rows; the results are in ``rows``."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "starts.jsonl"
        self.log.touch()
        self.rows: list[dict[str, Any]] = []

    def __call__(self, outcomes: list[Any], **more: Any) -> list[dict[str, Any]]:
        named = [({"name": str(number)}, outcome) for number, outcome in enumerate(outcomes)]
        variables = {"FAKE_ROWS": json.dumps(named), "FAKE_LOG": str(self.log)}
        env = {**os.environ, "PYTHONPATH": str(HOSTS.parents[1]), **variables}
        run_rows(TuneProductsJob(recipe={}, limit_s=0.2), env, self.rows.append, module=CHILD, **more)
        return self.rows

    @property
    def starts(self) -> list[int]:
        return [json.loads(line)["start"] for line in self.log.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr(row_runner, "GRACE_S", 0.1)
    return Runner(tmp_path)


def test_a_row_that_crashes_and_one_that_hangs_are_ended_and_the_others_kept(run: Runner) -> None:
    found = run([DONE, "crash", DONE, "hang", DONE])
    assert [row["name"] for row in found] == ["0", "1", "2", "3", "4"]
    assert "SIGABRT" in found[1]["problem"] or "exit code" in found[1]["problem"]
    assert found[3]["problem"] == worded("processes/did-not-end-in-0-2-s")
    assert [row["problem"] for row in (found[0], found[2], found[4])] == [None] * 3
    assert run.starts == [0, 2, 4]


def test_healthy_rows_take_one_child(run: Runner) -> None:
    assert len(run([DONE, DONE])) == 2 and run.starts == [0]


def test_after_many_deaths_it_is_given_up_and_what_came_is_kept(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_runner, "MAX_DEATHS", 2)
    with pytest.raises(WorkerDiedError):
        run([DONE, "crash", "crash", DONE])
    assert [row["problem"] is None for row in run.rows] == [True, False]


@pytest.mark.parametrize(("outcome", "error"), [("early", WorkerDiedError), ("error", UserError)])
def test_a_child_that_cannot_begin_is_an_error(run: Runner, outcome: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        run([outcome])


def test_a_child_whose_rows_are_no_longer_wanted_is_ended(run: Runner) -> None:
    def require_wanted() -> None:
        if run.rows:
            raise StoppedError("cancelled", "Cancelled.")

    with pytest.raises(StoppedError):
        run([DONE, "hang"], require_wanted=require_wanted)
    assert len(run.rows) == 1 and run.starts == [0]


def test_a_child_that_does_not_begin_in_time_is_ended(run: Runner) -> None:
    with pytest.raises(WorkerDiedError, check=saying("processes/did-not-answer")):
        run([DONE], start_limit_s=0.0)
