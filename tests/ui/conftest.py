"""Fixtures of all tests of the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal

from tests.ui.site import Site, new_site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """The page of an empty folder, which is also the current one, as after ``lora-rocm ui``.

    All requests of a test share one event loop; otherwise each request starts a thread with its own.
    """
    folder = tmp_path / "my models"
    folder.mkdir()
    monkeypatch.chdir(folder)
    found = new_site(folder)
    with start_blocking_portal(**found.client.async_backend) as portal:
        found.client.portal = found.stranger.portal = portal
        yield found
