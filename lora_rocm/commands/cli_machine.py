"""The commands about this machine: ``doctor``, ``env`` and ``forget``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lora_rocm.commands.cli_command import Command, printed
from lora_rocm.commands.cli_help import MACHINE
from lora_rocm.commands.cli_options import FactsPath, Overrides, Shell, values
from lora_rocm.commands.output import Output


@printed
def doctor(
    output: Output,
    report_file: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Write a file for a bug report, without private data."),
    ] = None,
    facts: FactsPath = None,
    quick: Annotated[bool, typer.Option("--quick", help="Skip the self-test of the GPU.")] = False,
) -> int:
    """Show problems of this machine and how to fix them. The most harmful one is first."""
    from lora_rocm.commands import doctor as command

    found = command.doctor(facts, report_file=report_file, quick=quick, notify=output.on_stderr)
    output.show(command.result_of(found), command.render(found))
    return found.exit_code


@printed
def env(
    output: Output,
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="Plan for this recipe.")] = None,
    overrides: Overrides = None,
    facts: FactsPath = None,
    shell: Annotated[Shell | None, typer.Option(metavar=values(Shell), help="Print commands for this shell.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Also show reasons and sources.")] = False,
) -> int:
    """Print the environment that training gets on this machine."""
    from lora_rocm.commands import env
    from lora_rocm.rules import environment_text

    found = env.planned(recipe, overrides or (), facts)
    text = environment_text.described(*found, shell.value if shell else None, explain=explain)
    return output.show(env.result_of(*found), text, exact=shell is not None)


@printed
def forget(output: Output) -> int:
    """Forget the mitigations that failures added on this machine."""
    from lora_rocm.commands.output import ForgetResult
    from lora_rocm.rules.this_machine import forget_here

    said = forget_here()
    return output.show(ForgetResult(tuple(said.splitlines())), said)


def add_machine_commands(app: typer.Typer) -> None:
    """Add these commands to the program."""
    app.command(cls=Command, rich_help_panel=MACHINE, epilog="doctor --report report.txt")(doctor)
    app.command(cls=Command, rich_help_panel=MACHINE, epilog="env --explain")(env)
    app.command(cls=Command, rich_help_panel=MACHINE, epilog="forget")(forget)
