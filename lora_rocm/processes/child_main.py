"""Entry point of all child processes that import torch. It imports another module and calls its ``main``.

Command: ``python -P -m ...child_main [--leave-with-parent] MODULE [ARGUMENT ...]``. This module itself does not
import torch. So it can report to the parent that a package cannot be imported.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
import traceback

from lora_rocm.foundation.output_stream import outlive
from lora_rocm.foundation.packages import imported, unusable
from lora_rocm.processes import lazy_packages
from lora_rocm.rundir.event_types import ErrorEvent
from lora_rocm.rundir.events import emit

LEAVE_WITH_PARENT = "--leave-with-parent"
ORPHANED_CODE = 1


def main() -> int:
    """Import the module named by the first argument, call its ``main``, and return the exit code.

    ``main`` reads ``sys.argv``.
    """
    sys.stderr = outlive(sys.stderr)
    sys.argv = sys.argv[1:]
    if sys.argv[:1] == [LEAVE_WITH_PARENT]:
        sys.argv = sys.argv[1:]
        threading.Thread(target=_leave_with_parent, daemon=True, name="parent-watch").start()
    gc.disable()
    lazy_packages.install()
    try:
        module = importlib.import_module(sys.argv[0])
    except Exception as error:  # edge: a broken package may raise anything while it is imported
        return _reported(error)
    if not getattr(module, "IMPORTS_MORE", False):
        imported()
    try:
        return int(module.main())
    except ImportError as error:  # from a package that is imported late
        return _reported(error)


def _leave_with_parent() -> None:
    """Exit when standard input closes. Standard input is a pipe from the parent.

    When it closes, no process waits for an answer any longer.

    The system closes the pipe whenever the parent ends, even if it is killed.
    """
    while os.read(sys.stdin.fileno(), 4096):  # unbuffered: a buffer's lock would be held at interpreter exit
        pass
    os._exit(ORPHANED_CODE)


def _reported(error: Exception) -> int:
    traceback.print_exc()
    explained = unusable(error)
    emit(ErrorEvent(**explained.to_event()))
    return explained.exit_code


if __name__ == "__main__":
    sys.exit(main())
