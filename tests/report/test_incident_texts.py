"""Texts of incidents, from the supervisor and from all ranks."""

from __future__ import annotations

from typing import Any

from lora_rocm.rundir.incidents import in_time
from tests.supervisor.fake_run import change_fields, heard, restart_fields, step_fields


def halved(*sessions: int, at_s: float = 0.0) -> list[dict[str, Any]]:
    fields = change_fields(id="micro-batch-halved")
    return [heard({"type": "change", "session": number, "time": at_s, **fields}) for number in sessions]


def test_what_several_ranks_did_at_one_start_was_done_once() -> None:
    assert len(in_time([], [halved(1), halved(1)])) == len(in_time([], [[], halved(1)])) == 1
    assert len(in_time([], [halved(1, 1), halved(1)])) == len(in_time([], [halved(1), halved(1, 1)])) == 2
    assert len(in_time([], [halved(1), halved(2)])) == 2
    assert len(in_time(halved(1), [halved(1)])) == 2, "the supervisor's own come on top"


def test_all_is_in_the_order_of_time() -> None:
    restart = heard({"type": "restart", "session": 1, "time": 5.0, **restart_fields()})
    other = heard({"type": "step", "session": 1, "time": 6.0, **step_fields(1)})
    found = in_time([restart], [halved(2, at_s=7.0), [*halved(1, at_s=3.0), other]])
    assert [event.time for event in found] == [3.0, 5.0, 7.0]
