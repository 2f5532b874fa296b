"""Fixtures of all tests of the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ui.site import Site, new_site


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """The page of an empty folder."""
    folder = tmp_path / "my models"
    folder.mkdir()
    return new_site(folder)
