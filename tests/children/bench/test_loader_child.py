"""The heavy half of ``bench loader``, for real, with few batches and one worker."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_rocm.children.bench import loader_child
from lora_rocm.dataset.sources.folders import source_folder
from lora_rocm.encoded_cache.cache import LatentCache
from lora_rocm.encoded_cache.encode_session import Encoding
from lora_rocm.families.base import family_for
from lora_rocm.loader.batches import BatchPlan, prepare
from lora_rocm.loader.cached_dataset import Orders
from lora_rocm.loader.worker_pool import WorkerPool, WorkersFailed
from lora_rocm.processes.jobs import LoaderJob
from lora_rocm.processes.tool import write_job
from lora_rocm.recipe.load import load_recipe
from tests.supervisor.fake_run import as_heard


@pytest.fixture
def few(tmp_path: Path) -> list[str]:
    """The demo with a few of its images."""
    shutil.copytree(source_folder("builtin:demo", 0), tmp_path / "pics", ignore=shutil.ignore_patterns("zibu*"))
    return [f"data.path={tmp_path / 'pics'}", f"cache.dir={tmp_path / 'cache'}", "data.resolution=64"]


@pytest.fixture
def measured(few: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    def run(counts: list[int]) -> list[dict[str, Any]]:
        recipe = load_recipe("demo.yaml", [*few, "runtime.device=cpu"]).recipe
        job = write_job(tmp_path, LoaderJob(recipe=recipe.model_dump(mode="json")))
        monkeypatch.setattr(loader_child, "worker_counts", lambda: counts)
        monkeypatch.setattr(loader_child, "BATCHES", 5)
        monkeypatch.setattr(sys, "argv", ["bench_loader", str(job)])
        assert loader_child.main() == 0
        return [as_heard(line) for line in capfd.readouterr().out.splitlines()]

    return run


@pytest.mark.slow
def test_both_sources_with_and_without_workers(measured: Any) -> None:
    machine, *events = measured([0, 1])
    rows = [event for event in events if event["type"] == "row"]
    assert machine["images"] == 6
    assert [(row["source"], row["workers"]) for row in rows] == [(s, n) for s in ("cache", "images") for n in (0, 1)]
    assert all(row["per_second"] > 0 and row["first_s"] > 0 and row["problem"] is None for row in rows)
    assert rows[1]["first_s"] > rows[0]["first_s"]  # a process has to start


def test_workers_that_fall_back_are_no_figure(measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: WorkerPool, orders: Orders) -> Any:
        raise WorkersFailed("it hung")

    monkeypatch.setattr(WorkerPool, "reads", failing)
    rows = [event for event in measured([1]) if event["type"] == "row"]
    assert [row["per_second"] for row in rows] == [None, None]
    assert all("it hung" in row["problem"] for row in rows)


def test_images_are_decoded_as_for_the_cache(few: list[str]) -> None:
    recipe = load_recipe("demo.yaml", [*few, "data.flip_aug=true"]).recipe
    family = family_for(recipe)
    prepared = prepare(recipe, family, Encoding(LatentCache(Path(recipe.cache.dir)), torch.device("cpu")))
    decoder = loader_child.decoder_of(prepared, family)
    (order,) = Orders(BatchPlan(prepared.items, 2, 1, 0), 3, 4)
    pixels_BCHW = decoder[order].tensors["pixels"]
    assert pixels_BCHW.shape[:2] == (2, 3) and not torch.equal(pixels_BCHW[0], pixels_BCHW[1])
