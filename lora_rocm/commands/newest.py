"""Chooses the newest run for a command if the user names none."""

from __future__ import annotations

from pathlib import Path

from lora_rocm.commands.output import Output
from lora_rocm.rundir.newest import newest_in


def run_or_newest(run: Path | None, folder: Path, output: Output) -> Path:
    """Return ``run``, or the newest run in a folder. The name of a run that was chosen is printed.

    Args:
        run: the run that the user named, or None.
        folder: folder with runs.
        output: prints the chosen run on standard error, so that standard output has only the result.

    Raises:
        UserError: no run was named and the folder has none.
    """
    if run is not None:
        return run
    found = newest_in(folder)
    output.on_stderr(f"Newest run: {found}")
    return found
