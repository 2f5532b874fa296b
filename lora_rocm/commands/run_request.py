"""The request for a training run. The command line, a web page or another program creates it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.families.registry import PRODUCT, FamilyRegistry
from lora_rocm.foundation.terminal_text import quoted
from lora_rocm.rundir.layout import RunDir


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
    registry: FamilyRegistry = PRODUCT
    worker: str | None = None

    def resume_command(self, run: RunDir) -> str:
        """Return the command that resumes a run of this request, quoted for this system's shell."""
        words = ["lora-rocm", "train", self.recipe_path]
        for override in self.overrides:
            words += ["--set", override]
        words += ["--run-dir", str(run.path), "--resume", "latest"]
        words += ["--gpus", str(self.gpus)] if self.gpus else []
        return quoted(words + (["--accept-changes"] if self.accept_changes else []))
