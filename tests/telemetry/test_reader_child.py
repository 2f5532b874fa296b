"""The process that reads: it reports each fact once, and it ends with its parent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lora_rocm.foundation.safe_path import python_command
from lora_rocm.rundir.event_line import event_of
from lora_rocm.rundir.event_types import Event, NoticeEvent, TelemetryEvent
from lora_rocm.telemetry import reader_child
from lora_rocm.telemetry.cards import EXPLAINED, Cards, TelemetryJob
from lora_rocm.telemetry.reader import ABSENT, POWER, TEMPERATURE, reading
from tests.telemetry.trees import TRAINER, XTX, write_tree

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
posix = pytest.mark.skipif(sys.platform == "win32", reason="named pipes in a folder, which Windows lacks")


class Over(Exception):
    """The test has seen enough."""


def said_by(readings: list[list[TelemetryEvent] | OSError]) -> list[Event]:
    """The process's reports about these readings."""
    said, left = list[Event](), list(readings)

    class Reader:
        def read(self) -> list[TelemetryEvent]:
            found = left.pop(0)
            if isinstance(found, OSError):
                raise found
            return found

    def wait() -> None:
        if not left:
            raise Over

    with pytest.raises(Over):
        reader_child.read_on(Reader(), said.append, wait)
    return said


def notices(said: list[Event]) -> list[str]:
    return [event.text for event in said if isinstance(event, NoticeEvent)]


def test_what_cannot_be_read_is_said_once_for_each_card() -> None:
    forbidden = {TEMPERATURE: "permission denied", POWER: ABSENT}
    said = said_by([[reading("a", 0, forbidden), reading("b", 1, {})]] * 3 + [[reading("b", 1, forbidden)]] * 2)
    assert len(notices(said)) == 2 and len(said) == 8 + 2
    assert "temperature (permission denied)" in notices(said)[0] and POWER not in notices(said)[0]
    assert notices(said_by([[reading("a", 0, {POWER: ABSENT})]] * 5)) == []


def test_a_reader_that_fails_goes_on() -> None:
    lost = OSError("GPU is lost")
    said = said_by([lost, [reading("a", 0, {})], lost, lost, [reading("a", 0, {})]])
    assert len(said) == 3 and len(notices(said)) == 1 and "GPU is lost" in notices(said)[0]


def test_a_run_that_is_seen_on_no_gpu_for_long() -> None:
    nothing: list[list[TelemetryEvent] | OSError] = [[]]
    assert said_by(nothing * (reader_child.UNFOUND_READS - 1)) == []
    assert len(notices(said_by(nothing * (3 * reader_child.UNFOUND_READS)))) == 1


def test_the_family_of_a_process_is_its_children_too() -> None:
    script = "import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=0); print(c.pid)"
    command = [sys.executable, "-u", "-c", f"{script}; c.wait()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdin is not None
        child = int(parent.stdout.readline())
        assert {parent.pid, child} <= reader_child.family([parent.pid, 2**22 + 1])
        parent.stdin.write(b"\n")


def started(job: TelemetryJob) -> subprocess.Popen[bytes]:
    command = python_command("-m", "lora_rocm.telemetry.reader_child", job.to_text())
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, bufsize=0)


def test_it_reads_until_its_parent_is_gone(tmp_path: Path) -> None:
    write_tree(tmp_path)
    with started(TelemetryJob(Cards("sysfs", (XTX,)), pids=(TRAINER,), every_s=0.01, root=str(tmp_path))) as child:
        assert child.stdout is not None and child.stdin is not None
        lines = [child.stdout.readline() for _ in range(6)]
        child.stdin.close()
        assert child.wait(WAIT_S) == 0
    events = [event for line in lines if (event := event_of(line)) is not None]
    assert [event.type for event in events] == ["telemetry"] * 3, "each followed by a sign of life"
    assert events[0].power_w == 303.0 and events[0].own_bytes > 0


@posix
def test_one_that_hangs_ends_with_its_parent_too(tmp_path: Path) -> None:
    device = write_tree(tmp_path, changes={"mem_info_vram_used": None})
    os.mkfifo(device / "mem_info_vram_used")
    with started(TelemetryJob(Cards("sysfs", (XTX,)), every_s=0.01, root=str(tmp_path))) as child:
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(WAIT_S) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="there the counters are")
def test_a_library_that_is_missing_is_said() -> None:
    with started(TelemetryJob(Cards("pdh"))) as child:
        assert child.stdout is not None
        (line,) = child.stdout.read().splitlines()
        assert child.wait(WAIT_S) == EXPLAINED
    assert json.loads(line)["type"] == "notice" and "only Windows" in json.loads(line)["text"]


def test_it_loads_no_library_of_rocm_and_no_torch() -> None:
    script = "import sys, lora_rocm.telemetry.reader_child; print(*sys.modules)"
    done = subprocess.run(
        python_command("-c", script),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    assert not {"torch", "amdsmi", "pyrsmi", "numpy", "pynvml"} & set(done.stdout.split())
