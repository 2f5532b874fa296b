"""The folders that the user named. Only this module turns text of a request into a path.

A path is accepted if it is in one of these folders after all links are resolved. So neither ``..`` nor a link leads
out of them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from lora_rocm.commands.cli_queue import DEFAULT_QUEUE, QUEUE_VARIABLE
from lora_rocm.errors import UserError
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.newest import is_run

MAX_PATH_LETTERS = 4096
MAX_SUBFOLDERS = 500
MODELS = "models"
"""Reason of a folder in which base models are searched. Its images are not offered as a dataset."""


@dataclass(frozen=True)
class NamedFolder:
    """A folder that the user named. reason: the key of a text (``folders.REASON``), such as working or models."""

    path: Path
    reason: str


class Folders:
    """The folders that requests may name.

    Args:
        working: the folder in which the server was started, or that its command names. Relative paths start there.
        runs: the folder of runs; new runs go there.
    """

    def __init__(self, working: Path, runs: Path) -> None:
        self.working = working.resolve()
        self.runs = (self.working / runs).resolve()
        self.queue = (self.working / (os.environ.get(QUEUE_VARIABLE) or DEFAULT_QUEUE)).resolve()
        self._lock = threading.Lock()
        self._named = [NamedFolder(self.working, "working"), NamedFolder(self.runs, "runs")]

    @property
    def named(self) -> list[NamedFolder]:
        """All folders, in the order in which they were named."""
        with self._lock:
            return list(self._named)

    def add(self, path: Path, reason: str) -> NamedFolder:
        """Add a folder that the user named: in the page ("added"), or in a recipe ("data").

        Raises:
            UserError: no-folder: there is no such folder.
        """
        found = (self.working / path.expanduser()).resolve()
        if not found.is_dir():
            fix = "Write the whole path of a folder that exists."
            raise UserError("no-folder", "There is no such folder.", where=str(path), fix=fix)
        with self._lock:
            known = next((each for each in self._named if each.path == found), None)
            if known is None:
                known = NamedFolder(found, reason)
                self._named.append(known)
            elif known.reason == MODELS and reason != MODELS:  # the user now means it for more than models
                at = self._named.index(known)
                known = self._named[at] = NamedFolder(found, reason)
        return known

    def resolve(self, text: str) -> Path:
        """Return the path that a request names, with all links resolved. It may not exist.

        Args:
            text: a path; relative ones start in the working folder.

        Raises:
            UserError: outside-folders: the path is in none of the named folders, or is not a path.
        """
        if not text or len(text) > MAX_PATH_LETTERS or "\0" in text:
            raise _refused(text)
        if os.name == "nt" and (text.startswith(("\\\\", "//")) or ":" in text[2:]):  # other machines, data streams
            raise _refused(text)
        try:
            found = (self.working / text).resolve()
        except (OSError, ValueError, RuntimeError):  # a circle of links, or letters that no path has
            raise _refused(text) from None
        if not any(found.is_relative_to(each.path) for each in self.named):
            raise _refused(text)
        return found

    def run(self, text: str) -> RunDir:
        """Return the run that a request names.

        Raises:
            UserError: outside-folders; or no-run: there is no run at this path.
        """
        found = self.resolve(text)
        if not is_run(found):
            fix = "It may have been moved or deleted. The list of runs shows those that exist."
            raise UserError("no-run", "There is no run here.", where=str(found), fix=fix)
        return RunDir(found)

    def name_of(self, path: Path) -> str:
        """Return the text with which a request names a path: short in the working folder, else the whole path."""
        if path.is_relative_to(self.working):
            return path.relative_to(self.working).as_posix()
        return str(path)

    def run_folders(self) -> list[Path]:
        """Return the folders in which runs are listed.

        These are the folder of new runs, folders with runs directly in the working folder (a recipe's ``output.dir``
        may be any), and folders that the user added.
        """
        added = [each.path for each in self.named if each.reason == "added"]
        return list(_distinct([self.runs, *_folders_with_runs(self.working), *added]))


def _folders_with_runs(folder: Path) -> Iterable[Path]:
    """Yield the folders directly in a folder that contain a run. Hidden folders, links and runs are skipped."""
    for path in _subfolders(folder):
        if not is_run(path) and any(map(is_run, _subfolders(path))):
            yield path


def _subfolders(folder: Path) -> Iterable[Path]:
    """Yield the first folders in a folder; none if it cannot be read."""
    try:
        with os.scandir(folder) as listed:
            folders = (each for each in listed if each.is_dir(follow_symlinks=False) and not each.name.startswith("."))
            yield from (Path(each.path) for each in islice(folders, MAX_SUBFOLDERS))
    except OSError:
        return


def _distinct(paths: Iterable[Path]) -> Iterable[Path]:
    return dict.fromkeys(paths)


def _refused(text: str) -> UserError:
    return UserError(
        "outside-folders",
        "This path is not in a folder that you named.",
        where=text[:200].replace("\0", "?"),
        fix="Add its folder on the page Machine, or start lora-rocm ui in a folder that contains it.",
    )
