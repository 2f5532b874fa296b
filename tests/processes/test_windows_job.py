"""Windows job objects, over a fake kernel32; elsewhere there is none."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from lora_rocm.processes import windows_job
from lora_rocm.processes.windows_job import JobObject

JOB, PROCESS = 11, 22


class Kernel32:
    """Records the calls; ``refuses`` names the calls that fail. Windows reports a failure as 0."""

    def __init__(self, *refuses: str) -> None:
        self.refuses = refuses
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        results = {"CreateJobObjectW": JOB, "OpenProcess": PROCESS}

        def call(*arguments: Any) -> int:
            self.calls.append((name, *arguments))
            return 0 if name in self.refuses else results.get(name, 1)

        return call


def names(kernel32: Kernel32) -> list[str]:
    return [call[0] for call in kernel32.calls]


def test_a_process_is_put_into_a_job_and_ended_with_it() -> None:
    kernel32 = Kernel32()
    made = JobObject(kernel32, 4711)
    made.terminate()
    made.close()
    assert kernel32.calls == [
        ("CreateJobObjectW", None, None),
        ("OpenProcess", windows_job.PROCESS_SET_QUOTA | windows_job.PROCESS_TERMINATE, False, 4711),
        ("AssignProcessToJobObject", JOB, PROCESS),
        ("CloseHandle", PROCESS),
        ("TerminateJobObject", JOB, windows_job.KILLED_CODE),
        ("CloseHandle", JOB),
    ]


def test_letting_go_of_it_ends_nobody() -> None:
    """A worker without its parent saves and leaves by itself; no limit is set that would kill it."""
    kernel32 = Kernel32()
    made = JobObject(kernel32, 4711)
    made.close()
    made.close()
    made.terminate()
    assert "TerminateJobObject" not in names(kernel32) and "SetInformationJobObject" not in names(kernel32)
    assert kernel32.calls.count(("CloseHandle", JOB)) == 1


@pytest.mark.parametrize("refuses", ["CreateJobObjectW", "OpenProcess", "AssignProcessToJobObject"])
def test_where_windows_refuses_there_is_no_job_and_every_handle_is_given_back(refuses: str) -> None:
    kernel32 = Kernel32(refuses)
    JobObject(kernel32, 4711).terminate()
    assert "TerminateJobObject" not in names(kernel32)
    opened = [
        handle for call, handle in (("CreateJobObjectW", JOB), ("OpenProcess", PROCESS)) if call in names(kernel32)
    ]
    closed = [call[1] for call in kernel32.calls if call[0] == "CloseHandle"]
    refused = {"CreateJobObjectW": [JOB], "OpenProcess": [PROCESS]}.get(refuses, [])
    assert sorted(closed) == sorted(handle for handle in opened if handle not in refused)


@pytest.mark.skipif(sys.platform == "win32", reason="there is one there")
def test_elsewhere_a_job_does_nothing() -> None:
    made = JobObject.of(4711)
    made.terminate()
    made.close()


@pytest.mark.skipif(sys.platform != "win32", reason="calls Windows")
def test_windows_ends_a_child_by_its_job() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    made = JobObject.of(child.pid)
    assert child.poll() is None
    made.terminate()
    assert child.wait(30) == windows_job.KILLED_CODE
    made.close()
