"""Finds files with exactly the same content."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path

from lora_rocm.dataset.sources.scan import groups_of
from lora_rocm.foundation.bounded_read import read_plain

MAX_FILE_BYTES = 1 << 28


def equal_files(paths: Sequence[Path]) -> list[list[int]]:
    """Return groups of files with the same content, as positions in ``paths``.

    A file is only read if another one has the same size. Files that cannot be read are in no group.
    """
    sizes = dict[int, int]()
    for place, path in enumerate(paths):
        with contextlib.suppress(OSError):
            sizes[place] = path.stat().st_size
    sized, hashes = list(sizes), dict[int, bytes]()
    for place in (sized[each] for group in groups_of(sizes.values()) for each in group):
        with contextlib.suppress(OSError):
            hashes[place] = hashlib.sha256(read_plain(paths[place], MAX_FILE_BYTES)).digest()
    hashed = list(hashes)
    return [[hashed[each] for each in group] for group in groups_of(hashes.values())]
