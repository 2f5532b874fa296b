"""The LoRA folders of ComfyUI and Forge on this machine, and copies of a run's LoRA files into them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from lora_rocm.commands.program_folders import LORAS, folders_in, program_folders
from lora_rocm.errors import UserError, storage_error
from lora_rocm.foundation.files import file_exists, write_json, write_pieces
from lora_rocm.foundation.json_text import object_in
from lora_rocm.hardware.app_dir import own_app_dir

MAX_CHOICE_BYTES = 1 << 16
PIECE_BYTES = 1 << 22


def found_lora_folders(home: Path, around: Iterable[Path] = ()) -> list[Path]:
    """Return the existing LoRA folders of these programs.

    Args:
        home: the user's home folder.
        around: further folders in which the programs may be.
    """
    return program_folders([LORAS], home, around)


def chosen_folder() -> Path | None:
    """Return the folder that the user chose for copies; None if it was not chosen, or no longer exists."""
    try:
        folder = Path(str(object_in(_choice(), MAX_CHOICE_BYTES)["folder"]))
        return folder if folder.is_dir() else None
    except (OSError, ValueError, KeyError):
        return None


def lora_folder_in(folder: Path) -> Path:
    """Return the LoRA folder in the folder of a program. Any other folder is returned itself."""
    return next(folders_in(folder, [LORAS]), folder)


def remember_folder(folder: Path) -> None:
    """Remember the folder that the user chose. If it is a program's own folder, its LoRA folder is remembered.

    Raises:
        UserError: no-folder: there is no such folder.
        StorageError: it cannot be remembered.
    """
    if not folder.is_absolute() or not folder.is_dir():
        fix = "Write the whole path of a folder that exists."
        raise UserError("no-folder", "There is no such folder.", where=str(folder), fix=fix)
    try:
        write_json(_choice(), {"folder": str(lora_folder_in(folder))})
    except OSError as error:
        raise storage_error(error, _choice()) from error


def copy_lora(source: Path, folder: Path, name: str) -> Path:
    """Copy a LoRA file into a folder. Nothing is overwritten. Return the path of the copy.

    Raises:
        UserError: file-exists: the folder has an entry with this name.
        StorageError: a file cannot be read or written. An incomplete copy is removed.
    """
    target = folder / name
    if os.path.lexists(target):
        raise file_exists(target)
    try:
        with source.open("rb") as file:
            write_pieces(target, iter(lambda: file.read(PIECE_BYTES), b""))
    except FileExistsError:
        raise file_exists(target) from None
    except OSError as error:
        with contextlib.suppress(OSError):
            # writes: its own incomplete copy, under a name that was free
            target.unlink(missing_ok=True)  # incomplete
        raise storage_error(error, target) from error
    return target


def _choice() -> Path:
    return own_app_dir() / "ui" / "lora_folder.json"
