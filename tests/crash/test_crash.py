"""A run cut at any call that changes a file resumes to the bytes of the undisturbed one; a failing disk ends it well.

Here with a stride; benchmarks/reliability.py crashes and disk go through every call.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash import lab, series
from tests.crash.lab import ERRORS, EXIT, FAIL_FROM, HALF, VARIANTS, Lab
from tests.crash.series import Found, Straight

pytestmark = [
    pytest.mark.skipif(bool(lab.why_not()), reason=lab.why_not() or "it can be done"),
    pytest.mark.timeout(600),
]
PLAIN = next(iter(VARIANTS))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    made = Lab(tmp_path_factory.mktemp("Läufe und Schnitte")).started()
    yield made
    made.close()


@pytest.fixture(scope="module")
def straight(place: Lab) -> Straight:
    return series.undisturbed(place, PLAIN)


def wrong(found: Iterator[Found]) -> list[Found]:
    return [one for one in found if one.wrong]


def spread(straight: Straight, count: int, seed: int) -> list[int]:
    """So many calls, at random."""
    return sorted(random.Random(seed).sample(range(1, len(straight.calls) + 1), count))


def test_cuts_anywhere_and_the_same_bytes(place: Lab, straight: Straight) -> None:
    """A power cut is an exit that also loses what was not flushed."""
    assert wrong(series.exits(place, PLAIN, straight, HALF, spread(straight, 1, 2))) == []
    assert wrong(series.power_cuts(place, PLAIN, straight, spread(straight, 1, 3))) == []


@pytest.mark.slow
def test_exits_anywhere(place: Lab, straight: Straight) -> None:
    assert wrong(series.exits(place, PLAIN, straight, EXIT, spread(straight, 3, 1))) == []


@pytest.mark.slow
def test_cut_again_and_again(place: Lab, straight: Straight) -> None:
    assert wrong(series.chains(place, PLAIN, straight, 1, random.Random(5))) == []


def test_what_is_wrong_on_purpose_is_found(place: Lab, straight: Straight) -> None:
    """Negative control of the tests above."""
    for fault, found in series.controls(place, PLAIN, straight):
        assert any(what.endswith("differs") for one in found for what in one.wrong), (fault, found)


def test_a_disk_that_is_full_from_some_call_on(place: Lab, straight: Straight) -> None:
    points = spread(straight, 1, 7)
    full = series.failures(place, PLAIN, straight, FAIL_FROM, ERRORS["ENOSPC"], series.WORDS["ENOSPC"], points)
    assert wrong(full) == []


def test_a_checkpoint_that_is_taken_for_valid_although_it_is_not_is_found(
    place: Lab, straight: Straight, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the test above: one byte of a whole checkpoint is changed."""
    root = Path(shutil.copytree(straight.root, place.folder / "spoilt"))
    assert series.not_as_written(root, straight) == []
    path = root / "run" / "checkpoints" / "step-00000004" / "adapter.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert series.not_as_written(root, straight) == []  # it is seen to be damaged, and not taken
    monkeypatch.setattr(series, "read_checkpoint", lambda path: path)
    assert series.not_as_written(root, straight) != []
