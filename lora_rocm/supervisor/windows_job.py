"""Windows job objects: a process and all that it starts, as one thing that can be ended. Elsewhere a job does nothing.

A job is not ended with its last handle (JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE is left alone): a worker whose parent died
saves and leaves by itself. Source: learn.microsoft.com, Win32 API, Job Objects.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

PROCESS_TERMINATE, PROCESS_SET_QUOTA = 0x0001, 0x0100  # what AssignProcessToJobObject asks for
KILLED_CODE = 137


class Job:
    """One job object.

    Args:
        kernel32: its calls, as ``ctypes`` gives them; None: there is no job, and every call does nothing.
        pid: of the process that is put into it. What it started before that moment is not in the job.
    """

    def __init__(self, kernel32: Any, pid: int) -> None:
        self._kernel32 = kernel32
        self._handle: int | None = kernel32.CreateJobObjectW(None, None) if kernel32 is not None else None
        if self._handle and not self._assign(pid):
            self.close()  # whoever started us does not allow it; psutil's view of the tree has to do

    @classmethod
    def of(cls, pid: int) -> Job:
        """A job with this process in it, on Windows."""
        return cls(_kernel32() if sys.platform == "win32" else None, pid)

    def _assign(self, pid: int) -> bool:
        process = self._kernel32.OpenProcess(PROCESS_SET_QUOTA | PROCESS_TERMINATE, False, pid)
        if not process:
            return False
        try:
            return bool(self._kernel32.AssignProcessToJobObject(self._handle, process))
        finally:
            self._kernel32.CloseHandle(process)

    def terminate(self) -> None:
        """End every process in it."""
        if self._handle:
            self._kernel32.TerminateJobObject(self._handle, KILLED_CODE)

    def close(self) -> None:
        """Let go of it; the processes in it go on."""
        if self._handle:
            self._kernel32.CloseHandle(self._handle)
        self._handle = None


def _kernel32() -> Any:
    """The calls with their types: a handle is as wide as a pointer, and ctypes would cut it to an int."""
    if sys.platform != "win32":
        return None
    from ctypes import wintypes

    library = ctypes.WinDLL("kernel32", use_last_error=True)
    handle, number = wintypes.HANDLE, wintypes.DWORD
    for name, arguments, result in (
        ("CreateJobObjectW", [ctypes.c_void_p, wintypes.LPCWSTR], handle),
        ("OpenProcess", [number, wintypes.BOOL, number], handle),
        ("AssignProcessToJobObject", [handle, handle], wintypes.BOOL),
        ("TerminateJobObject", [handle, wintypes.UINT], wintypes.BOOL),
        ("CloseHandle", [handle], wintypes.BOOL),
    ):
        call = getattr(library, name)
        call.argtypes, call.restype = arguments, result
    return library
