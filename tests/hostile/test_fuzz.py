"""A share of the fuzzing in benchmarks/reliable_fuzz.py, with fixed seeds; and that it finds what is there to find."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from benchmarks import fuzz_rows, reliable_fuzz
from benchmarks.fuzz_targets import TARGETS, Target, read
from lora_rocm.errors import UserError
from tests.wording import saying

NUM_CASES = {
    "model-config": 15,
    "chat-rows": 200 // fuzz_rows.ROWS,
}  # of a target, 60 of the others: each reads four configs and builds what they say
SEED = 7


@pytest.mark.parametrize("part", ["half", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_damaged_files_are_read_or_refused(target: Target, part: str, tmp_path: Path) -> None:
    reliable_fuzz.read_sound(str(tmp_path))
    began = time.process_time()
    count = NUM_CASES.get(target.name, 60)
    outcomes = {
        read(target, reliable_fuzz.content_of(target, SEED, number), tmp_path)
        for number in range(count if part == "all" else (count + 1) // 2)
    }
    assert outcomes <= {"read", "refused"}
    assert time.process_time() - began < 60  # two seconds at most where nothing else runs


@pytest.mark.slow
def test_each_row_of_2000_is_trained_on_or_set_aside(tmp_path: Path) -> None:
    """The full number of rows; the quick share is in ``test_damaged_files_are_read_or_refused``."""
    (target,) = (each for each in TARGETS if each.name == "chat-rows")
    for number in range(2000 // fuzz_rows.ROWS):
        read(target, reliable_fuzz.content_of(target, SEED + 1, number), tmp_path)


def test_a_case_is_a_function_of_its_numbers(tmp_path: Path) -> None:
    reliable_fuzz.read_sound(str(tmp_path))
    for target in TARGETS:
        if target.name in ("recipe-lines", "image", "weights", "facts"):
            first, again, other = (reliable_fuzz.content_of(target, seed, 3) for seed in (1, 1, 2))
            assert first == again != other


def raises(error: Exception) -> Target:
    def fail(path: Path) -> None:
        raise error

    return Target("bad", "x", lambda rng: rng.randbytes(3), fail)


def test_what_is_no_error_of_ours_is_a_finding(tmp_path: Path) -> None:
    assert read(raises(UserError("x", "A sentence.")), b"", tmp_path) == "refused"
    for error in (
        KeyError("x"),
        RecursionError(),
        MemoryError(),
        AssertionError(),
        UnicodeDecodeError("a", b"", 0, 1, ""),
    ):
        with pytest.raises(type(error)):
            read(raises(error), b"", tmp_path)
    with pytest.raises(AssertionError, check=saying("hostile/without-a-word")):
        read(raises(UserError("x", "")), b"", tmp_path)


def test_a_child_notes_what_it_finds_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reliable_fuzz, "limit_memory", lambda: None)  # of this process
    notes = tmp_path / "notes"
    assert reliable_fuzz.child(notes, [raises(KeyError("x"))], seed=4, start=9, seconds=0.1) == 0
    found = [json.loads(line) for line in notes.read_bytes().splitlines()]
    assert found[0]["case"] == "bad:4:9" and found[0]["what"].startswith("KeyError at test_fuzz.py")
    assert found[-1]["counts"]["bad finding"] == sum("case" in line for line in found) > 1


def test_deaths_are_findings() -> None:
    said = (
        'Timeout (0:00:20)!\nThread 0x1:\n  File "/x/re.py", line 1 in match\n  File "/lora_rocm/a.py", line 2 in f\n'
    )
    assert reliable_fuzz._death(1, said) == 'longer than 20 s, in File "/lora_rocm/a.py", line 2 in f'
    assert reliable_fuzz._death(-11, "Segmentation fault\n").startswith("the process ended with -11")


def test_damage_is_damage() -> None:
    from benchmarks.mutations import changed, damaged

    rng = random.Random(1)
    assert len({damaged(rng, bytes(200)) for _ in range(100)}) > 60
    assert len({repr(changed(rng, {"a": [1, 2], "b": {"c": "d"}})) for _ in range(100)}) > 60
