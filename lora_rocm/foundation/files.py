"""The one module that writes, renames and removes files. Standard library only.

- A file is written whole or not at all: temporary name, fsync, rename, then read back and compared.
- A link in place of a file is replaced or refused, never written through.
- Below a ``root``, no folder that is a link is entered. A ``root`` is a run directory, which may come from somebody
  else: archives keep links.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from lora_rocm.errors import StorageError, UserError, storage_error

RENAME_ATTEMPTS, RENAME_PAUSE_S = 20, 0.1
WRITE_ATTEMPTS = 3
"""Attempts to write a file, if its bytes read back differently."""
PIECE_BYTES = 1 << 20
PROBE_BYTES = 1 << 16
NAME_SURROGATE = 0x20000000
"""The bit of a Windows reparse tag that marks a name surrogate: a symbolic link or a junction."""


def is_link(path: Path) -> bool:
    """Whether a path is a symbolic link or a Windows junction. False if nothing is there.

    ``Path.is_symlink`` takes a junction for a folder, and ``Path.is_junction`` is new in Python 3.12.
    """
    try:
        found = os.lstat(path)
    except (OSError, ValueError):
        return False
    return stat.S_ISLNK(found.st_mode) or bool(getattr(found, "st_reparse_tag", 0) & NAME_SURROGATE)


def require_place(path: Path | None, option: str) -> None:
    """Check before a long computation that a path can take a file. Only the folders are checked.

    Args:
        path: of the file; its folder may be missing. None: no file is written.
        option: names the path.

    Raises:
        UserError: output-kind: the path is a folder, or one of its parents is a file.
    """
    if path is None:
        return
    is_there = next((folder for folder in path.absolute().parents if os.path.lexists(folder)), None)
    where = f"{option} {path}"
    if path.is_dir():
        raise UserError(
            "output-kind", "This path is a folder, but the output is a file.", where=where, fix="Name a file."
        )
    if is_there is not None and not is_there.is_dir():
        raise UserError("output-kind", f"{is_there} is not a folder.", where=where, fix="Name another place.")


def is_folder(path: Path) -> bool:
    """Whether the path is a real folder, not a link to one."""
    return path.is_dir() and not is_link(path)


def refuse_link(path: Path) -> None:
    """Refuse a link at a path that is written in place.

    Raises:
        StorageError: "link-refused".
    """
    if not is_link(path):
        return
    target = ""
    with contextlib.suppress(OSError, ValueError):
        target = f" -> {os.readlink(path)}"
    raise StorageError(
        "link-refused",
        "There is a link where lora-rocm keeps its own file or folder. Nothing is written or deleted through a link.",
        where=f"{path}{target}",
        fix="Remove the link, or replace it with its target.",
    )


def followed(path: Path) -> Path:
    """The file that the user means: the target of the path if it is a link, else the path itself."""
    return path.resolve() if is_link(path) else path


def make_folder(folder: Path, root: Path | None = None) -> None:
    """Make a folder and its parents.

    With ``root``, only folders below it are made, and no link is entered. If the drive of ``root`` is gone, nothing is
    created.

    Raises:
        OSError: no permission, disk full, or ``root`` is gone.
        StorageError: a folder below ``root`` is a link.
    """
    if root is None:
        folder.mkdir(parents=True, exist_ok=True)
        return
    for place in [folder, *folder.parents][: len(folder.relative_to(root).parts)][::-1]:
        refuse_link(place)
        place.mkdir(exist_ok=True)


def write_atomic(path: Path, content: bytes, root: Path | None = None, *, read_back: bool = True) -> None:
    """Write a whole file or nothing: temporary name, fsync, rename, read back.

    Args:
        path: the file. Its folder is made (``make_folder``). An existing file or link is replaced.
        content: all of the file.
        root: a folder that has to exist; no folder below it may be a link.
        read_back: compare the file with ``content``, and write it again if it differs. False is for files that are
            checked whenever they are read.

    Raises:
        StorageError: disk full, no permission or a link in the way; or every attempt reads back differently (the file
            is then removed); or ``path`` is a device or pipe, which a rename would replace.
    """
    mode = _mode_of(path)
    if not path.name or (mode and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))):
        fix = "Give the name of a file."
        raise StorageError("no-file", "There can be no file with that name.", where=f"{str(path)!r}", fix=fix)
    try:
        for _ in range(WRITE_ATTEMPTS):
            make_folder(path.parent, root)
            _replace(path, content)
            if not read_back or holds(path, content):
                return
    except OSError as error:
        raise storage_error(error, path) from error
    with contextlib.suppress(OSError):
        path.unlink()  # a corrupt file is worse than none
    raise StorageError(
        "written-differs",
        f"The file read back differently from the written bytes {WRITE_ATTEMPTS} times in a row, so it was removed.",
        where=str(path),
        fix="Check the disk and the memory of the machine, or use another disk; then run the same command again.",
    )


def write_json(path: Path, value: Any, root: Path | None = None) -> None:
    """``write_atomic`` of ``json_bytes``."""
    write_atomic(path, json_bytes(value), root)


def json_bytes(value: Any) -> bytes:
    """Sorted, indented JSON in UTF-8: equal values give equal bytes.

    A lone surrogate, as in a path that is not UTF-8, becomes a JSON escape, which reads back as the same path.
    """
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


@contextlib.contextmanager
def new_folder(folder: Path, root: Path | None = None) -> Iterator[Path]:
    """Make a folder with all its files or not at all: a temporary folder is filled inside the context, then renamed.

    Args:
        folder: nothing may be there but an empty folder. Its parents are made (``make_folder``).
        root: as in ``write_atomic``.

    Raises:
        StorageError: disk full, no permission or a link in the way, or something else is there.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        make_folder(temporary, root)
        yield temporary
        fsync_folder(temporary)
        if is_folder(folder):
            folder.rmdir()  # an empty one
        rename(temporary, folder)
        fsync_folder(folder.parent)
    except OSError as error:
        raise storage_error(error, folder) from error
    finally:
        with contextlib.suppress(OSError):
            remove(temporary)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A new folder among the system's temporary files, removed with its content at the end of the context.

    Raises:
        StorageError: it cannot be made; the error names the place.
    """
    place = os.environ.get("TMPDIR") or os.environ.get("TEMP") or "the folder of temporary files"
    try:
        place = tempfile.gettempdir()
        made = tempfile.TemporaryDirectory(prefix="lora-rocm-", ignore_cleanup_errors=True)
    except OSError as error:
        raise storage_error(error, place) from error
    with made as folder:
        yield Path(folder)


def require_room(folder: Path) -> None:
    """Write and remove a small file.

    Raises:
        StorageError: this fails; the error names the folder.
    """
    probe = folder / f".probe.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    try:
        write_through(probe, bytes(PROBE_BYTES))
    except OSError as error:
        raise storage_error(error, folder) from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)


def write_through(path: Path, content: bytes) -> None:
    """Write a new file and flush it to the disk (fsync).

    Raises:
        OSError: the file exists, or cannot be written.
    """
    write_pieces(path, [content])


def write_pieces(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """``write_through`` of content that is produced in pieces and is never whole in memory."""
    with path.open("xb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def open_in_place(path: Path, *, again: bool = False, buffering: int = -1) -> IO[bytes]:
    """Open a file that is written in place (a log, a heartbeat). Links are refused.

    ``again`` truncates the file; otherwise writes are appended. ``buffering``: as for ``open``.

    Raises:
        StorageError: the path is a link, a folder, a pipe or a device, or cannot be opened.
    """
    refuse_link(path)
    if _mode_of(path) and not stat.S_ISREG(_mode_of(path)):
        raise StorageError(
            "no-file",
            "This path has to be a regular file, but it is a folder, a pipe or a device.",
            where=str(path),
            fix="Move it away, or use another folder.",
        )
    try:
        if again:
            return open(path, "wb", buffering, opener=_open_no_follow)
        return open(path, "a+b", buffering, opener=_open_no_follow)
    except OSError as error:
        raise storage_error(error, path) from error


def holds(path: Path, content: bytes) -> bool:
    """Whether a flushed file has exactly these bytes on the disk. False if it cannot be read."""
    wanted, position = memoryview(content), 0
    drop = getattr(os, "posix_fadvise", None)  # without it Linux reads its page cache, not the disk
    try:
        with _opened(path) as file:
            if drop is not None:
                with contextlib.suppress(OSError):  # no such advice on this file system
                    drop(file.fileno(), 0, 0, getattr(os, "POSIX_FADV_DONTNEED", 0))
            while piece := file.read(PIECE_BYTES):
                if piece != wanted[position : position + len(piece)]:
                    return False
                position += len(piece)
    except OSError:
        return False
    return position == len(wanted)


def rename(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target``, over an existing file too.

    On Windows a virus scanner may have either file open for a moment, so a refused rename is retried.

    Raises:
        OSError: it cannot be renamed.
    """
    for attempt in range(RENAME_ATTEMPTS):
        try:
            os.replace(source, target)
            return
        except PermissionError:
            if attempt == RENAME_ATTEMPTS - 1 or os.name != "nt":
                raise
            time.sleep(RENAME_PAUSE_S)


def remove(path: Path) -> None:
    """Remove a file, a folder with its content, or a link (never its target). A missing path is fine.

    Raises:
        OSError: it cannot be removed.
    """
    if is_folder(path):
        shutil.rmtree(path)  # removes links in it as links
    else:
        path.unlink(missing_ok=True)


def fsync_folder(folder: Path) -> None:
    """Flush a folder, so that a rename in it survives a power cut. Windows needs no such call.

    Raises:
        OSError: the disk refuses.
    """
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")  # containers share pids
    try:
        write_through(temporary, content)
        rename(temporary, path)
        fsync_folder(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _mode_of(path: Path) -> int:
    """``st_mode`` of the path itself (``os.lstat``); 0 if nothing is there."""
    try:
        return os.lstat(path).st_mode
    except (OSError, ValueError):
        return 0


def _opened(path: Path) -> IO[bytes]:
    """Open a file for reading, with retries: on Windows a virus scanner may have a new file open for a moment."""
    for attempt in range(RENAME_ATTEMPTS):
        try:
            return path.open("rb")
        except PermissionError:
            if attempt == RENAME_ATTEMPTS - 1 or os.name != "nt":
                raise
            time.sleep(RENAME_PAUSE_S)
    raise AssertionError("the last attempt returns or raises")


def _open_no_follow(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
