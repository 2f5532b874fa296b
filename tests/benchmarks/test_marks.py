"""Marks around the parts of a step."""

from __future__ import annotations

import time

import pytest
import torch

from benchmarks.training_step.marks import LOSS, SEND, STEP, Marks, replaced, sums


def marks(*names: str) -> list[tuple[str, float]]:
    return [(name, float(at)) for at, name in enumerate(names)]


SENT, LOST = (f"{SEND} begins", f"{SEND} ends"), (f"{LOSS} begins", f"{LOSS} ends")
STEPPED = (f"{STEP} begins", f"{STEP} ends")


def test_parts_of_an_eager_step_with_two_micro_batches() -> None:
    found = sums(marks(*SENT, *LOST, *SENT, *LOST, *STEPPED, *SENT))
    assert found == {"forward": 2.0, "backward": 2.0, "optimizer": 1.0}


def test_parts_of_a_step_that_is_replayed_are_not_told_apart() -> None:
    found = sums(marks(*SENT, *SENT, *STEPPED))
    assert found == {"forward and backward in one graph": 2.0, "optimizer": 1.0}


class Thing:
    def work(self, seconds: float) -> str:
        time.sleep(seconds)
        return "done"


def test_marks_are_put_around_calls_of_one_object_and_taken_away_again() -> None:
    thing, other, found = Thing(), Thing(), Marks(torch.device("cpu"))
    with found.around(thing, "work", LOSS):
        began = time.perf_counter()
        assert thing.work(0.02) == "done"
        ended = time.perf_counter()
        other.work(0.01)
    thing.work(0.0)
    assert set(found.seconds()) == {"forward"} and 0.02 <= found.seconds()["forward"] <= ended - began
    assert not vars(thing)


def test_what_stood_in_an_objects_place_before_stands_there_again() -> None:
    thing = Thing()
    with replaced(thing, "work", lambda seconds: "first"):
        with pytest.raises(ValueError, match="from inside"), replaced(thing, "work", lambda seconds: "second"):
            assert thing.work(0.0) == "second"
            raise ValueError("from inside")
        assert thing.work(0.0) == "first"
    assert thing.work(0.0) == "done"
