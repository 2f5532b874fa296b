"""Loader workers that a run gave up: on record as a change, and no byte differs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.loader import worker_pool
from lora_rocm.rundir.events import EventReader
from lora_rocm.rundir.incidents import trouble_of
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.restart_policy import changes_of
from tests.event_lines import read_events
from tests.train.runs import bytes_of, make_recipe, material, start, straight

__all__ = ["material", "straight"]


def changes(run_dir: Path) -> list[dict[str, Any]]:
    return read_events(RunDir(run_dir).events(), "change")


@pytest.mark.parametrize("seen", ["loader-hang", pytest.param("died", marks=pytest.mark.slow)])
def test_workers_that_are_given_up_are_a_change_of_the_run(
    material: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: Any
) -> None:

    class Failing:
        """Replaces ``worker_pool.Group``: it reads in this process, so no process has to start."""

        def __init__(self, source: Any, size: int, runtime: Any) -> None:
            self.source = source

        def reads(self, orders: Any) -> Iterator[Any]:
            yield from itertools.islice(worker_pool.data_loader(self.source, orders), 3)
            raise worker_pool.WorkersFailed("it failed", seen)

        def close(self) -> None:
            pass

    with monkeypatch.context() as patch:
        patch.setattr(worker_pool, "WorkerPool", Failing)
        assert start(make_recipe(material, runtime={"workers": 1}), tmp_path / "run")
    (change,) = changes(tmp_path / "run")
    assert (change["id"], change["effect"], change["seen"]) == ("workers-0", "exact", seen)
    assert bytes_of(tmp_path / "run") == bytes_of(straight)
    run_dir = RunDir(tmp_path / "run")
    assert changes_of(trouble_of(run_dir, EventReader(run_dir.events()).poll())) == ("workers-0",)  # for a later resume


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_workers_that_work_are_no_change(material: Path, straight: Path, tmp_path: Path, workers: int) -> None:
    """Nor is it where the recipe wants none."""
    assert start(make_recipe(material, runtime={"workers": workers}), tmp_path / "run")
    assert changes(tmp_path / "run") == [] and bytes_of(tmp_path / "run") == bytes_of(straight)
