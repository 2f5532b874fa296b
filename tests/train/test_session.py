"""Sessions count up, phases are bracketed, a stop is heard, and a dead parent ends the worker."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.encoded_cache.cache import LatentCache
from lora_rocm.errors import StoppedError
from lora_rocm.rundir.layout import RunDir
from lora_rocm.train.disk_forecast import CacheRoom
from lora_rocm.train.session import Session
from tests.event_lines import read_events
from tests.supervisor.fake_run import event, step_fields
from tests.wording import saying

START: dict[str, Any] = {
    "pid": 1,
    "device": "CPU",
    "torch": "2",
    "threads": 1,
    "precision": "float32",
    "resumed_from": None,
}


def test_sessions_count_the_starts(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        session = Session(RunDir(tmp_path), watch_parent=False)
        session.emit(event("start", **START))
        session.close()
        assert session.events.session == number
    assert [event["session"] for event in read_events(RunDir(tmp_path).events())] == [1, 2, 3]


def test_phases_are_bracketed_and_readers_see_every_event(tmp_path: Path) -> None:
    session, seen = Session(RunDir(tmp_path), watch_parent=False), []
    session.readers.append(seen.append)
    with session.phase("load"):
        session.context.notice("hello")
    session.close()
    assert [(event.type, getattr(event, "state", None)) for event in seen] == [
        ("phase", "begin"),
        ("notice", None),
        ("phase", "end"),
    ]
    assert [event.type for event in seen] == [event["type"] for event in read_events(RunDir(tmp_path).events())]


def test_caching_stops_when_asked_and_only_then(tmp_path: Path) -> None:
    session = Session(RunDir(tmp_path), watch_parent=False)
    progress = CacheRoom(LatentCache(tmp_path), session.context)
    progress("images", 1, 2, 3.0)
    RunDir(tmp_path).stop.touch()
    with pytest.raises(StoppedError, check=saying("train/what-is-encoded-stays")):
        progress("images", 2, 2, 3.0)
    session.close()


def test_the_end_of_standard_input_asks_for_a_stop(tmp_path: Path) -> None:
    program = (
        "import sys, time, json\n"
        "from pathlib import Path\n"
        "from lora_rocm.rundir.layout import RunDir\n"
        "from lora_rocm.train.session import Session\n"
        "session = Session(RunDir(Path(sys.argv[1])), watch_parent=True)\n"
        "print(json.dumps(session.stop_requested()), flush=True)\n"
        "while not session.stop_requested():\n"
        "    time.sleep(0.01)\n"
        "print(json.dumps(session.stop_requested()), flush=True)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None and child.stdout is not None
    assert json.loads(child.stdout.readline()) is False
    time.sleep(0.2)
    assert child.poll() is None  # negative control: with the pipe open it continues
    output, _ = child.communicate(timeout=20)  # closes the pipe
    assert json.loads(output) is True and child.returncode == 0


SILENCE_S = 0.3
STACKS_AFTER_S = {"load": 60.0, "cache_first": 60.0, "first_step": 60.0} | dict.fromkeys(
    ("start", "cache", "step"), SILENCE_S
)


def stacks_of_a_silence(run_dir: RunDir, begin: Callable[[Session, ExitStack], None]) -> str:
    """The stacks that a worker writes if it is silent for longer than some of its limits.

    Once more where a pause of the machine made what came before the silence as long as the silence.
    """
    while True:
        began = time.monotonic()
        session = Session(run_dir, watch_parent=False, stacks_after_s=STACKS_AFTER_S)
        try:
            with ExitStack() as phases:
                begin(session, phases)
                took_s = time.monotonic() - began
                time.sleep(SILENCE_S + 0.4)
                if took_s < SILENCE_S:
                    return run_dir.stacks().read_text(encoding="utf-8")
        finally:
            session.close()


def in_phase(name: str) -> Callable[[Session, ExitStack], None]:
    return lambda session, phases: phases.enter_context(session.phase(name))


def caching(done: int) -> Callable[[Session, ExitStack], None]:
    def begin(session: Session, phases: ExitStack) -> None:
        phases.enter_context(session.phase("cache"))
        for so_far in range(1, done + 1):
            CacheRoom(LatentCache(session.run_dir.path), session.context)("images", so_far, 3, 1.0)

    return begin


def after_a_step(session: Session, phases: ExitStack) -> None:
    phases.enter_context(session.phase("step"))
    session.emit(event("step", **step_fields(1)))
    session.beat("loader")


@pytest.mark.parametrize(
    ("begin", "written"),
    [
        (lambda session, phases: None, 1),
        (in_phase("load"), 0),
        (in_phase("step"), 0),
        (after_a_step, 1),
        (caching(0), 0),
        (caching(1), 1),
        (caching(3), 0),
    ],
    ids=["start", "load", "first-step", "step", "first-image", "image", "next-encoder"],
)
def test_stacks_are_written_once_and_only_where_the_silence_is_too_long_for_what_is_done(
    tmp_path: Path, begin: Callable[[Session, ExitStack], None], written: int
) -> None:
    assert stacks_of_a_silence(RunDir(tmp_path), begin).count("in stacks_of_a_silence") == written
