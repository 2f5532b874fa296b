"""Warnings are silenced in one thread alone, in any order in which threads begin and end."""

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from lora_rocm.foundation.quiet import Quiet


def is_silent(category: type[Warning] = UserWarning, text: str = "a text") -> bool:
    """Whether a warning is not raised. pytest makes an error of each."""
    try:
        warnings.warn(text, category, stacklevel=1)
    except Warning:
        return False
    return True


def in_a_thread(action: Callable[[], bool]) -> bool:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(action).result(timeout=60)


def test_only_the_thread_that_enters_is_silent() -> None:
    quiet = Quiet()
    assert not is_silent()
    with quiet:
        assert is_silent() and not in_a_thread(is_silent)
        with quiet:
            assert is_silent()
        assert is_silent()
    assert not is_silent()


def test_only_its_category_and_its_texts() -> None:
    with Quiet(FutureWarning):
        assert is_silent(FutureWarning) and not is_silent(UserWarning)
    with Quiet(begins="Initializing"):
        assert is_silent(text="Initializing tensors") and not is_silent(text="Not initializing tensors")


def test_it_says_what_this_thread_was_not_told() -> None:
    quiet = Quiet()
    with quiet as texts:
        is_silent(text="one")
        in_a_thread(lambda: is_silent(text="of another thread"))
        is_silent(text="two")
    assert texts == ["one", "two"]
    with quiet as texts:
        assert texts == []


def test_filters_that_come_before_it_do_not_end_it() -> None:
    quiet = Quiet()
    with quiet:
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with quiet:
            assert is_silent()
    before = list(warnings.filters)
    for _ in range(3):
        with quiet:
            assert is_silent()
    assert list(warnings.filters) == before, "it is put in front once"


def overlapping(first: AbstractContextManager[object], second: AbstractContextManager[object]) -> tuple[bool, bool]:
    """Two threads of which the first enters first and leaves first.

    Returns:
        Whether the second is silent between, and whether the first is silent afterwards.
    """
    entered, left = threading.Event(), threading.Event()

    def other() -> bool:
        with second:
            entered.set()
            assert left.wait(60)
            return is_silent()

    with ThreadPoolExecutor(1) as threads:
        with first:
            result = threads.submit(other)
            assert entered.wait(60)
        left.set()
        return result.result(timeout=60), is_silent()


def test_threads_do_not_end_each_other() -> None:
    quiet = Quiet()
    assert overlapping(quiet, quiet) == (True, False)
    assert overlapping(Quiet(), Quiet()) == (True, False)


def test_filters_of_the_process_would_leave_a_silence_behind() -> None:
    """The control. It shows why catch_warnings is not used."""
    kept = list(warnings.filters)
    try:
        assert overlapping(warnings.catch_warnings(action="ignore"), warnings.catch_warnings(action="ignore"))[1]
    finally:
        warnings.filters[:] = kept  # type: ignore[index]
