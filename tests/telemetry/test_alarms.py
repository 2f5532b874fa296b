"""Warnings: once per incident, and never for usual values."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from lora_rocm.rundir.event_types import AlarmEvent
from lora_rocm.telemetry.alarms import HOT_MARGIN_C, MAX_EACH, STEADY, Alarms
from lora_rocm.telemetry.reader import reading
from tests.telemetry.trees import GIB, read_as
from tests.wording import says

FULL = 15.9 * GIB


def told(alarms: Alarms, count: int = STEADY, **values: Any) -> list[AlarmEvent]:
    return [alarm for _ in range(count) for alarm in alarms.on_reading(read_as(**values))]


def trained(spills: Literal["moved", "shared", ""], **before: Any) -> Alarms:
    """Alarms of a run after its first step."""
    alarms = Alarms(spills)
    alarms.on_start()
    assert told(alarms, **before) == []
    alarms.on_step()
    return alarms


def kinds(found: list[AlarmEvent]) -> list[str]:
    return [alarm.kind for alarm in found]


# heat


def at(junction_c: float) -> dict[str, Any]:
    return {"temperatures_c": {"edge": 70.0, "junction": junction_c}}


def test_a_hot_card_is_named_once_an_incident() -> None:
    alarms = trained("moved")
    assert kinds(told(alarms, 100, **at(109.0))) == ["hot"]
    assert told(alarms, 2, **at(80.0)) == [] and told(alarms, **at(109.0)) == [], "not yet over"
    assert told(alarms, **at(80.0)) == [] and kinds(told(alarms, **at(110.0))) == ["hot"]


def test_a_hot_card_is_called_hot_and_not_more() -> None:
    (alarm,) = told(trained("moved"), **at(108.0))
    assert "junction" in alarm.text and "108" in alarm.text and "110" in alarm.text
    assert "has lowered" not in alarm.text and "throttl" not in alarm.text


@pytest.mark.parametrize(
    "values",
    [
        at(110.0 - HOT_MARGIN_C - 1),
        {**at(125.0), "limits_c": {}},  # an APU without a limit
        {**at(125.0), "limits_c": {"mem": 100.0}},
        {"temperatures_c": {}},
        {"power_w": 220.0},  # at its power limit, which is usual
    ],
)
def test_no_warning_of_a_card_that_is_only_warm(values: dict[str, Any]) -> None:
    assert told(trained("moved"), 50, **values) == []


def test_a_moment_is_no_incident() -> None:
    alarms = trained("moved")
    for _ in range(20):
        assert told(alarms, STEADY - 1, **at(110.0)) == [] and told(alarms, 1, **at(100.0)) == []


def test_a_card_that_the_driver_slows_down() -> None:
    alarms = trained("")
    (alarm,) = told(alarms, 10, slowed_by=["heat (hardware)"])
    assert alarm.kind == "slowed" and "heat (hardware)" in alarm.text
    assert told(alarms, 10) == [] and kinds(told(alarms, slowed_by=["power brake"])) == ["slowed"]


def test_what_goes_on_and_off_for_ever_is_not_told_for_ever() -> None:
    alarms, found = trained(""), list[AlarmEvent]()
    for _ in range(3 * MAX_EACH):
        found += told(alarms, slowed_by=["heat"]) + told(alarms)
    assert len(found) == MAX_EACH and says(found[-1].text, "telemetry/not-said-again")


def test_a_card_that_sleeps_gives_no_warning() -> None:
    alarms = Alarms("moved")
    assert [alarms.on_reading(reading("g", 0, {}, asleep=True)) for _ in range(5)] == [[]] * 5


# memory that spills: Windows


def spilt(**values: Any) -> dict[str, Any]:
    return {"memory_bytes": FULL, "own_main_bytes": 3.25 * GIB, **values}


def test_shared_memory_that_grows_while_the_card_is_full() -> None:
    alarms = trained("shared")
    (alarm,) = told(alarms, 50, **spilt())
    assert alarm.kind == "spilling" and "3.0 GiB" in alarm.text and "17 times" in alarm.text
    assert "train.batch_size" in alarm.text and "runtime.memory" in alarm.text
    assert told(alarms, 10) == [] and kinds(told(alarms, **spilt())) == ["spilling"], "a second incident"


@pytest.mark.parametrize(
    "values",
    [
        spilt(memory_bytes=12.0 * GIB),  # there is room on the card: pinned buffers
        spilt(own_main_bytes=1.0 * GIB),  # it has hardly grown
        spilt(own_main_bytes=None),
        spilt(memory_bytes=None),
        spilt(memory_total_bytes=None),
        {"memory_bytes": FULL},
    ],
)
def test_no_warning_where_pinned_buffers_explain_it_or_it_cannot_be_told(values: dict[str, Any]) -> None:
    assert told(trained("shared"), 50, **values) == []


def test_weights_that_wait_in_pinned_memory_are_no_spill() -> None:
    """Offloaded blocks are pinned before the first step, and the card is full by design."""
    before = {"memory_bytes": FULL, "own_main_bytes": 11.0 * GIB}
    assert told(trained("shared", **before), 50, **before) == []
    assert kinds(told(trained("shared", **before), **spilt(own_main_bytes=13.0 * GIB))) == ["spilling"]


def test_a_machine_that_works_in_shared_memory_gives_no_warning() -> None:
    assert told(trained(""), 50, **spilt()) == []


def test_before_training_and_in_a_new_worker_nothing_counts() -> None:
    alarms = Alarms("shared")
    assert told(alarms, 50, **spilt()) == [], "encoders fill the card"
    alarms = trained("shared")
    assert len(told(alarms, **spilt())) == 1
    alarms.on_start()
    assert told(alarms, 20, **spilt()) == []
    alarms.on_step()
    assert told(alarms, 20, **spilt()) == [], "the new worker was so large before its first step"


# memory that spills: Linux


def test_what_the_driver_moved_is_a_spill_also_from_the_first_step_on() -> None:
    alarms = trained("moved", moved_bytes=0.0)
    (alarm,) = told(alarms, 20, moved_bytes=2.0 * GIB)
    assert alarm.kind == "spilling" and "2.0 GiB" in alarm.text


@pytest.mark.parametrize("values", [{"moved_bytes": 8.0 * (1 << 20)}, spilt(moved_bytes=0.0)])
def test_a_little_that_was_moved_and_pinned_memory_alone_are_none(values: dict[str, Any]) -> None:
    assert told(trained("moved"), 50, **values) == []


def test_an_old_kernel_that_does_not_count_it_is_judged_by_growth() -> None:
    assert kinds(told(trained("moved"), **spilt())) == ["spilling"]
