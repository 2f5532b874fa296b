"""The command ``lora-rocm ui``. It imports the server only when called, so that ``--help`` is fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lora_rocm.commands.cli_command import printed
from lora_rocm.commands.cli_options import DEFAULT_RUNS, RUNS_VARIABLE
from lora_rocm.commands.output import Output


@printed
def ui(
    output: Output,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder with recipes, images and runs; default: this one.")
    ] = Path("."),
    runs_dir: Annotated[
        Path, typer.Option("--runs-dir", metavar="DIR", envvar=RUNS_VARIABLE, help="Folder of the runs.")
    ] = DEFAULT_RUNS,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on; 0.0.0.0 lets other machines open the link.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65_535, metavar="N", help="Port; if it is in use, the next free one. 0: any.")
    ] = 8421,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the link.")] = False,
) -> int:
    """Open the web page: runs, images and this machine in a browser.

    It needs the packages of the extra "ui". Ctrl-C ends the server; runs continue without it.
    """
    from lora_rocm.ui import command

    command.ui(
        folder,
        runs_dir,
        host=host,
        port=port,
        opens_browser=not no_browser,
        show=lambda result: output.show(result, command.render(result)),
        notify=output.notify,
    )
    return 0
