"""Reading files that somebody else may have put there: plain ones of a bounded size, and nothing else.

A pipe or a device that lies where a file is expected would be waited for, or read, without end. Standard library only.
"""

from __future__ import annotations

import errno
import stat
from pathlib import Path


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
