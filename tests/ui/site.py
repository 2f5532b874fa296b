"""The page without a browser: an application, a client that opened its link, and a folder with recipes and runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from lora_rocm.rundir.layout import RunDir
from lora_rocm.ui.access import Access
from lora_rocm.ui.application import create_app
from lora_rocm.ui.context import UiContext
from lora_rocm.ui.folders import Folders
from tests.supervisor.fake_run import write_whole_run

PORT = 8421
ADDRESS = f"http://127.0.0.1:{PORT}"


@dataclass
class Site:
    """An application with its folder.

    ``client`` has opened the link and sends the proof of state changes, as a page with scripts does. ``stranger`` has
    not.
    """

    folder: Path
    context: UiContext
    client: TestClient
    stranger: TestClient

    def run_dir(self, name: str) -> RunDir:
        """The place of a run, which may not exist."""
        return RunDir(self.folder / "runs" / name)

    def run(self, name: str = "a-run") -> RunDir:
        """Write a finished run as a worker would leave it."""
        run_dir = self.run_dir(name)
        write_whole_run(run_dir)
        return run_dir

    def get(self, address: str, **query: Any) -> str:
        """Return the text of a page that must be there."""
        answer = self.client.get(address, params=query)
        assert answer.status_code == 200, f"{address}: {answer.status_code} {answer.text[:500]}"
        return answer.text


def new_site(folder: Path) -> Site:
    """Return an application for a folder."""
    context = UiContext(Folders(folder, Path("runs")), Access(PORT))
    app = create_app(context)
    client = TestClient(app, ADDRESS, raise_server_exceptions=False)
    assert client.get("/static/page.css", params={"token": context.access.token}).status_code == 200
    client.headers["X-CSRF"] = context.access.csrf
    return Site(folder, context, client, TestClient(app, ADDRESS, raise_server_exceptions=False))


def code_of(html: str) -> str:
    """Return the code of the error in a page or a piece of one; empty if it has none."""
    found = re.search(r'class="soft code">\S+ ([a-z-]+)<', html)
    return found[1] if found else ""
