"""The process that reads a run's GPUs: ``python -m lora_rocm.telemetry.reader_child JOB``, or ``--show N``.

It writes an event for each reading to standard output, and ends when its standard input is closed. A read may block
inside a driver, where even killing the process does not interrupt it. Therefore the run's own process does not read. No
ROCm library is loaded, because readings by HIP or amd-smi have frozen desktops.

``--show N`` prints N readings of this machine's GPUs for the user.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from lora_rocm.hardware.gpu_select import select
from lora_rocm.hardware.probe.detection import probe
from lora_rocm.rundir.event_types import Emit, NoticeEvent, TelemetryEvent
from lora_rocm.rundir.events import emit
from lora_rocm.telemetry.cards import EXPLAINED, Cards, TelemetryJob, cards_of
from lora_rocm.telemetry.linux_sysfs import SysfsReader
from lora_rocm.telemetry.numbers import long_text
from lora_rocm.telemetry.nvml import NvmlReader, load_nvml
from lora_rocm.telemetry.reader import GpuReader, Pids, faults
from lora_rocm.telemetry.windows_pdh import PdhReader, load_pdh

UNFOUND_READS = 120
"""Number of readings before a notice that the run uses no GPU. While a run scans its data, it uses none."""


def family(pids: Sequence[int]) -> set[int]:
    """Return the ids of these processes and of all that they started.

    On Windows, ``python.exe`` of a virtual environment only starts the real interpreter.
    """
    found = set(pids)
    for pid in pids:
        try:
            found |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
        except psutil.Error:  # it has ended, or access is denied
            continue
    return found


def reader_for(job: TelemetryJob, pids: Pids) -> GpuReader:
    """Return the reader for a job.

    Raises:
        OSError: this machine lacks a library or file that the reader needs.
    """
    cards = job.cards
    if cards.method == "sysfs":
        return SysfsReader(Path(job.root), cards.addresses, pids)
    if cards.method == "pdh":
        return PdhReader(load_pdh(), cards.count, cards.total_bytes, pids)
    return NvmlReader(load_nvml(), cards.count, pids)


def read_on(reader: GpuReader, notify: Emit, wait: Callable[[], object]) -> None:
    """Read forever, and pass each reading to ``notify``. A value that cannot be read is reported once."""
    said, failed, empty = set[tuple[str, str]](), set[str](), 0
    while True:
        found = list[TelemetryEvent]()
        try:
            found = reader.read()
        except OSError as error:
            if str(error) not in failed:
                failed.add(str(error))
                notify(NoticeEvent(text=f"The GPU cannot be read: {error}. Training does not need it."))
        for event in found:
            notify(event)
            new = {what: why for what, why in faults(event) if (event.gpu, what) not in said}
            if new:
                said |= {(event.gpu, what) for what in new}
                listed = "; ".join(f"{what} ({why})" for what, why in new.items())
                notify(
                    NoticeEvent(
                        text=f"Some values of GPU {event.gpu} cannot be read: {listed}. Training does not need them."
                    )
                )
        empty = 0 if found else empty + 1
        if empty == UNFOUND_READS:
            notify(
                NoticeEvent(
                    text="Temperature, power and memory are not read: the run has not been found on any GPU so far."
                )
            )
        wait()


def main() -> int:
    """Do the job that is the command's argument, and return the exit code.

    An error becomes a notice on standard output.
    """
    if sys.argv[1:2] == ["--show"]:
        return show(int(sys.argv[2]))
    job = TelemetryJob.from_text(sys.argv[1])

    def leave_with_parent() -> None:
        while os.read(sys.stdin.fileno(), 1):  # unbuffered: a buffer's lock would be held at exit
            pass
        os._exit(0)

    def wait() -> None:
        sys.stdout.write("\n")  # a sign of life, even without an event
        sys.stdout.flush()
        time.sleep(job.every_s)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    try:
        read_on(reader_for(job, lambda: family(job.pids)), emit, wait)
    except Exception as error:  # edge: a driver's library may answer anything
        traceback.print_exc()
        emit(NoticeEvent(text=f"Temperature, power and memory of the GPU are no longer read: {error}."))
    return EXPLAINED


def show(count: int) -> int:
    """Print ``count`` readings of the GPUs that a run on this machine would use; return the exit code."""
    facts = probe()
    cards = cards_of(facts, select(facts, os.environ), os.environ, "auto")
    if not isinstance(cards, Cards):
        sys.stdout.write(f"{cards or 'There is no GPU, or this torch cannot use it.'}\n")
        return EXPLAINED
    job = TelemetryJob(replace(cards, count=0), (os.getpid(),))
    for line in _lines(reader_for(job, lambda: job.pids), count):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    return 0


def _lines(reader: GpuReader, count: int) -> Iterator[str]:
    for number in range(count):
        time.sleep(1.0 if number else 0.0)
        began_s = time.perf_counter()
        found = reader.read()
        took_ms = (time.perf_counter() - began_s) * 1e3
        yield f"reading {number + 1}, {took_ms:.1f} ms, {len(found)} GPU(s)"
        for event in found:
            yield f"  {event.gpu}: {long_text(event)}"
            yield from (f"    not read: {what} ({why})" for what, why in event.unread.items())
            yield f"    {event.model_dump_json()}"


if __name__ == "__main__":
    sys.exit(main())
