"""What went wrong, from the supervisor and from all ranks."""

from __future__ import annotations

from typing import Any

from lora_rocm.run.trouble import in_time


def halved(*sessions: int, at_s: float = 0.0) -> list[dict[str, Any]]:
    return [{"type": "change", "id": "micro-batch-halved", "session": number, "time": at_s} for number in sessions]


def test_what_several_ranks_did_at_one_start_was_done_once() -> None:
    assert len(in_time([], [halved(1), halved(1)])) == len(in_time([], [[], halved(1)])) == 1
    assert len(in_time([], [halved(1, 1), halved(1)])) == len(in_time([], [halved(1), halved(1, 1)])) == 2
    assert len(in_time([], [halved(1), halved(2)])) == 2
    assert len(in_time(halved(1), [halved(1)])) == 2, "the supervisor's own come on top"


def test_all_is_in_the_order_of_time() -> None:
    restart = {"type": "restart", "session": 1, "time": 5.0}
    other = {"type": "step", "session": 1, "time": 6.0}
    found = in_time([restart], [halved(2, at_s=7.0), [*halved(1, at_s=3.0), other]])
    assert [event["time"] for event in found] == [3.0, 5.0, 7.0]
