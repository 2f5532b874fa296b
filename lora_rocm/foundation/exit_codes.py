"""Converts the end of a command to an exit code, and exceptions to messages without a traceback."""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import nullcontext

from lora_rocm.errors import LoraRocmError, MachineError, StoppedError, storage_error
from lora_rocm.foundation.output_stream import drop_unwritten, outliving_stdout
from lora_rocm.foundation.terminal_text import legible


def report_error(error: LoraRocmError) -> None:
    """Write an error message to standard error."""
    sys.stderr.write(legible(str(error), keep="\n") + "\n")


def exit_code_of(
    command: Callable[[], int | None],
    *,
    outlives_output: bool = False,
    report: Callable[[LoraRocmError], None] = report_error,
) -> int:
    """Run a command and return its exit code. Errors are reported.

    Args:
        command: returns an exit code, or None for 0.
        outlives_output: whether the command continues if standard output cannot be written.
        report: called with the error if the command fails.
    """
    error: LoraRocmError
    # Run the command, and turn every exception into one of our errors.
    try:
        with outliving_stdout() if outlives_output else nullcontext():
            return command() or 0
    except LoraRocmError as raised:
        error = raised
    except KeyboardInterrupt:
        error = StoppedError("stopped", "Stopped.")
    except BrokenPipeError:
        return _without_reader()
    except OSError as raised:
        error = storage_error(raised, raised.filename or "")
    except MemoryError:
        fix = "Close other programs, or raise the limit (ulimit -v)."
        error = MachineError("main-memory-full", "The main memory is used up.", fix=fix)
    except Exception as raised:  # edge: one sentence for the user, the traceback in a file
        with tempfile.NamedTemporaryFile(
            "w", prefix="lora-rocm-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            traceback.print_exc(file=file)
        what = f"This is a bug in lora-rocm: {type(raised).__name__}: {raised}"
        error = MachineError("bug", what, where=file.name, fix="Please report it with that file attached.")
    # Report it; standard error may be gone, too.
    try:
        report(error)
    except OSError:
        _without_reader()
    return error.exit_code


def _without_reader() -> int:
    """Redirect standard output to the null device after its reader has gone, and return the exit code.

    Otherwise Python complains when it flushes standard output at exit.
    """
    drop_unwritten(sys.stdout)
    return StoppedError.exit_code
