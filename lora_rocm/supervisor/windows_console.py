"""A Windows console that is closed, and the end of the session, as a request to stop. Elsewhere nothing is done.

The system ends a process some seconds after it has told it (HungAppTimeout, 5 s), or at once when the handler returns.
Source: learn.microsoft.com, HandlerRoutine and SetConsoleCtrlHandler.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

CLOSE, LOGOFF, SHUTDOWN = 2, 5, 6
HANDLER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_ulong)  # 64-bit Windows has one calling convention


@contextmanager
def told_of_closing(on_closing: Callable[[], None], kernel32: Any = None) -> Iterator[None]:
    """Call ``on_closing``, in a thread of the system's, when the console goes away; the process then has seconds.

    Args:
        on_closing: must be quick.
        kernel32: its calls, as ``ctypes`` gives them; None: this system's, where there are any.
    """
    library = kernel32 if kernel32 is not None else _kernel32()
    if library is None:
        yield
        return

    def handle(event: int) -> int:
        if event not in (CLOSE, LOGOFF, SHUTDOWN):
            return 0  # Ctrl-C and Ctrl-Break are Python's
        on_closing()
        threading.Event().wait()  # to return would end the process now
        return 1

    handler = HANDLER(handle)
    library.SetConsoleCtrlHandler(handler, True)
    try:
        yield
    finally:
        library.SetConsoleCtrlHandler(handler, False)


def _kernel32() -> Any:
    if sys.platform != "win32":
        return None
    library = ctypes.WinDLL("kernel32", use_last_error=True)
    library.SetConsoleCtrlHandler.argtypes = [HANDLER, ctypes.c_int]
    library.SetConsoleCtrlHandler.restype = ctypes.c_int
    return library
