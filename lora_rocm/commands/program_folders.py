"""The model folders of ComfyUI, Forge and programs like them on this machine (``program_folders.toml``)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lora_rocm.foundation.tables import read_table

LORAS = "loras"
MAX_ENTRIES = 2000


@dataclass(frozen=True)
class FolderTable:
    """The table ``program_folders.toml``.

    Attributes:
        roots: folders of a program in which its folder of models may be.
        programs: pieces of the names of folders in which programs are installed, in lower case.
        near: folders in the home folder in which programs are searched.
        places: folders of models by kind.
    """

    roots: tuple[str, ...]
    programs: tuple[str, ...]
    near: tuple[str, ...]
    places: Mapping[str, tuple[str, ...]]


@cache
def _table() -> FolderTable:
    return read_table(Path(__file__).with_name("program_folders.toml"), FolderTable)


def kinds_of_bases() -> tuple[str, ...]:
    """Return the kinds of folders that contain base models or their parts."""
    return tuple(kind for kind in _table().places if kind != LORAS)


def program_folders(kinds: Iterable[str], home: Path, around: Iterable[Path] = ()) -> list[Path]:
    """Return the existing folders of these programs for some kinds of models.

    Args:
        kinds: the kinds.
        home: the user's home folder.
        around: further folders in which the programs may be.
    """
    kinds = tuple(kinds)
    searched = dict.fromkeys([*(home / name for name in _table().near), *around])
    programs = (program for folder in searched for program in _programs(folder))
    return list(dict.fromkeys(path.resolve() for program in programs for path in folders_in(program, kinds)))


def folders_in(program: Path, kinds: Iterable[str]) -> Iterator[Path]:
    """Yield the existing folders in a program's own folder for some kinds of models."""
    places = [place for kind in kinds for place in _table().places[kind]]
    for path in (program / root / place for root in _table().roots for place in places):
        with contextlib.suppress(OSError):
            if path.is_dir():
                yield path


def _programs(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number >= MAX_ENTRIES:
                return
            if any(name in entry.name.lower() for name in _table().programs):
                yield folder / entry.name
