"""Windows job objects: a process and everything that it starts, which can be killed together. No effect elsewhere.

A job outlives its last handle (JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE is not set), because a worker saves and exits by
itself after its parent died. Source: learn.microsoft.com, Win32 API, Job Objects.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

PROCESS_TERMINATE, PROCESS_SET_QUOTA = 0x0001, 0x0100  # required by AssignProcessToJobObject
KILLED_CODE = 137


class JobObject:
    """One job object.

    Args:
        kernel32: the library's functions, as ``ctypes`` gives them; None: there is no job, and every call does nothing.
        pid: the process to add to the job. Processes that it started before are not in the job.
    """

    def __init__(self, kernel32: Any, pid: int) -> None:
        self._kernel32 = kernel32
        self._handle: int | None = kernel32.CreateJobObjectW(None, None) if kernel32 is not None else None
        if self._handle and not self._assign(pid):
            self.close()  # the process that started us forbids it; psutil's process tree has to do

    @classmethod
    def of(cls, pid: int) -> JobObject:
        """A job with this process in it; without effect except on Windows."""
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
        """End every process in the job."""
        if self._handle:
            self._kernel32.TerminateJobObject(self._handle, KILLED_CODE)

    def close(self) -> None:
        """Close the handle; the processes in the job continue."""
        if self._handle:
            self._kernel32.CloseHandle(self._handle)
        self._handle = None


def _kernel32() -> Any:
    """The functions with their types: handles are as wide as pointers, and ctypes would truncate them to int."""
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
