"""Shared by all commands of the command line: plain usage and errors, ``--json``, ``--quiet``, an exit code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from inspect import Parameter, signature
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from lora_rocm.commands.output import Failed, Failure, Output, OutputMode

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; everything else goes to standard error.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result.")]


class Command(TyperCommand):
    """A command with a plain usage line: RECIPE, or [RECIPE] if it is optional.

    Messages about wrong options do not contain the library's own terms.
    """

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = [*args]
        try:
            return super().parse_args(ctx, args)
        except UsageError as raised:
            error: Any = raised
            error.message = self.explained(error.message.removeprefix("Value error, "), given)  # pydantic, of typer's
            if "--json" in given:
                what, where = error.format_message(), " ".join(ctx.command_path.split()[1:])
                failure = Failure("usage", what, where, f"lora-rocm {where} --help lists the options.", error.exit_code)
                Output(OutputMode.JSON).document(Failed(failure))
            raise

    def explained(self, message: str, args: list[str]) -> str:
        """The message about wrong arguments; a subclass may improve it."""
        return message


class BenchCommand(Command):
    """A command that took a file with ``--json`` in earlier versions."""

    def explained(self, message: str, args: list[str]) -> str:
        word = next((word for word in args if word == "--json" or word.startswith("--json=")), None)
        if word is None or not ("extra argument" in message or "does not take a value" in message):
            return message
        file = word.partition("=")[2] or "".join(args[args.index(word) + 1 :][:1])
        return f"--json prints to standard output and takes no file. To write the figures to a file: --output {file}"


def printed(
    command: Callable[..., int | None], *, outlives_output: bool = False, follows: bool = False
) -> Callable[..., None]:
    """Run a handler with the options ``--json`` and ``--quiet``. Its first argument is an ``Output``.

    Its return value is the exit code; errors become messages, never tracebacks.

    Args:
        command: the handler.
        outlives_output: see ``exit_code_of``.
        follows: see ``Output``.
    """

    @functools.wraps(command)
    def run(*args: object, as_json: bool, quiet: bool, **kwargs: object) -> None:
        from lora_rocm.foundation.exit_codes import exit_code_of

        output = Output(
            OutputMode.JSON if as_json else OutputMode.QUIET if quiet else OutputMode.HUMAN, follows=follows
        )
        work = functools.partial(command, output, *args, **kwargs)
        raise typer.Exit(exit_code_of(work, outlives_output=outlives_output, report=output.fail))

    given = signature(command, eval_str=True)
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
        for name, annotation in (("as_json", AsJson), ("quiet", Quiet))
    ]
    parameters = [*list(given.parameters.values())[1:], *options]
    run.__signature__ = given.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


printed_for_files = functools.partial(printed, outlives_output=True)
"""For a command that writes files: it continues if its terminal is closed or the disk of its log is full."""
printed_lines = functools.partial(printed, outlives_output=True, follows=True)
"""For a command that writes files and prints events as JSON lines."""
