"""``lora-rocm train`` and ``demo``: a view of one training run (``commands.start_run``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lora_rocm.commands.output import Output
from lora_rocm.commands.start_run import prepare_run, render
from lora_rocm.errors import UserError
from lora_rocm.families.registry import PRODUCT, Registry
from lora_rocm.foundation.terminal_text import printable
from lora_rocm.recipe.load import load_recipe, shipped_recipes
from lora_rocm.report.progress_bar import make_progress
from lora_rocm.rundir.event_types import Event


def train(
    recipe_path: str,
    overrides: Sequence[str] = (),
    *,
    run_dir: Path | None = None,
    resume: str | None = None,
    accept_changes: bool = False,
    supervised: bool = True,
    gpus: int | None = None,
    registry: Registry = PRODUCT,
    worker: str | None = None,
    output: Output | None = None,
) -> int:
    """Train with a progress display, and return the exit code (0 done, 130 stopped).

    For the arguments see ``prepare_run``. ``output``: prints; None: as for a human.

    Raises:
        LoraRocmError: any error, with a message for the user.
    """
    output = output or Output()
    run = prepare_run(
        recipe_path,
        overrides,
        run_dir=run_dir,
        resume=resume,
        accept_changes=accept_changes,
        supervised=supervised,
        gpus=gpus,
        registry=registry,
        worker=worker,
        say=output.say,
    )
    with make_progress(output.stream, run.spill_bytes, run.run_dir) as progress:

        def on_event(event: Event) -> None:
            output.follow(event.to_json())
            progress.on_event(event)

        result = run.train(on_event, progress.say)
    output.show(result, render(result))
    return result.exit_code


def demo_recipe(family: str | None = None) -> str:
    """The recipe of a shipped demo: demo.yaml, or a family's own.

    Raises:
        UserError: the family has no demo.
    """
    shipped = shipped_recipes()
    if family is None:
        return str(shipped["demo.yaml"])
    demos = {load_recipe(path).recipe.model.family: path for name, path in shipped.items() if name.startswith("demo")}
    if family not in demos:
        what, fix = "There is no demo of this family.", f"Give one of {', '.join(sorted(demos))}."
        raise UserError("no-demo", what, where=f"--family {printable(family)}", fix=fix)
    return str(demos[family])
