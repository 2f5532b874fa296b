"""Command lines that run inside this process. The commands are built once: that takes 27 ms."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from typer.main import get_command
from typer.testing import CliRunner

from lora_rocm import cli

COMMANDS = get_command(cli.app)


@dataclass(frozen=True)
class Ended:
    """The result of a finished command."""

    exit_code: int
    stdout: str
    stderr: str


def command_line(*arguments: object) -> Ended:
    """Run ``lora-rocm ARGUMENTS``. An exception that reaches the user would be a traceback, and is raised here."""
    code = 0
    with CliRunner().isolation() as (stdout, stderr, _):
        try:
            COMMANDS.main([str(argument) for argument in arguments], prog_name="lora-rocm")
        except SystemExit as ended:
            assert isinstance(ended.code, int | None), ended.code
            code = ended.code or 0
        sys.stdout.flush()
        sys.stderr.flush()
        said = [stream.getvalue().decode(errors="replace").replace("\r\n", "\n") for stream in (stdout, stderr)]
    return Ended(code, *said)
