"""Options of all commands that start a run. A new option is written here once.

A handler takes them as one parameter: ``options: StartOptions``. ``cli_command.printed`` replaces the parameter by the
options of the class, so that each command has them with the same names, types, help texts and environment variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lora_rocm.commands.cli_options import AcceptChanges, CacheOfRecipe, Gpus, NoSupervisor, Overrides, with_folders

if TYPE_CHECKING:
    from lora_rocm.commands.run_request import RunRequest


@dataclass(frozen=True)
class StartOptions:
    """Options of each command that starts a run. The fields are named as the options."""

    overrides: Overrides = None
    cache_dir: CacheOfRecipe = None
    gpus: Gpus = None
    no_supervisor: NoSupervisor = False

    def settings(self, runs_dir: str | None = None) -> Sequence[str]:
        """Return the ``section.key=value`` settings. ``runs_dir``: the folder for runs, if the command has it."""
        return with_folders(self.overrides, runs=runs_dir, cache=self.cache_dir)


@dataclass(frozen=True)
class ContinueOptions(StartOptions):
    """Options of a command that may continue a run."""

    accept_changes: AcceptChanges = False

    def new_or_resumed(
        self, recipe: str, *, run_dir: Path | None = None, resume: str | None = None, runs_dir: str | None = None
    ) -> RunRequest:
        """Return the request to train a recipe; see ``RunRequest``."""
        from lora_rocm.commands.run_request import RunRequest

        return RunRequest(
            recipe,
            self.settings(runs_dir),
            run_dir=run_dir,
            resume=resume,
            accept_changes=self.accept_changes,
            supervised=not self.no_supervisor,
            gpus=self.gpus,
        )

    def continuing(self, source: Path) -> RunRequest:
        """Return the request to continue a run, or a checkpoint in one, with its own recipe.

        Raises:
            UserError: there is no run at ``source``, or its recipe is missing.
        """
        from lora_rocm.commands.run_request import RunRequest

        return RunRequest.continuing(
            source,
            self.settings(),
            accept_changes=self.accept_changes,
            supervised=not self.no_supervisor,
            gpus=self.gpus,
        )
