"""Windows job objects: a process and all its descendants in one object, so that they can be killed together.

A job object survives its last handle (JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE is not set), so that a worker can save and
exit by itself after its parent died. Source: learn.microsoft.com, Win32 API, Job Objects. On other systems this
module has no effect.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

PROCESS_TERMINATE, PROCESS_SET_QUOTA = 0x0001, 0x0100  # required by AssignProcessToJobObject
KILLED_CODE = 137


class JobObject:
    """A Windows job object.

    Args:
        kernel32: the library as ``ctypes`` loads it; None to create no job object, so that all methods do nothing.
        pid: id of the process to add. Processes that it started earlier are not added.
    """

    def __init__(self, kernel32: Any, pid: int) -> None:
        self._kernel32 = kernel32
        self._handle: int | None = kernel32.CreateJobObjectW(None, None) if kernel32 is not None else None
        if self._handle and not self._assign(pid):
            self.close()  # the process that started us forbids it; psutil's process tree has to do

    @classmethod
    def of(cls, pid: int) -> JobObject:
        """Return a job object that contains a process. On systems other than Windows its methods do nothing."""
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
        """End all processes in the job object."""
        if self._handle:
            self._kernel32.TerminateJobObject(self._handle, KILLED_CODE)

    def close(self) -> None:
        """Close the handle. The processes in the job object continue to run."""
        if self._handle:
            self._kernel32.CloseHandle(self._handle)
        self._handle = None


def _kernel32() -> Any:
    """Return the library with typed functions.

    Without types, ctypes would truncate handles, which are as wide as pointers.
    """
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
