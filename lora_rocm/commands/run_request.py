"""The request for a training run. The command line makes this value; a page or a program makes the same one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.families.registry import PRODUCT, FamilyRegistry
from lora_rocm.foundation.terminal_text import quoted
from lora_rocm.rundir.layout import RunDir


@dataclass(frozen=True)
class RunRequest:
    """A training run as it is asked for.

    Attributes:
        recipe_path: a file, or the name of a recipe that ships.
        overrides: ``section.key=value``.
        run_dir: its directory; None: a new one in ``output.dir``.
        resume: "latest", a run or a checkpoint to go on from; None: a new run.
        accept_changes: go on although recipe or data have changed.
        supervised: restart a worker that fails or hangs. A process of ``torchrun`` is never supervised.
        gpus: number of GPUs that train together; None: one, or the number given by ``torchrun``.
        registry: the available model families.
        worker: see ``worker.worker_command``; it must know the same families.
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
        """Return the exact command that resumes a run of this request, quoted for the shell of this system."""
        words = ["lora-rocm", "train", self.recipe_path]
        for override in self.overrides:
            words += ["--set", override]
        words += ["--run-dir", str(run.path), "--resume", "latest"]
        words += ["--gpus", str(self.gpus)] if self.gpus else []
        return quoted(words + (["--accept-changes"] if self.accept_changes else []))
