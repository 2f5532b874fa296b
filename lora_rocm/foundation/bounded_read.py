"""Reads files from untrusted paths safely: only regular files up to a maximum size are accepted.

A pipe or device in place of the file could block the reader or never end. This module imports only the standard
library.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileVersion:
    """The state of a file, so that changes are noticed without reading its content.

    ``inode`` is the file's number in its file system. The device number is not included, because it changes with
    every mount.
    """

    path: str
    num_bytes: int
    changed_ns: int
    inode_changed_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path, found: os.stat_result | None = None) -> FileVersion:
        """Return the file's version, now or at the time of ``found``, which is an earlier result of ``path.stat()``.

        Raises:
            OSError: the file's status cannot be read.
        """
        found = path.stat() if found is None else found
        return cls(str(path.absolute()), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def check_plain(path: Path, max_bytes: int) -> int:
    """Return the size of a regular file in bytes. Links are followed.

    Raises:
        OSError: the path is missing, is a folder, pipe or device, or the file is larger than ``max_bytes``.
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
        OSError: see ``check_plain``, or the file cannot be read.
    """
    check_plain(path, max_bytes)
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:  # it grew meanwhile
        raise OSError(errno.EFBIG, f"it is larger than {_size(max_bytes)}", str(path))
    return content


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"
