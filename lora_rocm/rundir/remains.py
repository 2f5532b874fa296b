"""Detects, by name, temporary files and folders that killed writers have left."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from lora_rocm.errors import LoraRocmError, StoppedError
from lora_rocm.foundation.files import is_folder, remove

TEMPORARY = re.compile(r"\.(?P<name>.+?)\.(?P<pid>\d{1,9})(\.[0-9a-f]{8})?\.tmp")
"""Pattern for names of temporary files and folders (``foundation.files``, ``export.gguf``, ``train.checkpoint``)."""
OF_PEFT = re.compile(r"adapter_model\.safetensors|adapter_config\.json")


def is_abandoned(name: str) -> bool:
    """Whether this is the name of a temporary file of a process that has ended."""
    found = TEMPORARY.fullmatch(name)
    if found is None:
        return False
    import psutil  # rarely needed, and a tenth of the start of `runs`

    return not psutil.pid_exists(int(found["pid"]))


def discard_abandoned(target: Path) -> None:
    """Remove temporary files that killed writers left next to a file or folder, and inside it if it is a PEFT folder.

    Files of a writer that is still running are kept. Other files are never touched, and links inside the target are not
    followed.
    """
    for path in _remains(target):
        if is_abandoned(path.name):
            discard(path)


@contextlib.contextmanager
def leaving_nothing(target: Path) -> Iterator[None]:
    """Leave nothing new if a writer of a file or folder is stopped, and no empty folder if it fails.

    A target that was there before is kept.
    """
    new = [path for path in (target, *target.parents) if not os.path.lexists(path)]
    try:
        yield
    except (StoppedError, KeyboardInterrupt):
        discard_abandoned(target)
        if target in new:
            discard(target)
        _discard_empty(new)
        raise
    except LoraRocmError:
        _discard_empty(new)
        raise


def _discard_empty(folders: list[Path]) -> None:
    """Remove folders, the innermost first, up to the first one with content."""
    with contextlib.suppress(OSError):
        for folder in filter(is_folder, folders):
            folder.rmdir()  # writes: removes nothing but empty folders


def discard(path: Path) -> None:
    """Remove a temporary file or folder. A failure is ignored, because the next start tries again."""
    with contextlib.suppress(OSError):
        remove(path)


def _remains(target: Path) -> Iterator[Path]:
    yield from _temporary_in(target.parent, re.compile(re.escape(target.name)))
    for folder in filter(is_folder, _inside(target) if is_folder(target) else ()):
        yield from _temporary_in(folder, OF_PEFT)


def _temporary_in(folder: Path, names: re.Pattern[str]) -> list[Path]:
    matches = [(TEMPORARY.fullmatch(path.name), path) for path in _inside(folder)]
    return [path for match, path in matches if match and names.fullmatch(match["name"])]


def _inside(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):  # it does not exist, or this user may not read it
        return sorted(folder.iterdir())
    return []
