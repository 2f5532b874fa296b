"""A tiny base of each family of diffusion transformers."""

from __future__ import annotations

import pytest

from tests.families.common.dit.cases import Case


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[type[Case], Case]:
    return {}


@pytest.fixture
def case(
    request: pytest.FixtureRequest, made: dict[type[Case], Case], tmp_path_factory: pytest.TempPathFactory
) -> Case:
    """The family that the test is parametrised with, one for all tests of a module."""
    if request.param not in made:
        made[request.param] = request.param(tmp_path_factory.mktemp(request.param.__name__) / "base")
    return made[request.param]
