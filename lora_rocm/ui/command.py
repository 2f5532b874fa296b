"""``lora-rocm ui``: the page that shows and starts everything in a browser."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from lora_rocm.commands.output import Notify, unheard
from lora_rocm.errors import MachineError, UserError

HOST, PORT = "127.0.0.1", 8421
PACKAGES = ("starlette", "uvicorn", "python_multipart")


@dataclass(frozen=True)
class UiResult:
    """The page's server, which runs until Ctrl-C.

    Attributes:
        link: the address to open, with the token. Whoever has it can use the page.
        folder: the folder with the files that the page shows.
        runs: the folder of runs.
    """

    link: str
    folder: Path
    runs: Path


def ui(
    folder: Path,
    runs: Path,
    *,
    host: str = HOST,
    port: int = PORT,
    opens_browser: bool = True,
    show: Callable[[UiResult], object] = lambda result: None,
    notify: Notify = unheard,
) -> None:
    """Serve the page until Ctrl-C.

    Args:
        folder: the folder with recipes, images and runs.
        runs: the folder of runs, relative to ``folder``.
        host: address to listen on; other than 127.0.0.1, other machines can reach the page with its link.
        port: first port to try.
        opens_browser: whether to open the link in the browser.
        show: receives the result once the server listens.
        notify: receives lines for the terminal.

    Raises:
        UserError: there is no such folder or host.
        MachineError: the packages of the page are not installed, or no port is free.
    """
    require_ui_packages()
    from lora_rocm.ui.server import PageServer, open_browser

    if not folder.is_dir():
        fix = "Name a folder that exists, or leave the argument away to use this one."
        raise UserError("no-folder", "There is no such folder.", where=str(folder), fix=fix)
    os.chdir(folder)  # relative paths of recipes start there, as in a terminal
    with PageServer.listening(Path(), runs, host, port, notify) as server:
        show(UiResult(server.link, server.context.folders.working, server.context.folders.runs))
        if host not in (HOST, "localhost", "::1"):
            notify("Other machines can open this link. The connection is not encrypted: use it in a network you trust.")
        if opens_browser:
            open_browser(server.link)
        server.serve()


def render(result: UiResult) -> str:
    """Return the result as text."""
    return f"The page of {result.folder}:\n  {result.link}\nCtrl-C ends the server. Runs that it started continue."


def require_ui_packages() -> None:
    """Check that the packages of the page are installed.

    Raises:
        MachineError: ui-not-installed.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        what = f"The page needs packages that are not installed: {', '.join(missing)}."
        fix = 'Install them: pip install "lora-rocm[ui]"'
        raise MachineError("ui-not-installed", what, where="lora-rocm ui", fix=fix)
