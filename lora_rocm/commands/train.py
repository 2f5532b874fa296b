"""``lora-rocm train`` and ``demo``: show one training run in the terminal (see ``commands.start_run``)."""

from __future__ import annotations

from contextlib import nullcontext

from lora_rocm.commands.output import Output
from lora_rocm.commands.run_request import RunRequest
from lora_rocm.commands.start_run import PreparedRun, RunResult, next_commands, prepare_run, render
from lora_rocm.commands.worker_log import followed
from lora_rocm.errors import UserError
from lora_rocm.foundation.terminal_text import printable
from lora_rocm.processes.process import Asked
from lora_rocm.recipe.load import load_recipe, shipped_recipes  # recipe: the user names it
from lora_rocm.report.progress_bar import make_progress
from lora_rocm.rundir.event_types import Event


def train(request: RunRequest, output: Output | None = None) -> int:
    """Train with a progress display, and return the exit code (0 if done, 130 if stopped).

    Args:
        request: the request for a run.
        output: prints the progress, or None for text mode.

    Raises:
        LoraRocmError: training failed, with a message for the user.
    """
    output = output or Output()
    run = prepare_run(request, output.notify)
    result = trained(run, output)
    output.show(result, render(result))
    if following := next_commands(result, run.loaded.recipe):
        output.notify(following)
    return result.exit_code


def trained(run: PreparedRun, output: Output, asked: Asked | None = None) -> RunResult:
    """Train a prepared run with a progress display, and return its result.

    Args:
        run: the prepared run.
        output: prints the progress.
        asked: requests to stop, as in ``PreparedRun.train``.

    Raises:
        LoraRocmError: training failed, with a message for the user.
    """
    with make_progress(output.stream, run.spill_bytes, run.run_dir) as progress:

        def on_event(event: Event) -> None:
            output.follow(event.to_json())
            progress.on_event(event)

        with followed(run.run_dir.worker_log, output.detail) if output.verbose else nullcontext():
            return run.train(on_event, progress.notify, asked)


def demo_recipe(family: str | None = None) -> str:
    """Return the recipe of a shipped demo: demo.yaml, or the demo of a family.

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
