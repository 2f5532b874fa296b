"""Reading files that somebody else may have put there: plain ones of a bounded size, and nothing else.

A pipe or a device that lies where a file is expected would be waited for, or read, without end. Standard library only.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileVersion:
    """What tells one version of a file from another without reading it.

    inode: of the file system; the number of the device besides would change with every mount.
    """

    path: str
    num_bytes: int
    changed_ns: int
    inode_changed_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path, found: os.stat_result | None = None) -> FileVersion:
        """Of a file now, or as it was ``found``.

        Raises:
            OSError: it cannot be looked at.
        """
        found = path.stat() if found is None else found
        return cls(str(path.absolute()), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def check_plain(path: Path, max_bytes: int) -> int:
    """The size of a plain file in bytes; links are followed.

    Raises:
        OSError: there is none, it is a folder, a pipe or a device, or it is larger than ``max_bytes``.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    if found.st_size > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {_size(max_bytes)}", str(path))
    return found.st_size


def read_plain(path: Path, max_bytes: int) -> bytes:
    """The content of a plain file.

    Raises:
        OSError: as ``check_plain``, or it cannot be read.
    """
    check_plain(path, max_bytes)
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:  # it grew meanwhile
        raise OSError(errno.EFBIG, f"it is larger than {_size(max_bytes)}", str(path))
    return content


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"
