"""The public Python API: check and plan recipes, start runs, and read their results. Nothing here imports torch.

``lora_rocm`` has the same names. They follow Semantic Versioning; docs/reference/python.md explains it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.commands.check import CheckResult
from lora_rocm.commands.check import check as _check
from lora_rocm.commands.plan import PlanResult
from lora_rocm.commands.plan import plan as _plan
from lora_rocm.commands.run_request import RunRequest
from lora_rocm.commands.start_run import RunHandle, RunResult
from lora_rocm.commands.start_run import start_run as _start_run
from lora_rocm.errors import LoraRocmError
from lora_rocm.page_parts.charts import Chart, Series
from lora_rocm.recipe.load import LoadedRecipe
from lora_rocm.recipe.load import load_recipe as _load_recipe  # recipe: the user names it
from lora_rocm.report.figures import smoothed
from lora_rocm.report.html import notebook_chart
from lora_rocm.rundir.event_types import StepEvent
from lora_rocm.rundir.run_view import RunView

__all__ = [
    "CheckResult",
    "LoadedRecipe",
    "LoraRocmError",
    "LossChart",
    "PlanResult",
    "RunHandle",
    "RunResult",
    "RunView",
    "StepEvent",
    "check",
    "load_recipe",
    "plan",
    "start_run",
]
PUBLIC_MEMBERS: Mapping[str, tuple[str, ...]] = {
    "LoadedRecipe": ("recipe", "path", "name", "notices"),
    "RunHandle": ("run_dir", "follow", "stop", "result"),
    "RunView": (
        "of",
        "run_dir",
        "state",
        "updates",
        "max_train_steps",
        "seconds_per_step",
        "steps",
        "losses",
        "files",
        "problem",
        "remarks",
        "all",
        "last",
    ),
    "LossChart": ("view", "html"),
    "StepEvent": ("updates", "max_train_steps", "epoch", "loss", "learning_rate", "step_s"),
    "LoraRocmError": ("code", "what", "where", "fix", "exit_code"),
}
"""Members of classes that also have internal ones. Of the other classes, every field is public."""


def load_recipe(recipe: str | Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read and validate a recipe.

    Args:
        recipe: path of a recipe file, or name of a shipped recipe such as "demo.yaml".
        overrides: settings such as "lora.rank=8", as after ``--set``.

    Raises:
        LoraRocmError: the recipe is wrong. The error contains every problem.
    """
    return _load_recipe(recipe, overrides)


def check(recipe: str | Path, overrides: Sequence[str] = (), *, schema_only: bool = False) -> CheckResult:
    """Check a recipe, its data and its base model, as ``lora-rocm check`` does.

    Args:
        recipe: see ``load_recipe``.
        overrides: see ``load_recipe``.
        schema_only: whether to check only the recipe.

    Raises:
        LoraRocmError: the recipe is wrong. Problems of data and model are in the result's ``error``.
    """
    return _check(str(recipe), overrides, schema_only=schema_only)


def plan(recipe: str | Path, overrides: Sequence[str] = (), *, card: str | None = None) -> PlanResult:
    """Estimate memory and time of a step, as ``lora-rocm plan`` does.

    Args:
        recipe: see ``load_recipe``.
        overrides: see ``load_recipe``.
        card: memory of a GPU such as "24GB", or None for this machine's GPU.

    Raises:
        LoraRocmError: recipe or model are wrong. If no plan fits, the result has an ``error``.
    """
    return _plan(str(recipe), overrides, card=card)


def start_run(
    recipe: str | Path,
    overrides: Sequence[str] = (),
    *,
    run_dir: str | Path | None = None,
    resume: str | Path | None = None,
    accept_changes: bool = False,
    gpus: int | None = None,
) -> RunHandle:
    """Start training in a child process, supervised as by ``lora-rocm train``, and return at once.

    Args:
        recipe: see ``load_recipe``.
        overrides: see ``load_recipe``.
        run_dir: run directory, or None for a new one in ``output.dir``.
        resume: "latest", a run or a checkpoint to continue from, or None for a new run.
        accept_changes: whether to continue although recipe or data have changed.
        gpus: number of GPUs that train together, or None for one.

    Raises:
        LoraRocmError: the run is refused, before any file is written. ``RunHandle.result`` raises later errors.
    """
    request = RunRequest(
        str(recipe),
        tuple(overrides),
        run_dir=None if run_dir is None else Path(run_dir),
        resume=None if resume is None else str(resume),
        accept_changes=accept_changes,
        gpus=gpus,
    )
    return _start_run(request)


@dataclass(frozen=True)
class LossChart:
    """A chart of a run's loss. A notebook shows it.

    Attributes:
        view: the run.
    """

    view: RunView

    @property
    def html(self) -> str:
        """The chart as a piece of HTML, which loads no other files."""
        losses = self.view.losses
        name, state = self.view.run_dir.path.name, self.view.state
        caption = f"{name}: {state}, step {self.view.updates}. Grey: loss of each step; red: smoothed."
        lines = [Series("loss", losses, "raw"), Series("smoothed", smoothed(losses), "smooth")]
        return notebook_chart(Chart(caption, "step", lines))

    def _repr_html_(self) -> str:
        """Return the HTML. Jupyter calls a method of this name to show an object."""
        return self.html
