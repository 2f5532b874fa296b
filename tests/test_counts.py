"""The cost of a training step in counts that do not depend on the machine: no more than is recorded."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from benchmarks.counts import CASES, COMMAND, RECORDED, compared, counted, versions

OFTEN = ("bf16, activations recomputed, two micro-batches",)
HOW = f"If that is meant, record it, in the same commit: {COMMAND}"


@pytest.mark.filterwarnings("default:A step costs less")
@pytest.mark.parametrize(
    "case", [case if case in OFTEN else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_a_step_costs_no_more_than_recorded(tmp_path: Path, case: str) -> None:
    """The other cases are slow: the case with recomputation has all operators of their steps, and casts to bf16 too."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    if recorded["versions"] != versions():
        pytest.skip(f"counted with {recorded['versions']}; other versions have other operators: {versions()}")
    worse, better = compared({case: recorded["counts"][case]}, counted(tmp_path, {case: CASES[case]}))
    if better:
        warnings.warn("\n  ".join(["A step costs less than recorded:", *better, HOW]), stacklevel=1)
    assert not worse, "\n  ".join(["A training step has become dearer:", *worse, HOW])


@pytest.mark.parametrize(
    ("name", "now", "verdict"),
    [
        ("waits", 1, (0, 0)),
        ("waits", 2, (1, 0)),
        ("waits", 0, (0, 1)),
        ("peak_bytes", 2, (1, 0)),
        ("flops", 2, (1, 0)),
        ("flops", 0, (1, 0)),  # fewer is another computation
        ("door_bytes", 0, (1, 0)),  # something is no longer checked
    ],
)
def test_more_is_worse_and_what_should_be_the_same_is(name: str, now: int, verdict: tuple[int, int]) -> None:
    worse, better = compared({"a case": {name: 1}}, {"a case": {name: now}})
    assert (len(worse), len(better)) == verdict
    assert all(f"a case: {name} 1 -> {now}" == line for line in (*worse, *better))


def test_what_is_counted_and_not_recorded_or_the_other_way_is_told() -> None:
    assert compared({"a": {"waits": 1}}, {"b": {"waits": 1}})[0] == [
        "a: waits 1 -> not there",
        "b: waits not there -> 1",
    ]
    assert json.loads(RECORDED.read_text(encoding="utf-8"))["counts"].keys() == CASES.keys() >= set(OFTEN)
