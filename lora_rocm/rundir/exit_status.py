"""Describes how a child process ended: exit code, signal, and the end of its log."""

from __future__ import annotations

import signal
from pathlib import Path

from lora_rocm.errors import WorkerDiedError

TAIL_LINES = 8
TAIL_COLUMNS = 300
TAIL_BYTES = 16384
# Exit codes of crashed processes on Windows (NTSTATUS values, ntstatus.h).
NTSTATUS = {0xC0000005: "access violation", 0xC00000FD: "stack overflow", 0xC0000409: "fail-fast or stack overrun"}


def worker_died_error(
    who: str, returncode: int, log: bytes, fix: str = "", fix_without_checkpoint: str = ""
) -> WorkerDiedError:
    """Return the error for a child process that ended without reporting one. ``log``: the end of its output."""
    what = f"{who} ended without saying why: {describe_exit(returncode)}."
    if returncode in (-9, 137):
        what += " The system does this when memory (RAM) runs out."
    tail = _last_lines(log)
    if tail:
        what += "\nThe end of its log:\n" + "\n".join(f"    {line}" for line in tail)
    return WorkerDiedError("worker-died", what, fix=fix, fix_without_checkpoint=fix_without_checkpoint)


def describe_exit(returncode: int) -> str:
    """Describe a return code, with the name of the signal or of the Windows crash code."""
    if returncode < 0:
        try:
            return f"killed by signal {signal.Signals(-returncode).name}"
        except ValueError:
            return f"killed by signal {-returncode}"
    code = returncode & 0xFFFFFFFF
    if code >= 0xC0000000:
        return f"crashed with code 0x{code:08X}" + (f" ({NTSTATUS[code]})" if code in NTSTATUS else "")
    return f"exit code {returncode}"


def tail_bytes(log: Path, start: int) -> bytes:
    """The end of the bytes that were written to ``log`` after position ``start``."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, size_of(log) - TAIL_BYTES))
            return file.read()
    except OSError:
        return b""


def _last_lines(log: bytes) -> list[str]:
    """The last lines, made printable. Of a traceback only its last line is kept (the log has the rest)."""
    lines = log[-TAIL_BYTES:].decode("utf-8", "replace").splitlines()
    first = next((n for n, line in enumerate(lines) if line.startswith("Traceback (most recent call")), len(lines))
    kept = lines[:first] + ([lines[-1]] if first < len(lines) else [])
    return [
        "".join(letter if letter.isprintable() else " " for letter in line[:TAIL_COLUMNS])
        for line in kept[-TAIL_LINES:]
    ]


def size_of(path: Path) -> int:
    """Size of a file in bytes; 0 if it does not exist or cannot be examined."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
