"""Files that a browser sends into a folder: images, decoded with the bounds of training, and their captions."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lora_rocm.dataset.images.image_io import UnreadableImage, decode, readable_extensions
from lora_rocm.dataset.sources.file_kinds import CAPTION_SUFFIXES
from lora_rocm.dataset.sources.metadata_files import MAX_CAPTION_BYTES
from lora_rocm.errors import LoraRocmError, UserError, storage_error
from lora_rocm.foundation.files import file_exists, holds, make_folder, write_atomic
from lora_rocm.foundation.names import stem_fault
from lora_rocm.foundation.terminal_text import legible
from lora_rocm.ui.thumbnails import MAX_IMAGE_BYTES

MAX_NAME_BYTES = 200
WRITING = threading.Lock()


@dataclass(frozen=True)
class Received:
    """The files of one request. saved: the names of the new files. refused: names and reasons of the others."""

    saved: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]


def receive(folder: Path, files: Iterable[tuple[str, BinaryIO]]) -> Received:
    """Save files in a folder. A file that exists is never replaced.

    Args:
        folder: the folder, from ``Folders.resolve``.
        files: name, as the browser sends it, and content of each file.

    Returns:
        Which files were saved, and why the others were not.
    """
    return received(files, lambda name, file: _saved(folder, name, file))


def received(files: Iterable[tuple[str, BinaryIO]], save: Callable[[str, BinaryIO], str]) -> Received:
    """Save each file by ``save``, which returns the name of the new file or raises why there is none."""
    saved, refused = list[str](), list[tuple[str, str]]()
    for name, file in files:
        try:
            saved.append(save(name, file))
        except LoraRocmError as error:
            refused.append((legible(name)[:MAX_NAME_BYTES], error.what))
    return Received(tuple(saved), tuple(refused))


def write_new(path: Path, content: bytes) -> bool:
    """Write a file that does not exist yet. Return False if it exists with the same content.

    Raises:
        UserError: file-exists: it exists with other content.
    """
    with WRITING:  # no other request may create the file after this check
        if os.path.lexists(path):
            if path.is_file() and holds(path, content):
                return False
            raise file_exists(path)
        write_atomic(path, content)
    return True


def _saved(folder: Path, name: str, file: BinaryIO) -> str:
    plain = usable_name(name)
    stem, suffix = os.path.splitext(plain)
    is_text = suffix.lower() in CAPTION_SUFFIXES
    limit = MAX_CAPTION_BYTES if is_text else MAX_IMAGE_BYTES
    content = file.read(limit + 1)
    if len(content) > limit:
        raise _refused(
            "upload-refused",
            f"It is larger than {limit >> 20} MiB." if limit >> 20 else f"It is larger than {limit >> 10} KiB.",
        )
    try:
        if is_text:
            content.decode("utf-8-sig")
        else:
            decode(content)
    except UnicodeDecodeError:
        raise _refused("upload-refused", "It is not UTF-8 text.") from None
    except UnreadableImage as error:
        raise _refused("upload-refused", f"It cannot be read as an image: {error}.") from error
    if not write_new(folder / plain, content):
        raise _refused("upload-refused", "It is there already, with the same content.")
    return plain


def usable_name(name: str) -> str:
    """Return the file name in a name that a browser sent, which may have folders.

    Raises:
        UserError: upload-refused: the name cannot be used, or does not have the extension of an image or a caption.
    """
    plain = plain_name(name)
    if os.path.splitext(plain)[1].lower() not in {*readable_extensions(), *CAPTION_SUFFIXES}:
        raise _refused("upload-refused", "Images and captions do not have this extension.")
    return plain


def plain_name(name: str) -> str:
    """Return the file name in a name that a browser sent, which may have folders.

    Raises:
        UserError: upload-refused: the name cannot be used.
    """
    plain = name.replace("\\", "/").rpartition("/")[2]
    stem = os.path.splitext(plain)[0]
    if plain.startswith(".") or legible(plain) != plain or len(plain.encode("utf-8", "replace")) > MAX_NAME_BYTES:
        raise _refused("upload-refused", "Its name cannot be used.")
    if fault := stem_fault(stem):
        raise _refused("upload-refused", f"Its name {fault}.")
    return plain


def new_folder(parent: Path, name: str) -> Path:
    """Make a folder for images.

    Raises:
        UserError: folder-name: the name cannot be used; folder-exists.
        StorageError: it cannot be made.
    """
    fault = stem_fault(name) or ("has a character that cannot be shown" if legible(name) != name else "")
    if fault:
        raise UserError(
            "folder-name",
            f"This name cannot be the name of a folder: it {fault}.",
            where=name[:80],
            fix="Use letters, digits and spaces.",
        )
    if os.path.lexists(parent / name):
        fix = "Open it, or use another name."
        raise UserError("folder-exists", "There is a folder with this name.", where=name, fix=fix)
    try:
        make_folder(parent / name)
    except OSError as error:
        raise storage_error(error, parent / name) from error
    return parent / name


def _refused(code: str, what: str) -> UserError:
    return UserError(code, what, fix="Choose another file.")
