"""Whole runs in this process, with a tiny model and five images: the start of the tests of a run."""

from __future__ import annotations

import functools
import gc
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from lora_rocm.hardware.settings import Settings
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.load import dump_recipe
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.event_types import StepEvent
from lora_rocm.rundir.layout import RunDir
from lora_rocm.train import pipeline, resume
from lora_rocm.train.checkpoint import discard_newer
from lora_rocm.train.session import Session
from tests.event_lines import read_events
from tests.supervisor.fake_run import RECIPE
from tests.tiny_models import RUN_TARGETS, SHALLOW, write_tiny_sdxl

CPU = torch.device("cpu")
STEPS = 6
WRITTEN: dict[str, str] = {}
DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _shared_material(tmp_path_factory.getbasetemp())


@functools.cache
def _shared_material(base: Path) -> Path:
    """The common material of all test modules: its images are encoded once. A test that changes it restores it."""
    return write_material(base / "Bilder und Modell")


def write_material(folder: Path) -> Path:
    """A tiny model, five images in two buckets, and a place for caches."""
    write_tiny_sdxl(folder / "model", **SHALLOW)
    generator = random.Random(5)
    for number in range(5):
        size = [(64, 64), (96, 48)][number % 2]
        image = Image.frombytes("RGB", size, generator.randbytes(3 * size[0] * size[1]))
        (folder / "images").mkdir(exist_ok=True)
        image.save(folder / "images" / f"bild {number}.png")
        (folder / "images" / f"bild {number}.txt").write_text(f"zibu, cat, number {number}", encoding="utf-8")
    return folder


def make_recipe(material: Path, **sections: dict[str, Any]) -> Recipe:
    base: dict[str, dict[str, Any]] = {
        "model": {"name_or_path": str(material / "model")},
        "data": {"path": str(material / "images"), "resolution": 64, "bucket_step": 16},
        "lora": {"rank": 2, "targets": RUN_TARGETS},
        "optim": {"learning_rate": 1e-3, "lr_scheduler": "cosine", "lr_warmup_steps": 2},
        "train": {"max_train_steps": STEPS, "batch_size": 2, "gradient_accumulation_steps": 2, "mixed_precision": "no"},
        "cache": {"dir": str(material / "cache")},
        "output": {"save_every_n_steps": 2},
    }
    return recipe_from({name: {**base.get(name, {}), **sections.get(name, {})} for name in base | sections})


def start(
    recipe: Recipe,
    run_dir: Path,
    stop_at: int | None = None,
    accept_changes: bool = False,
    device: torch.device = CPU,
    chosen: Path | None = None,
    settings: Settings = Settings(),  # noqa: B008 (frozen)
) -> bool:
    """One start of the worker's work; asks for a stop when update ``stop_at`` was made (one more may be in
    progress).
    """
    directory = RunDir(run_dir).create()
    directory.stop.unlink(missing_ok=True)
    directory.recipe.write_text(dumped(recipe), encoding="utf-8")
    session = Session(directory, watch_parent=False)
    session.readers.append(
        lambda event: (
            directory.stop.touch() if isinstance(event, StepEvent) and event.updates >= (stop_at or STEPS + 9) else None
        )
    )
    try:
        checkpoint = resume.find_checkpoint(session, chosen)
        dtype = DTYPES[recipe.train.mixed_precision]
        begin = pipeline.StartContext(session, recipe, device, dtype, settings, checkpoint, accept_changes)
        finished, _ = pipeline.train(begin)
        return finished
    finally:
        session.close()


def dumped(recipe: Recipe) -> str:
    """``dump_recipe``, once for each recipe: most tests start with the same one several times."""
    found = WRITTEN.get(key := recipe.model_dump_json())
    return found if found is not None else WRITTEN.setdefault(key, dump_recipe(recipe))


def bytes_of(run_dir: Path) -> bytes:
    return RunDir(run_dir).lora.read_bytes()


@pytest.fixture(scope="module")
def straight(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the plain recipe that nobody disturbed; for reading."""
    return _shared_straight(material, tmp_path_factory.getbasetemp() / "straight")


@functools.cache
def _shared_straight(material: Path, run_dir: Path) -> Path:
    assert start(make_recipe(material), run_dir)
    gc.freeze()  # imports of a process's first run; the program collects several times per run
    return run_dir


def rewound(run: Path, to: Path, updates: int = 4) -> Path:
    """A copy of a run as it was after that number of updates: the state that a stop at this checkpoint leaves."""
    directory = RunDir(Path(shutil.copytree(run, to)))
    discard_newer(directory, updates)
    assert directory.list_checkpoints()[-1][0] == updates
    directory.lora.unlink()
    directory.result.unlink()
    return to


def losses_of(run_dir: Path) -> list[float]:
    return [event["loss"] for event in read_events(RunDir(run_dir).events()) if event["type"] == "step"]


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run directory with a recipe, for a worker in this process."""
    monkeypatch.setattr(Session, "_watch_parent", lambda self: None)
    found = RunDir(tmp_path / "run").create()
    found.recipe.write_text(RECIPE, encoding="utf-8")
    return found
