"""Summaries of readings, and how many of them a long run has."""

from __future__ import annotations

import json

import pytest

from lora_rocm.telemetry.cards import EVERY_S
from lora_rocm.telemetry.reader import POWER, reading
from lora_rocm.telemetry.thinning import FIRST_GAP_S, LAST_GAP_S, Thinned, summary
from tests.telemetry.trees import GIB, read_as

WEEK_S = 7 * 86400.0


def test_a_summary_keeps_the_highest_and_the_mean() -> None:
    hot = {"edge": 70.0, "junction": 90.0, "mem": 50.0}
    found = summary(
        [
            read_as(power_w=100.0, temperatures_c=hot, own_bytes=14.0 * GIB, slowed_by=["heat"]),
            reading("g", 0, {POWER: "gone"}),
            read_as(power_w=300.0, updates=9),
        ]
    )
    assert found.samples == 3 and found.updates == 9 and found.temperatures_c == hot
    assert found.power_w == pytest.approx(200.0) and found.own_bytes == 14.0 * GIB and found.slowed_by == ["heat"]
    assert found.unread == {POWER: "gone"} and not found.asleep
    assert summary([reading("g", 0, {}, asleep=True)]).asleep


def test_the_first_reading_is_told_at_once_and_none_is_lost() -> None:
    thinned = Thinned()
    told = [found for number in range(20) if (found := thinned.add(read_as(), number * EVERY_S))]
    assert [each.samples for each in told] == [1, 6, 6, 6]
    rest = thinned.rest()
    assert rest is not None and rest.samples == 1 and thinned.rest() is None


def test_a_week_stays_small() -> None:
    thinned, times = Thinned(), list[float]()
    for number in range(int(WEEK_S / EVERY_S)):
        if thinned.add(reading("g", 0, {}), number * EVERY_S):  # as quick as possible: only times matter
            times.append(number * EVERY_S)
    gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    line = len(json.dumps(read_as(unread={POWER: "not offered"}).to_json()))
    assert 1000 < len(times) < 5000 and len(times) * (line + 50) < 4 << 20
    assert min(gaps) == FIRST_GAP_S and max(gaps) <= LAST_GAP_S + EVERY_S
