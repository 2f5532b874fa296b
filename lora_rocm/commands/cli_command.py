"""Shared by all commands: usage lines, error messages, ``--json``, ``--quiet`` and exit codes."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from inspect import Parameter, signature
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from lora_rocm.commands.cli_help import PROGRAM, write_commands, write_examples, write_parameters
from lora_rocm.commands.output import Failed, Failure, Output, OutputMode
from lora_rocm.errors import StoppedError
from lora_rocm.foundation.colour import help_for_terminal

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; everything else goes to standard error.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", envvar="LORA_ROCM_QUIET", help="Print only the result.")]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        envvar="LORA_ROCM_VERBOSE",
        help="Also print child processes, the log of training, error codes and times, on standard error.",
    ),
]


ARGUMENTS = "lora-rocm arguments"
"""Key of the whole command line in a context's ``meta``."""


@contextmanager
def usage_errors_as_documents(arguments: Sequence[str]) -> Iterator[None]:
    """Print the document of a usage error on standard output if the command line has ``--json``.

    The library then prints its text on standard error and ends with its exit code. The document is one line, because
    some commands print JSON lines. Ctrl+C before a command begins is reported like one in a command.
    """
    is_json = asks_for_json(arguments)
    try:
        yield
    except KeyboardInterrupt:
        stopped = StoppedError("stopped", "Stopped.")
        Output(OutputMode.JSON if is_json else OutputMode.HUMAN, follows=True).fail(stopped)
        raise typer.Exit(stopped.exit_code) from None
    except UsageError as raised:
        if is_json:
            error: Any = raised
            path = error.ctx.command_path.split()[1:] if error.ctx is not None else []
            help_line = " ".join((PROGRAM, *path, "--help"))
            listed = "commands" if error.ctx is None or hasattr(error.ctx.command, "commands") else "options"
            fix = f"{help_line} lists the {listed}."
            failure = Failure("usage", error.format_message(), " ".join(path), fix, error.exit_code)
            with suppress(OSError):  # the text on standard error and the exit code remain
                Output(OutputMode.JSON, follows=True).document(Failed(failure))
        raise


def asks_for_json(arguments: Sequence[str]) -> bool:
    """Whether ``--json`` is among the options, even if they cannot be parsed. After ``--`` there are no options."""
    options = itertools.takewhile(lambda word: word != "--", arguments)
    return any(word == "--json" or word.startswith("--json=") for word in options)


class Group(TyperGroup):
    """A group of commands. Its help lists them by subject, with whole sentences.

    The outermost group prints the documents of all usage errors, also for the groups and commands in it.
    """

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        if parent is not None:
            return super().make_context(info_name, args, parent=parent, **extra)
        given = [*args]
        with usage_errors_as_documents(given):
            context = super().make_context(info_name, args, **extra)
        context.meta[ARGUMENTS] = given
        return context

    def invoke(self, ctx: Any) -> Any:
        if ctx.parent is not None:
            return super().invoke(ctx)
        with usage_errors_as_documents(ctx.meta[ARGUMENTS]):
            return super().invoke(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_parameters(self.get_params(ctx), formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        write_commands((command for command in self.commands.values() if not command.hidden), formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(self.epilog or "", formatter)

    def get_help(self, ctx: Any) -> str:
        return help_for_terminal(super().get_help(ctx))


class Command(TyperCommand):
    """A command with a plain usage line: RECIPE for a required argument, [RECIPE] for an optional one.

    Messages about wrong options do not contain the command-line library's own terms.
    """

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_parameters(self.get_params(ctx), formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(self.epilog or "", formatter)

    def get_help(self, ctx: Any) -> str:
        return help_for_terminal(super().get_help(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = [*args]
        try:
            return super().parse_args(ctx, args)
        except UsageError as raised:
            error: Any = raised
            error.ctx = error.ctx or ctx  # the library's parser does not always know it
            error.message = self.explained(error.message.removeprefix("Value error, "), given)  # pydantic, of typer's
            raise

    def explained(self, message: str, args: list[str]) -> str:
        """Return the message about wrong arguments. A subclass may improve it.

        It is empty if an argument is missing: the library's own sentence then precedes the result.
        """
        example = next(iter((self.epilog or "").splitlines()), "")
        return message or (example and f"For example: {PROGRAM} {example.strip()}")


class BenchCommand(Command):
    """A ``bench`` command. In earlier versions, ``--json`` took a file name.

    A user who still passes one gets a special message.
    """

    def explained(self, message: str, args: list[str]) -> str:
        word = next((word for word in args if word == "--json" or word.startswith("--json=")), None)
        if word is None or not ("extra argument" in message or "does not take a value" in message):
            return message
        file = word.partition("=")[2] or "".join(args[args.index(word) + 1 :][:1])
        return f"--json prints to standard output and takes no file. To write the figures to a file: --output {file}"


def printed(
    command: Callable[..., int | None], *, outlives_output: bool = False, follows: bool = False
) -> Callable[..., None]:
    """Turn a handler into a command with the options ``--json``, ``--quiet`` and ``--verbose``.

    The handler gets an ``Output`` as its first argument and returns the exit code. Its errors are shown as messages,
    never as tracebacks. A parameter with a dataclass as its type becomes the options that the fields declare, and the
    handler gets the dataclass (``start_options``).

    Args:
        command: the handler.
        outlives_output: whether it keeps running if standard output cannot be written; see ``exit_code_of``.
        follows: whether it prints events in JSON mode; see ``Output``.
    """

    @functools.wraps(command)
    def run(*args: object, as_json: bool, quiet: bool, verbose: bool, **kwargs: object) -> None:
        from lora_rocm.foundation.exit_codes import exit_code_of

        mode = OutputMode.JSON if as_json else OutputMode.QUIET if quiet else OutputMode.HUMAN
        output = Output(mode, follows=follows, verbose=verbose)
        for name, group in groups.items():
            kwargs[name] = group(**{each.name: kwargs.pop(each.name) for each in fields(group)})
        work = functools.partial(command, output, *args, **kwargs)
        began_s = time.monotonic()
        with output.details():
            code = exit_code_of(work, outlives_output=outlives_output, report=output.fail)
            output.detail(f"exit code {code} after {time.monotonic() - began_s:.2f} s")
        raise typer.Exit(code)

    given = signature(command, eval_str=True)
    own = list(given.parameters.values())[1:]
    groups: dict[str, type[Any]] = {
        each.name: each.annotation
        for each in own
        if isinstance(each.annotation, type) and is_dataclass(each.annotation)
    }
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
        for name, annotation in (("as_json", AsJson), ("quiet", Quiet), ("verbose", Verbose))
    ]
    expanded = [shown for each in own for shown in (_options_of(groups[each.name]) if each.name in groups else [each])]
    parameters = [*expanded, *options]
    run.__signature__ = given.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def _options_of(group: type[Any]) -> list[Parameter]:
    """Return the options that the fields of a dataclass declare. Each field has a default."""
    types = get_type_hints(group, include_extras=True)
    return [
        Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=types[each.name])
        for each in fields(group)
    ]


printed_for_files = functools.partial(printed, outlives_output=True)
"""``printed`` for a command that writes files.

It keeps running if its terminal closes or the disk of its log is full.
"""
printed_lines = functools.partial(printed, outlives_output=True, follows=True)
"""``printed`` for a command that writes files and, in JSON mode, prints events as JSON lines."""
