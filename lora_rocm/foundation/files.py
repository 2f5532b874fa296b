"""Writes, renames and removes files. No other module does. Imports only the standard library.

- A file is written completely or not at all: under a temporary name, with fsync and a rename. Then it is read back
  and compared.
- A link in place of a file is replaced or refused. Its target is never written.
- Below a folder passed as ``root``, folders that are links are not entered. ``root`` is usually a run directory,
  which may come from another person in an archive with links.
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
from typing import IO, Any, TypeVar

from lora_rocm.errors import StorageError, UserError, storage_error

T = TypeVar("T")

RENAME_ATTEMPTS, RENAME_PAUSE_S = 20, 0.1
WRITE_ATTEMPTS = 3
"""Maximum number of attempts to write a file if the bytes read back differ from those written."""
PIECE_BYTES = 1 << 20
PROBE_BYTES = 1 << 16
NAME_SURROGATE = 0x20000000
"""Bit in a Windows reparse tag that marks a symbolic link or a junction."""


def is_link(path: Path) -> bool:
    """Whether the path is a symbolic link or a Windows junction. False if the path does not exist.

    ``Path.is_symlink`` takes a junction for a folder, and ``Path.is_junction`` only exists since Python 3.12.
    """
    try:
        found = os.lstat(path)
    except (OSError, ValueError):
        return False
    return stat.S_ISLNK(found.st_mode) or bool(getattr(found, "st_reparse_tag", 0) & NAME_SURROGATE)


def require_place(path: Path | None, option: str) -> None:
    """Check before a long computation that its output file can be created. Only the folders are checked.

    Args:
        path: path of the file, or None if no file will be written. Its folder may be missing.
        option: the command-line option that names the path, for the message.

    Raises:
        UserError: output-kind: the path is a folder, or one of its parents is a file.
    """
    if path is None:
        return
    is_there = next((folder for folder in path.absolute().parents if os.path.lexists(folder)), None)
    where = f"{option} {path}"
    if path.is_dir():
        raise UserError(
            "output-kind",
            "This path is a folder, but the output is a file.",
            where=where,
            fix="Use the path of a file.",
        )
    if is_there is not None and not is_there.is_dir():
        raise UserError("output-kind", f"{is_there} is not a folder.", where=where, fix="Use another path.")


def is_folder(path: Path) -> bool:
    """Whether the path is a folder, and not a link to one."""
    return path.is_dir() and not is_link(path)


def refuse_link(path: Path) -> None:
    """Refuse a path if it is a link.

    It is used for files that are modified in place, because writing to a link would change its target.

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
    """Return the target of the path if it is a link, else the path itself."""
    return path.resolve() if is_link(path) else path


def make_folder(folder: Path, root: Path | None = None) -> None:
    """Create a folder and its missing parents.

    With ``root``, only folders below it are created, and folders that are links are refused. Nothing is created if
    ``root`` itself does not exist, for example because its drive was removed.

    Raises:
        OSError: permission is missing, the disk is full, or ``root`` does not exist.
        StorageError: a folder below ``root`` is a link.
    """
    if root is None:
        folder.mkdir(parents=True, exist_ok=True)
        return
    for place in [folder, *folder.parents][: len(folder.relative_to(root).parts)][::-1]:
        refuse_link(place)
        place.mkdir(exist_ok=True)


def write_atomic(path: Path, content: bytes, root: Path | None = None, *, read_back: bool = True) -> None:
    """Write a file completely or not at all: under a temporary name, with fsync and a rename. Then it is read back.

    Args:
        path: path of the file. Its folder is created. An existing file or link is replaced.
        content: the complete content.
        root: a folder that must exist. No folder below it may be a link.
        read_back: whether to compare the written file with ``content``, and write it again if it differs. False is for
            files that are checked whenever they are read.

    Raises:
        StorageError: the disk is full, permission is missing, a folder is a link, or the path is a device or pipe. Or
            the file read back differently after every attempt. It is then removed.
    """
    mode = _mode_of(path)
    if not path.name or (mode and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))):
        fix = "Use the path of a file."
        what = "No file can be written here: the path has no name, or it is a device or a pipe."
        raise StorageError("no-file", what, where=f"{str(path)!r}", fix=fix)
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


def write_new(path: Path, content: bytes) -> None:
    """Write a file that must not exist yet, and flush it to the disk. Its folder is created.

    Raises:
        UserError: file-exists: there is a file, a folder or a link at this path.
        StorageError: the file cannot be written. An incomplete file is removed.
    """
    try:
        make_folder(path.parent)
        write_through(path, content)
    except FileExistsError as error:
        if not os.path.lexists(path):
            raise storage_error(error, path) from error
        raise file_exists(path) from None
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()  # incomplete
        raise storage_error(error, path) from error


def file_exists(path: Path) -> UserError:
    """Return the error for a path at which something exists already."""
    what = "This file exists, and nothing is overwritten."
    return UserError("file-exists", what, where=str(path), fix="Choose another name, or move it away.")


def write_json(path: Path, value: Any, root: Path | None = None) -> None:
    """Write ``json_bytes`` of a value with ``write_atomic``."""
    write_atomic(path, json_bytes(value), root)


def kept_json(path: Path, kind: type[T]) -> T:
    """Return the value of a cache that ``write_json`` wrote; an empty one if it is missing or damaged."""
    try:
        value = json.loads(path.read_bytes())  # json: the program's own file, rebuilt if it is damaged
    except (OSError, ValueError, RecursionError):
        return kind()
    return value if isinstance(value, kind) else kind()


def json_bytes(value: Any) -> bytes:
    """Return a value as sorted, indented JSON in UTF-8. Equal values give equal bytes.

    A lone surrogate, as in a path that is not UTF-8, is written as a JSON escape. Reading it gives the same path.
    """
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


@contextlib.contextmanager
def new_folder(folder: Path, root: Path | None = None) -> Iterator[Path]:
    """Create a folder with all its files or not at all.

    The context yields a temporary folder, which is renamed at the end of the context.

    Args:
        folder: path of the new folder. It must not exist, or must be an empty folder. Its parents are created.
        root: see ``write_atomic``.

    Raises:
        StorageError: the disk is full, permission is missing, a parent is a link, or the path exists.
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
    """Yield a new temporary folder, which is removed with its content at the end of the context.

    Raises:
        StorageError: it cannot be created. The error names the system's folder for temporary files.
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
    """Check that a folder has room for new files, by writing and removing a small file.

    Raises:
        StorageError: the file cannot be written. The error names the folder.
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
    """Write a new file from pieces, so that its content is never in memory as a whole. Flush it to the disk (fsync)."""
    with path.open("xb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def open_in_place(path: Path, *, again: bool = False, buffering: int = -1) -> IO[bytes]:
    """Open a file that is modified in place, such as a log. A link is refused.

    ``again``: whether to truncate the file instead of appending to it. ``buffering``: see the built-in ``open``.

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
    """Whether a flushed file on the disk has exactly this content. False if the file cannot be read."""
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
    """Rename ``source`` to ``target``. An existing file at ``target`` is replaced.

    On Windows a refused rename is retried, because a virus scanner may have one of the files open for a moment.

    Raises:
        OSError: the file cannot be renamed.
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
    """Remove a file, a folder with its content, or a link (but not its target). A missing path is ignored.

    Raises:
        OSError: the path cannot be removed.
    """
    if is_folder(path):
        shutil.rmtree(path)  # removes links in it as links
    else:
        path.unlink(missing_ok=True)


def fsync_folder(folder: Path) -> None:
    """Flush a folder to the disk, so that a rename in it survives a power failure. Does nothing on Windows.

    Raises:
        OSError: the flush failed.
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
    """Return ``st_mode`` of the path itself, not of a link's target. Return 0 if the path does not exist."""
    try:
        return os.lstat(path).st_mode
    except (OSError, ValueError):
        return 0


def _opened(path: Path) -> IO[bytes]:
    """Open a file for reading. On Windows it retries, because a virus scanner may have a new file open for a moment."""
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
