"""Bounded reading of untrusted paths: only regular files up to a given size are read.

A pipe or a device in place of the file would block the reader or never end. Standard library only.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileVersion:
    """Identifies a version of a file without reading its content.

    inode: the file's number in its file system. The device number changes with every mount,
        so it is not part of the version.
    """

    path: str
    num_bytes: int
    changed_ns: int
    inode_changed_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path, found: os.stat_result | None = None) -> FileVersion:
        """The version of the file now, or of an earlier ``found = path.stat()``.

        Raises:
            OSError: the file cannot be examined.
        """
        found = path.stat() if found is None else found
        return cls(str(path.absolute()), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def check_plain(path: Path, max_bytes: int) -> int:
    """Return the size of a regular file in bytes. Links are followed.

    Raises:
        OSError: the file is missing, is a folder, pipe or device, or is larger than ``max_bytes``.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if found.st_size > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {_size(max_bytes)}", str(path))
    return found.st_size


def read_plain(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: as ``check_plain``, or the file cannot be read.
    """
    check_plain(path, max_bytes)
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:  # it grew meanwhile
        raise OSError(errno.EFBIG, f"it is larger than {_size(max_bytes)}", str(path))
    return content


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"
