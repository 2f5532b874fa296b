"""The commands about runs: ``fork``, ``status``, ``runs`` and ``report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lora_rocm.commands.cli_command import Command, printed, printed_lines
from lora_rocm.commands.cli_help import RUNS
from lora_rocm.commands.cli_options import (
    DEFAULT_RUNS,
    RUNS_VARIABLE,
    RunPath,
    RunsDir,
    RunState,
    values,
)
from lora_rocm.commands.output import Output
from lora_rocm.commands.start_options import StartOptions


def add_run_commands(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    epilogs = {
        fork: "fork --step 500 --set optim.learning_rate=5e-5",
        status: "status\nstatus runs/my-20260101-120000 --json",
        runs: "runs --state finished --family sdxl --last 5",
        report: "report\nreport runs/my-20260101-120000 --speed-line",
    }
    for handler, epilog in epilogs.items():
        app.command(cls=Command, rich_help_panel=RUNS, epilog=epilog)(handler)


@printed_lines
def fork(
    output: Output,
    run: RunPath = None,
    runs_dir: RunsDir = DEFAULT_RUNS,
    step: Annotated[
        int | None,
        typer.Option(min=1, max=2**31 - 1, metavar="N", help="Step of the checkpoint; default: the newest."),
    ] = None,
    *,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: NAME-fork-TIME, next to the first run.")
    ] = None,
    options: StartOptions,
    no_start: Annotated[bool, typer.Option("--no-start", help="Only create the run; resume starts it.")] = False,
) -> int:
    """Continue from a checkpoint of a run in a new run, with changed values. The first run stays as it is."""
    from lora_rocm.commands import fork as command
    from lora_rocm.commands.newest import run_or_newest
    from lora_rocm.supervisor.fork import ForkRequest

    request = ForkRequest(run_or_newest(run, runs_dir, output), step, options.settings(), run_dir)
    return command.fork(request, output, gpus=options.gpus, supervised=not options.no_supervisor, start=not no_start)


@printed
def status(output: Output, run: RunPath = None, runs_dir: RunsDir = DEFAULT_RUNS) -> int:
    """Show the state of a run."""
    from lora_rocm.commands import status
    from lora_rocm.commands.newest import run_or_newest
    from lora_rocm.supervisor.choose_run_dir import open_run

    found = status.status(open_run(run_or_newest(run, runs_dir, output)))
    return output.show(found, status.status_text(found))


@printed
def runs(
    output: Output,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", envvar=RUNS_VARIABLE, help="The folder that the runs are in.")
    ] = DEFAULT_RUNS,
    state: Annotated[
        list[RunState] | None,
        typer.Option(metavar=values(RunState), help="Only runs in this state; may be given several times."),
    ] = None,
    family: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this model family; may be given several times.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="GLOB", help="Only runs with such a name, for example 'cat-*'.")
    ] = None,
    last: Annotated[int | None, typer.Option(min=1, max=1_000_000, metavar="N", help="Only the newest N runs.")] = None,
    rename: Annotated[
        tuple[str, str] | None, typer.Option(metavar="RUN NAME", help="Give a run directory another name.")
    ] = None,
    archive: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN", help="Move a run to the folder archive. A finished one loses its training states."),
    ] = None,
    delete: Annotated[
        list[str] | None, typer.Option(metavar="RUN", help="Delete a run; may be given several times.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the disk space that would be freed.")] = False,
) -> int:
    """List the runs in a folder: family, state, step, losses and size. Or rename, archive and delete runs."""
    from lora_rocm.commands import runs

    changes = runs.changed(folder, runs.RunChanges(rename, tuple(archive or ()), tuple(delete or ()), dry_run))
    if changes:
        result = runs.RunsResult((), changes)
        return output.show(result, runs.render(result))
    wanted = runs.RunFilter(tuple(each.value for each in state or ()), tuple(family or ()), name, last)
    found = runs.runs(folder, wanted)
    return output.show(found, runs.render(found))


@printed
def report(
    output: Output,
    run: RunPath = None,
    runs_dir: RunsDir = DEFAULT_RUNS,
    speed_line: Annotated[
        bool, typer.Option("--speed-line", help="Print the measured s/it as a line for a public table.")
    ] = False,
) -> int:
    """Write report.html of a run, even while it is running."""
    from lora_rocm.commands import report as command
    from lora_rocm.commands.newest import run_or_newest
    from lora_rocm.supervisor.choose_run_dir import open_run

    found = command.report(open_run(run_or_newest(run, runs_dir, output)), speed_line=speed_line)
    return output.show(found, command.render(found))
