"""Maps the end of a command to an exit code, and an exception to a message instead of a traceback."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import nullcontext

from lora_rocm.errors import LoraRocmError, MachineError, StoppedError, storage_error
from lora_rocm.foundation.output_stream import outliving_stdout
from lora_rocm.foundation.terminal_text import legible


def exit_code_of(command: Callable[[], int | None], *, outlives_output: bool = False) -> int:
    """Run a command and return its exit code. Errors are reported on standard error.

    Args:
        command: returns its exit code; None counts as 0.
        outlives_output: keep running if standard output cannot be written. The command's results lie elsewhere.
    """
    try:
        with outliving_stdout() if outlives_output else nullcontext():
            return command() or 0
    except LoraRocmError as error:
        _tell(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _tell("Stopped.")
        return StoppedError.exit_code
    except BrokenPipeError:  # the reader of our output is gone; without a new stdout Python complains at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return StoppedError.exit_code
    except OSError as error:
        _tell(str(storage_error(error, error.filename or "")))
        return MachineError.exit_code
    except MemoryError:
        _tell("The main memory is used up.\n  fix:   Close other programs, or raise the limit (ulimit -v).")
        return MachineError.exit_code
    except Exception as error:  # the edge of the process: told in a sentence and kept in a file
        with tempfile.NamedTemporaryFile(
            "w", prefix="lora-rocm-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            traceback.print_exc(file=file)
        _tell(
            f"This is a bug in lora-rocm: {type(error).__name__}: {error}\n"
            f"  where: {file.name}\n  fix:   Please report it with that file attached."
        )
        return MachineError.exit_code


def _tell(text: str) -> None:
    sys.stderr.write(legible(text, keep="\n") + "\n")
