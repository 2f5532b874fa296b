"""Timing rows: failures are rows, hangs end the process, clocks are correct."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from lora_rocm.checks import timing
from lora_rocm.checks.timing import MeasuredRow, measure, seconds_of, wall_seconds_of
from tests.supervisor.fake_run import as_heard

CPU = torch.device("cpu")
on_cpu = partial(seconds_of, device=CPU)


def raises(error: Exception) -> Callable[[], object]:
    def call() -> object:
        raise error

    return call


def events(capfd: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [as_heard(line) for line in capfd.readouterr().out.splitlines()]


def test_seconds_of_one_call() -> None:
    for seconds in (on_cpu, partial(wall_seconds_of, devices=())):
        found = [seconds(lambda: time.sleep(0.01)) for _ in range(5)]
        assert 0.01 <= min(found) < 0.1  # any one may fall into a pause of the machine


def test_a_failing_row_says_why_and_the_next_is_measured(capfd: pytest.CaptureFixture[str]) -> None:
    works = [
        MeasuredRow({"name": "bad"}, 1.0, lambda: raises(RuntimeError("no kernel for this\nadvice"))),
        MeasuredRow({"name": "full"}, 1.0, lambda: raises(torch.OutOfMemoryError("out of memory. Tried"))),
        MeasuredRow({"name": "good"}, 100.0, lambda: lambda: None),
    ]
    measure(works, 0, on_cpu)
    rows = [event for event in events(capfd) if event["type"] == "row"]
    assert [row["problem"] for row in rows] == ["no kernel for this", "out of memory. Tried", None]
    assert [row["per_second"] is None for row in rows] == [True, True, False]


def test_it_starts_where_it_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    measure([MeasuredRow({"name": str(number)}, 1.0, lambda: lambda: None) for number in range(3)], 2, on_cpu)
    assert [event["type"] for event in events(capfd)] == ["begin", "row"]


def test_a_gpu_that_no_longer_answers_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", raises(RuntimeError("illegal memory access")))
    with pytest.raises(SystemExit):
        measure([MeasuredRow({}, 1.0, lambda: lambda: None)], 0, on_cpu)
    timing.faulthandler.cancel_dump_traceback_later()


HANG = """
import time
from functools import partial
import torch
from lora_rocm.checks.timing import MeasuredRow, measure, seconds_of
sleeps = MeasuredRow({}, 1.0, lambda: lambda: time.sleep(60))
measure([sleeps], 0, partial(seconds_of, device=torch.device("cpu")), limit_s=0.2)
"""


def test_a_hang_ends_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", HANG], capture_output=True, encoding="utf-8", timeout=50)
    assert done.returncode == 1 and "Timeout (0:00:00.2" in done.stderr
    assert [as_heard(line)["type"] for line in done.stdout.splitlines()] == ["begin"]
