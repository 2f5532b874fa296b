"""Windows API calls of the probe: registry, memory, DLL versions. Standard library only.

The module can be imported on every system, but its functions work only on Windows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

DLL_BYTES_OF_VERSION = 8


class RealRegistry:
    """This machine's registry (Windows only)."""

    def values(self, key: str) -> dict[str, Any]:
        """Return the values of a key below HKEY_LOCAL_MACHINE, by name."""
        import winreg as registry

        api: Any = registry
        with api.OpenKey(api.HKEY_LOCAL_MACHINE, key) as opened:
            count = api.QueryInfoKey(opened)[1]
            return {name: value for name, value, _ in (api.EnumValue(opened, number) for number in range(count))}

    def keys(self, key: str) -> list[str]:
        """Return the names of a key's subkeys below HKEY_LOCAL_MACHINE."""
        import winreg as registry

        api: Any = registry
        with api.OpenKey(api.HKEY_LOCAL_MACHINE, key) as opened:
            return [api.EnumKey(opened, number) for number in range(api.QueryInfoKey(opened)[0])]


def memory_status() -> tuple[int, int, int]:
    """Return three sizes in bytes: memory, available memory, and memory with the page file. Windows only.

    Raises:
        OSError: the system call failed.
    """
    import ctypes

    longs = ("total", "available", "with_page_file", "page_file_left", "virtual", "virtual_left", "extended")

    class Status(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ulong), ("load", ctypes.c_ulong)] + [
            (name, ctypes.c_ulonglong) for name in longs
        ]

    status = Status()
    status.length = ctypes.sizeof(status)
    api: Any = ctypes
    if not api.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        raise OSError("GlobalMemoryStatusEx failed")
    return status.total, status.available, status.with_page_file


def file_version(path: Path) -> str | None:
    """Return a DLL's version from its version resource ("10.0.3551.0"), or None if it has none. Windows only."""
    import ctypes

    api: Any = ctypes
    library = api.windll.version
    size = library.GetFileVersionInfoSizeW(str(path), None)
    if not size:
        return None
    data, found, length = ctypes.create_string_buffer(size), ctypes.c_void_p(), ctypes.c_uint()
    if not library.GetFileVersionInfoW(str(path), 0, size, data):
        return None
    if not library.VerQueryValueW(data, "\\", ctypes.byref(found), ctypes.byref(length)) or not found.value:
        return None
    # VS_FIXEDFILEINFO: signature and structure version, then the file version as two 32-bit words
    words = ctypes.string_at(found.value + DLL_BYTES_OF_VERSION, 8)
    high, low = int.from_bytes(words[:4], "little"), int.from_bytes(words[4:], "little")
    return f"{high >> 16}.{high & 0xFFFF}.{low >> 16}.{low & 0xFFFF}"
