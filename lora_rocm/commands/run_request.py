"""The request for a training run. The command line, a web page or another program creates it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.errors import UserError
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.foundation.terminal_text import quoted
from lora_rocm.recipe.standard_input import STANDARD_INPUT
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.choose_run_dir import owner_of


@dataclass(frozen=True)
class RunRequest:
    """A request for a training run.

    Attributes:
        recipe_path: path of a recipe, or name of a shipped one.
        overrides: ``section.key=value`` settings.
        run_dir: run directory, or None for a new one in ``output.dir``.
        resume: "latest", a run or a checkpoint to continue from, or None for a new run.
        accept_changes: whether to continue although recipe or data have changed.
        supervised: whether to restart a worker that fails or hangs. Processes of ``torchrun`` are never supervised.
        gpus: number of GPUs that train together, or None for one GPU or the number that ``torchrun`` sets.
        registry: the available families.
        worker: the worker's module (see ``worker.worker_command``), which must know the same families.
    """

    recipe_path: str
    overrides: Sequence[str] = ()
    run_dir: Path | None = None
    resume: str | None = None
    accept_changes: bool = False
    supervised: bool = True
    gpus: int | None = None
    registry: FamilyRegistry = FAMILIES
    worker: str | None = None

    @classmethod
    def continuing(
        cls,
        source: Path,
        overrides: Sequence[str] = (),
        *,
        accept_changes: bool = False,
        supervised: bool = True,
        gpus: int | None = None,
    ) -> RunRequest:
        """Return the request that continues a run with its own recipe.

        Args:
            source: the run directory, or a checkpoint in it.
            overrides: ``section.key=value`` settings.
            accept_changes: whether to continue although recipe or data have changed.
            supervised: whether to restart a worker that fails or hangs.
            gpus: number of GPUs that train together, or None.

        Raises:
            UserError: there is no run at ``source``, or its recipe is missing.
        """
        run = owner_of(source.absolute())
        if not run.recipe.is_file():
            fix = "Copy the recipe of the run to this path, or continue it with lora-rocm train RECIPE --run-dir."
            raise UserError("run-without-recipe", "The recipe of this run is missing.", where=str(run.recipe), fix=fix)
        return cls(
            str(run.recipe),
            overrides,
            run_dir=run.path,
            resume=str(source),
            accept_changes=accept_changes,
            supervised=supervised,
            gpus=gpus,
        )

    def resume_command(self, run: RunDir) -> str:
        """Return the command that resumes a run of this request, quoted for this system's shell."""
        uses_own = self.recipe_path in (STANDARD_INPUT, str(run.recipe))
        words = ["lora-rocm", "resume", str(run.path)] if uses_own else ["lora-rocm", "train", self.recipe_path]
        words += [] if self.recipe_path == STANDARD_INPUT else self._setting_words()  # they are in the run's recipe
        words += [] if uses_own else ["--run-dir", str(run.path), "--resume", "latest"]
        return quoted([*words, *self._option_words()])

    def start_words(self, run: RunDir) -> list[str]:
        """Return the arguments with which another process starts this request. ``run``: its run directory."""
        if self.recipe_path == str(run.recipe):
            words = ["resume", self.resume or str(run.path)]
        else:
            words = ["train", self.recipe_path, "--run-dir", str(run.path)]
            words += ["--resume", self.resume] if self.resume else []
        words += [*self._setting_words(), *self._option_words()]
        return words if self.supervised else [*words, "--no-supervisor"]

    def _setting_words(self) -> list[str]:
        return [word for override in self.overrides for word in ("--set", override)]

    def _option_words(self) -> list[str]:
        words = ["--gpus", str(self.gpus)] if self.gpus else []
        return [*words, "--accept-changes"] if self.accept_changes else words
