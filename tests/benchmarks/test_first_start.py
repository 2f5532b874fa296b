"""The phases and the first loss that ``benchmarks.first_start`` reads."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.first_start import LOSS, described


def phase(name: str, state: str, time: float, seconds: float = 0.0) -> dict[str, Any]:
    return {"type": "phase", "phase": name, "state": state, "time": time, "seconds": seconds}


EVENTS = [
    phase("command", "end", 103.0, 1.0),
    phase("imports", "end", 103.0, 2.0),
    phase("cache", "begin", 103.5),
    phase("preview", "begin", 104.0),
    phase("preview", "end", 104.5),
    phase("weights", "end", 104.6, 0.25),
    phase("weights", "end", 104.7, 0.5),
    phase("cache", "end", 105.0),
    phase("step", "begin", 105.0),
    {"type": "step", "time": 107.0},
    {"type": "step", "time": 109.0},
]


def test_phases_sum_up_to_the_first_step_and_the_rest_is_outside() -> None:
    row = described(EVENTS, began=100.0)
    assert row["phases"] == {"command": 1.0, "imports": 2.0, "cache": 1.5, "first step": 2.0}
    assert (row["first_step_s"], row["outside_s"], row["parts"]) == (7.0, 0.5, {"weights": 0.75})
    without = described([event for event in EVENTS if event.get("phase") != "cache"], began=100.0)
    assert without["outside_s"] > row["outside_s"]


@pytest.mark.parametrize(
    ("line", "is_loss"),
    [
        (b"Steps:  25%|##5 | 1/4 [00:01<00:03, loss=0.41, lr=0.0001]", True),
        (b"{'loss': '2.31', 'grad_norm': '0.5'}", True),
        (b"{'loss': 2.31}", True),
        (b"`loss_type=None` was set in the config but it is unrecognised.", False),
        (b"Steps:   0%|    | 0/4 [00:00<?, ?it/s]", False),
    ],
)
def test_a_first_loss_is_seen(line: bytes, is_loss: bool) -> None:
    assert bool(LOSS.search(line)) is is_loss
