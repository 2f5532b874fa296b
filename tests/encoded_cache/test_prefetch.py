"""Threads around a loop: order, memory, errors and stops are the same as in a loop without them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from lora_rocm.encoded_cache import prefetch as module
from lora_rocm.encoded_cache.prefetch import BackgroundWriter, ahead
from lora_rocm.errors import StorageError

FULL = StorageError("disk-full", "The disk is full.")


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def no_bytes(item: object) -> int:
    return 0


def test_what_comes_out_has_the_order_of_what_went_in() -> None:
    def make(number: int) -> int:
        time.sleep(0.02 if number % 3 == 0 else 0.0)
        return number * number

    with closing(ahead(make, range(30), no_bytes, threads=4)) as made:
        assert list(made) == [number * number for number in range(30)]
    assert list(ahead(make, [], no_bytes)) == []


def test_the_next_are_made_while_one_is_used() -> None:
    begun = [threading.Event() for _ in range(5)]

    def make(number: int) -> int:
        begun[number].set()
        return number

    with closing(ahead(make, range(5), no_bytes, threads=2)) as made:
        assert next(made) == 0
        assert all(event.wait(10) for event in begun[1:4]), "made although nobody has asked for them yet"
        assert not begun[4].is_set(), "twice the threads, and no more"
        assert list(made) == [1, 2, 3, 4]


@pytest.mark.parametrize(("limit", "most"), [(100, 2), (10**9, 8)], ids=["bounded", "room for all"])
def test_no_more_is_under_way_than_memory_allows(monkeypatch: pytest.MonkeyPatch, limit: int, most: int) -> None:
    monkeypatch.setattr(module, "MAX_AHEAD_BYTES", limit)
    lock, under_way, highest = threading.Lock(), [0], [0]

    def make(number: int) -> int:
        with lock:
            under_way[0] += 1
            highest[0] = max(highest[0], under_way[0])
        time.sleep(0.005)
        return number

    with closing(ahead(make, range(20), lambda number: 50, threads=4)) as made:
        for _ in made:
            time.sleep(0.002)
            with lock:
                under_way[0] -= 1
    assert highest[0] <= most and (limit == 100 or highest[0] > 2)


def test_one_that_is_larger_than_the_limit_is_made_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_AHEAD_BYTES", 100)
    running = [0]

    def make(size: int) -> tuple[int, int]:
        running[0] += 1
        time.sleep(0.01)
        beside = running[0]
        running[0] -= 1
        return size, beside

    with closing(ahead(make, [10, 5000, 10], lambda size: size, threads=4)) as made:
        assert list(made) == [(10, 1), (5000, 1), (10, 1)]


def test_an_error_comes_at_its_turn() -> None:
    def make(number: int) -> int:
        if number >= 3:
            raise ValueError(str(number))
        time.sleep(0.01)
        return number

    got: list[int] = []
    with pytest.raises(ValueError, match="^3$"), closing(ahead(make, range(9), no_bytes, threads=4)) as made:
        got.extend(made)
    assert got == [0, 1, 2]


def test_a_stop_waits_for_what_runs_and_for_nothing_else() -> None:
    begun: list[int] = []

    def make(number: int) -> int:
        begun.append(number)
        time.sleep(0.05)
        return number

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), closing(ahead(make, range(1000), no_bytes, threads=2)) as made:
        next(made)
        raise KeyboardInterrupt
    assert time.monotonic() - started < 20 and len(begun) <= 5


def test_what_is_written_behind_has_its_order_and_tells_in_the_thread_that_asked() -> None:
    written: list[int] = []
    told: list[tuple[int, str]] = []
    with BackgroundWriter() as behind:
        for number in range(3 * module.MAX_BEHIND):
            behind.add(
                lambda number=number: written.append(number),  # type: ignore[misc]
                lambda number=number: told.append((number, threading.current_thread().name)),  # type: ignore[misc]
            )
            assert number - len(told) <= module.MAX_BEHIND
    assert written == list(range(3 * module.MAX_BEHIND)) == [number for number, _ in told]
    assert {name for _, name in told} == {threading.current_thread().name}


def fails() -> None:
    raise FULL


def test_a_write_that_fails_is_told_at_the_next_or_at_the_end() -> None:
    with pytest.raises(StorageError), BackgroundWriter() as behind:
        behind.add(fails)
    with pytest.raises(StorageError), BackgroundWriter() as behind:
        behind.add(fails)
        for _ in range(2 * module.MAX_BEHIND):
            behind.add(lambda: None)
        pytest.fail("it goes on although nothing can be written")


@pytest.mark.parametrize("error", [RuntimeError("HIP error: device lost"), KeyboardInterrupt()], ids=repr)
def test_the_first_error_is_told_and_what_was_added_before_is_written(error: BaseException) -> None:
    written: list[int] = []
    with pytest.raises(type(error)) as caught, BackgroundWriter() as behind:
        behind.add(lambda: time.sleep(0.05))
        behind.add(lambda: written.append(1))
        raise error
    assert caught.value is error and written == [1]


@pytest.mark.parametrize(
    "second",
    [FULL, OSError("gone"), MemoryError(), RuntimeError("HIP error: device lost")],
    ids=lambda error: repr(error)[:12],
)
@pytest.mark.parametrize("first", [ValueError("first"), None], ids=["after another", "alone"])
def test_a_write_that_fails_too_does_not_take_the_place_of_the_first_error(
    first: Exception | None, second: Exception
) -> None:
    def write() -> None:
        raise second

    with pytest.raises((ValueError, type(second))) as caught, BackgroundWriter() as behind:
        behind.add(write)
        if first is not None:
            raise first
    assert caught.value is (first or second)
