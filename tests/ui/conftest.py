"""Fixtures of all tests of the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ui.site import Site, new_site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """The page of an empty folder, which is also the current one, as after ``lora-rocm ui``."""
    folder = tmp_path / "my models"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return new_site(folder)
