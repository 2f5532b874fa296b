"""Telemetry during a supervised run: it receives events and warns, and its failures do not affect the run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from lora_rocm.commands.status import status, status_text
from lora_rocm.errors import StorageError
from lora_rocm.foundation.safe_path import python_command
from lora_rocm.report.report import write_report
from lora_rocm.rundir.event_types import Event as RunEvent
from lora_rocm.rundir.event_types import NoticeEvent
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor import telemetry
from lora_rocm.supervisor.telemetry import MODULE, Telemetry
from lora_rocm.telemetry.cards import EXPLAINED, Cards, TelemetryJob
from tests.event_lines import read_events
from tests.supervisor.fake_run import event, step_fields
from tests.supervisor.supervised import supervisor
from tests.telemetry.trees import XTX, read_as, write_tree
from tests.wording import says

Event = dict[str, Any]
CARDS = Cards("sysfs", (XTX,), spills="moved")
SOON_S = 20.0  # for events that come at once on an idle machine
posix = pytest.mark.skipif(sys.platform == "win32", reason="named pipes in a folder, which Windows lacks")


class Run:
    """A supervised run over the fake worker, which stops once ``enough`` is true for an event."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = RunDir(folder / "run").create()
        self.events: list[Event] = []
        self.enough: Callable[[Event], bool] = lambda event: False
        self.asked_s = 0.0

    def _heard(self, event: Event) -> None:
        self.events.append(event.to_json())
        if self.enough(event):
            self.run_dir.ask_to_stop()
            self.asked_s = time.monotonic()

    def __call__(self, mode: str, watched: Telemetry) -> int:
        return supervisor(self.run_dir, mode, (), self._heard, lambda text: None, telemetry=watched).run()

    def of(self, event_type: str) -> list[Event]:
        return [event for event in self.events if event["type"] == event_type]

    def written(self, event_type: str) -> list[Event]:
        return read_events(self.run_dir.events("supervisor"), event_type)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def is_type(event_type: str) -> Callable[[Event], bool]:
    return lambda event: event.type == event_type


def with_pipe(folder: Path) -> str:
    """A recorded machine with one file that never returns."""
    device = write_tree(folder, changes={"mem_info_vram_used": None})
    os.mkfifo(device / "mem_info_vram_used")
    return str(folder)


def readers() -> list[psutil.Process]:
    """The reading processes that this one has started and that still run."""
    found = []
    for child in psutil.Process().children():
        try:
            if MODULE in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
        except psutil.Error:
            continue
    return found


def scripted(text: str) -> Callable[[TelemetryJob], list[str]]:
    """A command in place of the reading process."""
    return lambda job: python_command("-c", text)


def test_readings_are_told_and_written(run: Run, tmp_path: Path) -> None:
    write_tree(tmp_path / "root")
    run.enough, jobs = is_type("telemetry"), list[TelemetryJob]()

    def command(job: TelemetryJob) -> list[str]:
        jobs.append(job)
        return python_command("-m", MODULE, job.to_text())

    watched = Telemetry(CARDS, every_s=0.05, root=str(tmp_path / "root"), command=command)
    assert run("until-stopped", watched) == 130
    first, *rest = run.written("telemetry")
    assert (first["gpu"], first["session"], first["samples"]) == (XTX, 1, 1)
    assert first["temperatures_c"]["junction"] == 84.0 and first["power_w"] == 303.0
    assert run.of("telemetry") == [first, *rest] and all(each["updates"] in (0, 3) for each in rest)
    assert run.of("notice") == [] == run.of("alarm") and readers() == []
    (job,) = jobs
    assert len(job.pids) == 1 and job.pids[0] not in (0, os.getpid())
    assert all(event["type"] != "telemetry" for event in read_events(run.run_dir.events()))
    html = write_report(run.run_dir).read_text(encoding="utf-8")
    assert "<h2>GPU</h2>" in html and "junction 110 °C" in html and says(html, "supervisor/power-limit-339-w")
    found = status(run.run_dir)
    assert found.telemetry[0]["gpu"] == XTX and found.alarms == []
    assert "junction 84 °C, mem 78 °C, 303 of 339 W, memory 17.0 GiB of 24.0 GiB" in found.telemetry[0]["text"]
    assert XTX not in status_text(found) and XTX in status_text(replace(found, state="running"))


def test_a_hot_card_is_an_event_and_a_line_of_status(run: Run, tmp_path: Path) -> None:
    write_tree(tmp_path / "root", changes={"hwmon/hwmon4/temp2_input": "109000\n"})
    run.enough = is_type("alarm")
    assert run("until-stopped", Telemetry(CARDS, every_s=0.05, root=str(tmp_path / "root"))) == 130
    (alarm,) = run.written("alarm")
    assert run.of("alarm") == [alarm] and (alarm["kind"], alarm["gpu"]) == ("hot", XTX)
    assert alarm["text"] in status(run.run_dir).alarms and "warning: The GPU" in status_text(status(run.run_dir))
    assert "109 °C" in write_report(run.run_dir).read_text(encoding="utf-8")


def test_the_worker_is_started_the_same_way_with_and_without(tmp_path: Path) -> None:
    started = []
    for name, watched in (("with", Telemetry(CARDS, every_s=0.05, root=str(tmp_path / "none"))), ("out", Telemetry())):
        run = Run(tmp_path / name)
        assert run("done", watched) == 0
        text = (run.run_dir.path / "started").read_text(encoding="utf-8")
        started.append(text.replace(str(tmp_path / name), ""))
        assert [event["updates"] for event in read_events(run.run_dir.events(), "step")] == [1, 2, 3]
    assert started[0] == started[1]


@posix
def test_a_file_that_never_returns_is_left_alone_and_the_run_goes_on(run: Run, tmp_path: Path) -> None:
    watched = Telemetry(CARDS, every_s=0.05, limit_s=1.0, root=with_pipe(tmp_path / "root"))
    run.enough = is_type("notice")
    assert run("until-stopped", watched) == 130
    assert [event["text"] for event in run.written("notice")] == [telemetry.LEFT_ALONE.format(limit=1.0)]
    assert time.monotonic() - run.asked_s < SOON_S and readers() == []
    with watched.watching([os.getpid()], lambda event: pytest.fail("said twice")):  # as in the worker's next start
        assert readers() == [], "it is not tried again in this command"


@posix
def test_the_end_of_a_run_does_not_wait_for_one_that_hangs(run: Run, tmp_path: Path) -> None:
    watched = Telemetry(CARDS, every_s=0.05, limit_s=3600.0, root=with_pipe(tmp_path / "root"))
    began_s = time.monotonic()
    assert run("done", watched) == 0
    assert time.monotonic() - began_s < SOON_S and readers() == [] and run.events[-1]["type"] == "end"


def test_not_even_for_one_that_cannot_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a driver held it."""
    told: list[RunEvent] = []
    watched = Telemetry(CARDS, command=scripted("import time; time.sleep(600)"))
    with watched.watching([os.getpid()], told.append):
        assert watched._reading is not None
        reading, child = watched._reading, watched._reading._child
        with monkeypatch.context() as patch:
            patch.setattr(child, "kill", lambda: None)
            began_s = time.monotonic()
            watched._stop()
            assert time.monotonic() - began_s < SOON_S and child.poll() is None
    child.kill()
    child.wait(SOON_S)
    reading.kill()
    assert told == []


@pytest.mark.parametrize(("code", "is_said"), [(9, True), (EXPLAINED, False)])
def test_one_that_ends_is_named_unless_it_has_said_why(code: int, is_said: bool) -> None:
    told: list[RunEvent] = []
    watched = Telemetry(CARDS, command=scripted(f"import sys; sys.exit({code})"))
    for _ in range(2):
        with watched.watching([os.getpid()], told.append):
            until_s = time.monotonic() + SOON_S
            while watched._reading is not None and time.monotonic() < until_s:
                watched.poll()
                time.sleep(0.01)
            assert watched._reading is None
    assert len(told) == is_said, "once, however often the worker is started"


@pytest.mark.parametrize("cards", ["It cannot be told.", ""])
def test_why_nothing_is_read_is_said_once(cards: str) -> None:
    told: list[RunEvent] = []
    watched = Telemetry(cards, command=lambda job: pytest.fail("nothing is read"))
    for _ in range(3):
        with watched.watching([1], told.append):
            watched.poll()
    assert [event.text for event in told if isinstance(event, NoticeEvent)] == ([cards] if cards else [])


def test_what_it_writes_may_be_anything() -> None:
    line = read_as().model_copy(update={"updates": 99}).to_json()
    script = f"import sys, json; print('[[', chr(0), flush=True); print({{}}); print(json.dumps({line!r}), flush=True)"
    told: list[RunEvent] = []
    watched = Telemetry(CARDS, command=scripted(f"null = None; {script}; sys.stdin.read()"))
    with watched.watching([os.getpid()], told.append):
        watched.on_event(event("step", **step_fields(7)))
        until_s = time.monotonic() + SOON_S
        while not told and time.monotonic() < until_s:
            watched.poll()
            time.sleep(0.01)
    assert [(event.type, event.to_json()["updates"]) for event in told] == [("telemetry", 7)]


def test_a_full_disk_is_not_reported_by_telemetry() -> None:
    def full(event: RunEvent) -> None:
        raise StorageError("disk-full", "The disk is full.")

    watched = Telemetry("Not read.")
    with watched.watching([1], full):
        watched.poll()


def test_a_program_that_cannot_be_started_is_said() -> None:
    told: list[RunEvent] = []
    watched = Telemetry(CARDS, command=lambda job: [str(Path("no") / "such" / "program")])
    with watched.watching([1], told.append):
        watched.poll()
    assert [event.type for event in told] == ["notice"]
