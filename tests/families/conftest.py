"""One random tiny SDXL for all tests of the families."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import SHALLOW_WIDER, write_tiny_sdxl


@pytest.fixture(scope="session")
def tiny_sdxl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A diffusers folder, in a path with a space and a letter that is not ASCII."""
    return write_tiny_sdxl(tmp_path_factory.mktemp("models") / "tiny sdxl ä", **SHALLOW_WIDER)
