"""The recipe files of a run directory: a requested recipe replaces the run's only after all checks have accepted it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from lora_rocm.errors import storage_error
from lora_rocm.foundation.files import fsync_folder, rename
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.made_from import keep_made


def recipe_to_train(run_dir: RunDir) -> Path:
    """The recipe file that the worker of rank 0 reads. Other ranks read it too if the same parent starts them."""
    return run_dir.recipe_asked if run_dir.recipe_asked.exists() else run_dir.recipe


def accept(run_dir: RunDir) -> None:
    """Replace the run's recipe by the requested one, after all checks of the worker have accepted it.

    Raises:
        StorageError: the file cannot be renamed.
    """
    keep_made(run_dir)
    try:
        # writes: removes the link, where there is one
        run_dir.result.unlink(missing_ok=True)  # first, because it would mark the new recipe as complete
        if run_dir.recipe_asked.exists():
            rename(run_dir.recipe_asked, run_dir.recipe)
            fsync_folder(run_dir.path)
    except OSError as error:
        raise storage_error(error, run_dir.recipe) from error


def withdraw(run_dir: RunDir) -> None:
    """Remove the requested recipe if it was not accepted."""
    with contextlib.suppress(OSError):  # harmless; the next start tries again
        run_dir.recipe_asked.unlink(missing_ok=True)  # writes: removes the link, where there is one
