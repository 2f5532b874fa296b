"""Handles the closing of a Windows console, and the end of the session, as a request to stop.

Windows ends a process a few seconds after notifying it (HungAppTimeout, 5 s), or at once when the handler returns.
Source: learn.microsoft.com, HandlerRoutine and SetConsoleCtrlHandler. On other systems this module has no effect.
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
def on_console_close(on_closing: Callable[[], None], kernel32: Any = None) -> Iterator[None]:
    """Call ``on_closing`` in a system thread if the console closes within this context. A few seconds are then left.

    Args:
        on_closing: has to return quickly.
        kernel32: the library as ``ctypes`` loads it. None to load it on Windows, and to do nothing on other systems.
    """
    library = kernel32 if kernel32 is not None else _kernel32()
    if library is None:
        yield
        return

    def handle(event: int) -> int:
        if event not in (CLOSE, LOGOFF, SHUTDOWN):
            return 0  # Python handles Ctrl-C and Ctrl-Break
        on_closing()
        threading.Event().wait()  # returning would end the process now
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
