"""Lines of the kernel's log since a moment, and their meaning for a process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lora_rocm.rules.kernel_log import MAX_LINES, ClockReading, device_fault, killed_for_memory, lines_since

MOMENT = ClockReading(wall_s=1_800_000_000.7, kernel_s=100.0)
FAULT = "amdgpu 0000:03:00.0: [gfxhub] page fault (src_id:0 ring:24 vmid:8 pasid:32771)"
HANG = "amdgpu 0000:03:00.0: ring gfx_0.0.0 timeout, signaled seq=1, emitted seq=3"
KILLED = "Memory cgroup out of memory: Killed process 4711 (python) total-vm:1kB"
DMESG = f"[   99.900000] {HANG}\n[  100.100000] {FAULT}\n[  100.200000] usb 1-1: new device\n[12345.000000] {KILLED}\n"


def tools(journal: str | None, dmesg: str | None) -> tuple[list[Sequence[str]], object]:
    asked: list[Sequence[str]] = []

    def run(command: Sequence[str], timeout_s: float) -> str:
        asked.append(command)
        said = journal if command[0] == "journalctl" else dmesg
        if said is None:
            raise PermissionError(1, "not permitted")
        return said

    return asked, run


def test_the_journal_is_asked_from_that_moment_on() -> None:
    asked, run = tools(f"{FAULT}\nusb 1-1: new device\n{KILLED}\n", None)
    assert lines_since(MOMENT, run, "linux") == (FAULT, KILLED)  # type: ignore[arg-type]
    assert asked[0][-2:] == ["--since", "@1800000000"] and len(asked) == 1


@pytest.mark.parametrize("journal", [None, ""])
def test_without_a_journal_the_ring_buffer_is_read_by_its_stamps(journal: str | None) -> None:
    _, run = tools(journal, DMESG)
    assert lines_since(MOMENT, run, "linux") == (FAULT, KILLED)  # type: ignore[arg-type]
    assert lines_since(ClockReading(0.0, 0.0), run, "linux") == (HANG, FAULT, KILLED)  # type: ignore[arg-type]


def test_where_nothing_may_be_read_there_is_nothing() -> None:
    asked, run = tools(None, None)
    assert lines_since(MOMENT, run, "linux") == () and len(asked) == 2  # type: ignore[arg-type]
    assert lines_since(MOMENT, run, "win32") == () and len(asked) == 2  # type: ignore[arg-type]


def test_a_flood_is_cut() -> None:
    _, run = tools("\n".join(f"{FAULT} {number}" * 9 for number in range(500)), None)
    lines = lines_since(MOMENT, run, "linux")  # type: ignore[arg-type]
    assert len(lines) == MAX_LINES and max(map(len, lines)) == 300 and "499" not in lines[0]


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ((), False),
        ((KILLED,), False),
        ((FAULT,), True),
        ((HANG,), True),
        (("amdgpu: GPU reset begin!",), True),
        (("amdgpu 0000:03:00.0: device wedged, but recovered through reset",), True),
        (("amdgpu: [gfxhub0] VM_L2_PROTECTION_FAULT_STATUS:0x00",), True),
        (("amdgpu: ring sdma0 timeout", "amdgpu: GPU reset begin!"), False),
        (("amdgpu: ring sdma0 timeout", FAULT), True),
        (("workqueue: svm_range_deferred_list_work hogged CPU for >10000us",), False),
    ],
)
def test_what_is_a_fault_of_the_device(lines: tuple[str, ...], fault: bool) -> None:
    assert device_fault(lines) is fault


def test_whom_the_kernel_killed() -> None:
    assert killed_for_memory((FAULT, KILLED), 4711) and not killed_for_memory((KILLED,), 471)
    assert killed_for_memory(("Out of memory: Killed process 9 (python)",), 9) and not killed_for_memory((), 9)
