"""The lower bounds of the dependencies are true: the demos run with them, all together."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from scripts import lowest_versions

ROOT = Path(__file__).parents[1]


def test_every_dependency_has_one_bound_and_this_environment_keeps_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = lowest_versions.bounds()
    assert len(bounds) == len(project["dependencies"]), "each as NAME>=VERSION: no upper bound, no marker"
    for name, bound in bounds.items():
        assert lowest_versions.numbers(metadata.version(name)) >= lowest_versions.numbers(bound), name


def test_a_package_that_is_newer_than_its_bound_was_not_tried() -> None:
    wanted = {"torch": "2.11", "numpy": "2.2.6", "rich": "13.9"}
    assert lowest_versions.newer_than_bound({"torch": "2.13.0+cpu", "numpy": "2.2.6", "rich": "13.9.0"}, wanted) == []
    wrong = lowest_versions.newer_than_bound({"torch": "2.13.0", "numpy": "2.3.0"}, wanted)
    assert [text.split()[0] for text in wrong] == ["numpy", "rich"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_demos_run_with_the_lowest_versions() -> None:
    """Needs the network, and 2 GB of disk."""
    assert lowest_versions.main([]) == 0
