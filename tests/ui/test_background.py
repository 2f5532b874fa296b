"""Work in the background: progress, errors, cancel, one at a time."""

from __future__ import annotations

import threading
import time

import pytest

from lora_rocm.errors import MachineError, UserError
from lora_rocm.ui.background import Background, Work, key_of


def ended(work: Work) -> Work:
    deadline = time.monotonic() + 10
    while work.status == "running" and time.monotonic() < deadline:
        time.sleep(0.01)
    return work


def test_work_reports_and_returns() -> None:
    announced: list[str] = []
    background, go = Background(announced.append), threading.Event()

    def function(work: Work) -> int:
        work.report("one\ntwo")
        work.advance(1, 2)
        go.wait(10)
        return 7

    work = background.start("plan", function)
    with pytest.raises(UserError) as raised:
        background.start("plan", function)
    assert raised.value.code == "work-runs-already" and work.status == "running"
    go.set()
    assert ended(work).status == "done" and work.result == 7 and work.lines == ["one", "two"]
    assert (work.done, work.total) == (1, 2) and background.of("plan") is work
    assert announced[-1] == "plan" and background.of("other") is None


def test_errors_are_kept_and_shown() -> None:
    background = Background(lambda key: None)

    def fail(error: Exception) -> object:
        raise error

    known = ended(background.start("a", lambda work: fail(MachineError("no-gpu", "There is no GPU."))))
    assert known.status == "failed" and known.error is not None and known.error.code == "no-gpu"
    bug = ended(background.start("a", lambda work: fail(ValueError("odd"))))
    assert bug.error is not None and bug.error.code == "page-failed" and "odd" in bug.error.what


def test_work_ends_when_it_is_cancelled() -> None:
    background = Background(lambda key: None)

    def function(work: Work) -> None:
        for number in range(1000):
            work.advance(number, 1000)
            time.sleep(0.01)

    work = background.start("a", function)
    work.cancel()
    assert ended(work).status == "cancelled"
    other = background.start("a", function)
    background.close()
    assert ended(other).status == "cancelled"


def test_each_run_has_its_own_key() -> None:
    """Otherwise a page would show, and cancel, the work of another run."""
    names = ("runs/cat-v1", "runs/cat_v1", "runs/cat v1", "runs-cat/v1", "x" * 90, "y" + "x" * 89)
    assert len({key_of("try", name) for name in names}) == len(names)
    assert key_of("try", names[0]) == key_of("try", names[0]) != key_of("export", names[0])
