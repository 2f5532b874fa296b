"""Maintains a cache folder: statistics, verification and pruning. Needs no torch.

At most one entry is in memory. Only files that the cache wrote are touched, recognised by location and name. Links are
never followed. Maintenance is safe during a run: if an entry that the run needs is deleted, the run encodes it again.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby
from pathlib import Path

import psutil

from lora_rocm.cache_store import entry_file
from lora_rocm.cache_store.entry_file import CacheEntryBad, check_bytes, check_place, read_entry, read_header
from lora_rocm.cache_store.hash_memory import IMAGES_MEMORY, WEIGHTS_MEMORY
from lora_rocm.dataset.entry_spec import ENTRY_NAME as ENTRY_KIND
from lora_rocm.errors import MachineError, StorageError, UserError, storage_error
from lora_rocm.foundation.files import is_folder, is_link
from lora_rocm.foundation.terminal_text import printable

ENTRY_NAME = re.compile(r"([0-9a-f]{40})(?:-([1-9][0-9]{0,8}))?\.safetensors")
TEMPORARY_NAME = re.compile(r"\.[0-9a-f]{40}(?:-[0-9]{1,9})?\.safetensors\.([0-9]{1,9})(?:\.[0-9a-f]{8})?\.tmp")
KEY_START = re.compile("[0-9a-f]{2}")
KNOWN_KINDS = ("image", "text")
MANIFESTS = "manifests"
MANIFEST_NAME = re.compile(r"([0-9a-f]{40})")
MANIFEST_TEMPORARY_NAME = re.compile(r"\.[0-9a-f]{40}\.([0-9]{1,9})\.[0-9a-f]{8}\.tmp")
OLD_TEMPORARY_S = 3600
FRESH_TEMPORARY_S = 60  # younger files are kept: the writer may be on another machine that shares the folder
DAY_S = 86400
GOOD, BAD, UNREADABLE, LINK, OLDER, NEWER = "good", "bad", "unreadable", "no plain file", "older", "newer"
NEVER_DELETED = (UNREADABLE, LINK, NEWER)

Notify = Callable[[str], None]


@dataclass(frozen=True)
class File:
    """One file of a cache entry. Each repair of an entry writes a further file.

    number: number of repairs before this file was written.
    found: the file's status when it was examined.
    state: GOOD, BAD, UNREADABLE, LINK, OLDER or NEWER.
    why: the fault; "" if there is none.
    """

    path: Path
    kind: str
    key: str
    number: int
    found: os.stat_result
    state: str
    why: str = ""


def holds_cache(folder: Path) -> bool:
    """Whether a folder is a cache of this program and has no links, which could lead a writer out of the folder."""
    try:
        if not is_folder(folder):
            return False
        places = sorted(folder.iterdir())
        below = [path for place in places if is_folder(place) for path in place.iterdir()]
        marks = [place for place in places if place.name in (IMAGES_MEMORY, WEIGHTS_MEMORY) or _has_entry(place)]
        return bool(marks) and not any(map(is_link, (*places, *below)))
    except (OSError, StorageError):  # of another user
        return False


@dataclass(frozen=True)
class KindStats:
    """Number and total size of the files of one kind.

    files: number of files.
    num_bytes: total size of the files.
    """

    files: int
    num_bytes: int


@dataclass(frozen=True)
class CacheStats:
    """Statistics of a cache folder.

    Attributes:
        folder: the folder.
        kinds: statistics by kind of entry; "(top)" is for files directly in the folder.
    """

    folder: Path
    kinds: dict[str, KindStats]


@dataclass(frozen=True)
class CacheFault:
    """A bad file of an entry that has no good file.

    Attributes:
        path: the file.
        state: bad, unreadable, or no plain file.
        why: the fault.
    """

    path: Path
    state: str
    why: str


@dataclass(frozen=True)
class CacheVerified:
    """The state of all entries' files in a cache folder.

    Attributes:
        folder: the folder.
        good: number of intact files.
        bad: number of files that are damaged, or are not regular files.
        unreadable: number of files that cannot be read.
        replaced: number of bad or unreadable files of entries that also have a good file.
        older: number of files from older versions of the program.
        newer: number of files from newer versions of the program.
        faults: the bad and unreadable files of entries that have no good file.
    """

    folder: Path
    good: int
    bad: int
    unreadable: int
    replaced: int
    older: int
    newer: int
    faults: tuple[CacheFault, ...]

    @property
    def exit_code(self) -> int:
        return MachineError.exit_code if self.bad or self.unreadable else 0


@dataclass(frozen=True)
class CachePruned:
    """The result of pruning a cache folder.

    Attributes:
        folder: the folder.
        dry_run: whether files were only counted, and nothing was deleted.
        freed_bytes: total size of the deleted files.
        deleted: number of deleted files by reason: good (second copies), bad, older, unused, temporary.
        left: number of files that were not deleted, by reason.
        older_than_days: minimum number of days without use after which entries were deleted; null if unused entries
            were kept.
    """

    folder: Path
    dry_run: bool
    freed_bytes: int
    deleted: dict[str, int]
    left: dict[str, int]
    older_than_days: float | None


def stats(folder: Path) -> CacheStats:
    """Return the number and total size of the files of each kind in a cache folder.

    Raises:
        UserError: there is no such folder.
    """
    _check_folder(folder)
    kinds: dict[str, list[int]] = {}
    for place, _, names in os.walk(folder):
        inside = Path(place).relative_to(folder).parts
        for name in names:
            with contextlib.suppress(OSError):  # a run may just have renamed it
                kinds.setdefault(inside[0] if inside else "(top)", []).append(os.lstat(Path(place, name)).st_size)
    found = {kind: KindStats(len(sizes), sum(sizes)) for kind, sizes in sorted(kinds.items())}
    return CacheStats(folder.absolute(), found)


def verify(folder: Path, notify: Notify) -> CacheVerified:
    """Read every entry and compare its bytes with its fingerprints. ``notify`` receives a line for each skipped link.

    Raises:
        UserError: there is no such folder.
    """
    counts: Counter[str] = Counter()
    faults: list[CacheFault] = []
    for files in _entries(folder, notify):
        healthy = any(file.state == GOOD for file in files)
        for file in files:
            wrong = file.state in (BAD, UNREADABLE, LINK)
            counts["replaced" if wrong and healthy else file.state] += 1
            if wrong and not healthy:
                faults.append(CacheFault(file.path.absolute(), file.state, file.why))
    return CacheVerified(
        folder.absolute(),
        counts[GOOD],
        counts[BAD] + counts[LINK],
        counts[UNREADABLE],
        counts["replaced"],
        counts[OLDER],
        counts[NEWER],
        tuple(faults),
    )


@dataclass
class Pruning:
    """Deletes files and counts them.

    dry: whether to only count, and delete nothing.
    freed_bytes: total size of the deleted files.
    done: number of deleted files by reason.
    left: number of files that were not deleted, by reason.
    """

    dry: bool
    freed_bytes: int = 0
    done: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)

    def delete(self, path: Path, found: os.stat_result, why: str) -> None:
        """Delete a file, unless it has changed since it was examined.

        Args:
            path: the file.
            found: the file's status when it was examined.
            why: the reason, under which the file is counted.
        """
        if self._do(path, found, path.unlink):  # writes: only plain files, known by name, place and lstat
            self._count(found, why)

    def move(self, file: File, target: Path, over: File | None) -> bool:
        """Rename a good file of an entry to ``target``. Returns whether it was renamed.

        ``over``: the file that is replaced at ``target``; None if there is none.
        """
        # writes: only plain files, known by name, place and lstat
        moved = self._do(file.path, file.found, lambda: os.replace(file.path, target))
        if moved and over is not None:
            self._count(over.found, over.state)
        return moved

    def _count(self, found: os.stat_result, why: str) -> None:
        self.done[why] += 1
        self.freed_bytes += found.st_size

    def _do(self, path: Path, found: os.stat_result, change: Callable[[], None]) -> bool:
        try:
            now = path.lstat()
            if (now.st_ino, now.st_size, now.st_mtime_ns) != (found.st_ino, found.st_size, found.st_mtime_ns):
                self.left["changed meanwhile"] += 1
                return False
            if not self.dry:
                change()
        except FileNotFoundError:
            return False
        except PermissionError:  # on Windows also while a process has the file open
            self.left["in use, or not yours to delete"] += 1
            return False
        except OSError as error:
            raise storage_error(error, path) from error
        return True


def prune(folder: Path, notify: Notify, *, older_than_days: float | None, dry_run: bool) -> CachePruned:
    """Delete files of a cache folder that are not needed.

    These are leftovers of killed processes, bad or superfluous files of entries, and optionally entries that are
    unused.

    Args:
        folder: the cache folder.
        notify: receives a line for each skipped link.
        older_than_days: number of days without use after which entries are deleted; None to keep unused entries.
        dry_run: whether to only count, and delete nothing.

    Raises:
        UserError: there is no such folder.
        StorageError: the folder cannot be written.
    """
    pruning, now = Pruning(dry_run), time.time()
    oldest = None if older_than_days is None else now - older_than_days * DAY_S
    # Entries first, then temporary files, then manifests.
    for files in _entries(folder, notify):
        _prune_entry(pruning, files, oldest)
    for place in _places(folder):
        for path, pid in _matching(place, TEMPORARY_NAME):
            _prune_temporary(pruning, path, int(pid[1]), now)
    _prune_manifests(pruning, folder / MANIFESTS, oldest, now)
    done, left = dict(pruning.done), dict(pruning.left)
    return CachePruned(folder.absolute(), dry_run, pruning.freed_bytes, done, left, older_than_days)


def _prune_entry(pruning: Pruning, files: Sequence[File], oldest: float | None) -> None:
    """Delete an entry's files except the newest good one, and rename that file to the first free name.

    A run looks up an entry's names in order and stops at the first gap, so no gap may remain.

    Args:
        pruning: deletes and counts the files.
        files: the entry's files, in the order of repairs.
        oldest: time before which a last use makes the entry unused; None to keep unused entries.
    """
    good = [file for file in files if file.state == GOOD]
    unused = bool(good) and oldest is not None and max(file.found.st_mtime for file in good) < oldest
    keep = good[-1] if good and not unused else None
    stays = [file for file in files if file.state in NEVER_DELETED]
    for file in stays:
        pruning.left[file.state] += 1
    goes = {file.number: file for file in files if file is not keep and file not in stays}
    if keep is not None:
        free = next(number for number in count() if number not in {file.number for file in stays})
        if free < keep.number:
            if not pruning.move(keep, _named(keep, free), goes.get(free)):
                return
            goes.pop(free, None)
    for file in goes.values():
        pruning.delete(file.path, file.found, "unused" if file.state == GOOD and unused else file.state)


def _prune_manifests(pruning: Pruning, folder: Path, oldest: float | None, now: float) -> None:
    """Delete unused manifests (``encoded_cache/manifest.py``). Without its manifest, a run takes longer to start."""
    if not is_folder(folder):
        return
    for path, pid in _matching(folder, MANIFEST_TEMPORARY_NAME):
        _prune_temporary(pruning, path, int(pid[1]), now)
    for path, _ in _matching(folder, MANIFEST_NAME):
        with contextlib.suppress(FileNotFoundError):
            found = path.lstat()
            if oldest is not None and found.st_mtime < oldest and stat.S_ISREG(found.st_mode):
                pruning.delete(path, found, "unused")


def _prune_temporary(pruning: Pruning, path: Path, pid: int, now: float) -> None:
    """Delete a temporary file if it is old, or if its writer no longer exists and the file is not fresh.

    ``pid``: process id of the writer.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    age_s = now - found.st_mtime
    abandoned = age_s > OLD_TEMPORARY_S or (age_s > FRESH_TEMPORARY_S and not psutil.pid_exists(pid))
    if abandoned and stat.S_ISREG(found.st_mode):
        pruning.delete(path, found, "temporary")


def _named(file: File, number: int) -> Path:
    return file.path.with_name(f"{file.key}{f'-{number}' if number else ''}.safetensors")


def _entries(folder: Path, notify: Notify) -> Iterator[list[File]]:
    """Yield the files of each entry, after examining them, in the order of the entry's repairs."""
    _check_folder(folder)
    for kind in _kinds(folder):
        if is_link(folder / kind):
            shown = printable(str((folder / kind).absolute()))
            notify(f"{shown} is a link and is skipped: to include it, pass the folder of its target with --dir")
    for place in _places(folder):
        named = [(path, match) for path, match in _matching(place, ENTRY_NAME) if match[1].startswith(place.name)]
        named.sort(key=lambda pair: (pair[1][1], int(pair[1][2] or 0)))
        for key, group in groupby(named, key=lambda pair: pair[1][1]):
            looked = [_read_entry(path, place.parent.name, key, int(match[2] or 0)) for path, match in group]
            files = [file for file in looked if file is not None]
            if files:
                yield files


def _places(folder: Path) -> Iterator[Path]:
    """Yield the folders that directly contain entry files. Links are not followed."""
    for kind in _kinds(folder):
        if not is_link(folder / kind):
            yield from (path for path, _ in _matching(folder / kind, KEY_START) if is_folder(path))


def _kinds(folder: Path) -> list[str]:
    """Return the entry kinds in a cache folder, by the names of its sub-folders.

    A sub-folder is included if its name is a known kind, or if it contains an entry of the kind in its name.
    """
    found = [path for path, _ in _matching(folder, ENTRY_KIND) if path.name != MANIFESTS]
    return [path.name for path in found if path.name in KNOWN_KINDS or (not is_link(path) and _has_entry(path))]


def _has_entry(place: Path) -> bool:
    for part, _ in _matching(place, KEY_START):
        for path, match in _matching(part, ENTRY_NAME) if is_folder(part) else ():
            with contextlib.suppress(OSError, CacheEntryBad):
                check_place(read_header(path), place.name, match[1])
                return True
    return False


def _matching(folder: Path, pattern: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
    """Return the paths in a folder with names that match the pattern, and the matches, sorted by name.

    The list is empty if there is no such folder.

    Raises:
        StorageError: the folder cannot be read.
    """
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise storage_error(error, folder) from error
    return [(folder / name, match) for name in names if (match := pattern.fullmatch(name))]


def _read_entry(path: Path, kind: str, key: str, number: int) -> File | None:
    """Read and check one file of an entry; returns None if the file no longer exists."""
    try:
        found = path.lstat()
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return File(path, kind, key, number, found, LINK, "it is a folder, a link or a device")
    state, why = GOOD, ""
    try:
        header, content = read_entry(path)
        check_place(header, kind, key)
        check_bytes(header, content)
        if header.spec_version != entry_file.SPEC_VERSION:
            state = OLDER if header.spec_version < entry_file.SPEC_VERSION else NEWER
    except CacheEntryBad as error:
        state, why = BAD, str(error)
    except OSError as error:
        state, why = UNREADABLE, error.strerror or str(error)
    return File(path, kind, key, number, found, state, why)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        fix = "Pass the folder that the recipe sets as cache.dir, with --dir."
        raise UserError("no-cache", "There is no cache folder at this path.", where=str(folder.absolute()), fix=fix)
