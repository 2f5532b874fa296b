"""Workers that start together, each with its own recipe, as ``torchrun`` starts them; a thread each, but in the last
test.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from lora_rocm.device.process_group import World
from lora_rocm.errors import StoppedError, UserError
from lora_rocm.families.base import ModelFamily
from lora_rocm.recipe.load import dump_recipe
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.worker_group import environments
from lora_rocm.train import pipeline, session, worker
from lora_rocm.train.context import Data, StartContext
from lora_rocm.train.opened_device import OpenedDevice
from tests.event_lines import read_events
from tests.train.runs import make_recipe, material
from tests.wording import says
from tests.worlds import in_threads

__all__ = ["material"]
ROOT = Path(__file__).parents[2]
SHORT: dict[str, dict[str, Any]] = {
    "data": {"resolution": 64, "bucket_step": 16},
    "train": {"max_train_steps": 2, "gradient_accumulation_steps": 1, "batch_size": 1},
}


def changed(material: Path, keys: Mapping[str, Any]) -> Recipe:
    sections = {section: dict(its) for section, its in SHORT.items()}
    for key, value in keys.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return make_recipe(material, **sections)


class Pair:
    """Two workers of one run directory. A rank that waits for an ended one is notified, as from a store that
    is gone.
    """

    def __init__(self, run_dir: Path, patch: pytest.MonkeyPatch) -> None:
        self.run_dir, self._here, self._ended = RunDir(run_dir).create(), threading.local(), threading.Event()
        patch.setattr(worker, "rank_of", lambda environ: self._here.world.me)
        patch.setattr(worker, "join", lambda me, device, beat: self._here.world)
        patch.setattr(World, "close", lambda world: None)
        patch.setattr(session.Session, "_watch_parent", lambda self: None)

    @property
    def rank(self) -> int:
        return int(self._here.world.me.rank)

    def __call__(self, recipes: Sequence[Recipe]) -> list[tuple[int, dict[str, Any]]]:
        """(exit code, last event) of each."""
        for rank, recipe in enumerate(recipes):
            self.run_dir.recipe_of(rank).write_text(dump_recipe(recipe), encoding="utf-8")
        codes = in_threads(len(recipes), self._work)
        return [(code, read_events(self.run_dir.events(rank))[-1]) for rank, code in enumerate(codes)]

    def _work(self, world: World) -> int:
        self._here.world, world.beat = world, self._beat
        own = str(self.run_dir.recipe_of(world.me.rank))
        try:
            return worker.main([str(self.run_dir.path), "--recipe", own])
        finally:
            self._ended.set()

    def _beat(self, activity: str) -> None:
        if getattr(self._here, "heard", False):  # looked once more since, so nothing that was written is missed
            raise RuntimeError("Connection closed by peer")
        self._here.heard = self._ended.is_set()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    return Pair(tmp_path / "run", monkeypatch)


def refusals(ends: list[tuple[int, dict[str, Any]]], what: str) -> list[str]:
    """The places where all report that they differ in ``what``."""
    assert [code for code, _ in ends] == [UserError.exit_code] * 2, ends
    assert all(
        event["code"] == "ranks-differ" and says(event["what"], "train/differ-in-what", what=what) for _, event in ends
    ), ends
    return [event["where"] for _, event in ends]


def test_other_recipes_are_refused(material: Path, start: Pair) -> None:
    """The two that save or end at other steps would wait for each other for ever."""
    first = {"lora.rank": 2, "train.max_train_steps": 2, "output.save_every_n_steps": 500, "sample.seed": 1234}
    second = {"lora.rank": 3, "train.max_train_steps": 3, "output.save_every_n_steps": 1, "sample.seed": 1}
    differ = [f"{key}: rank 0 has {first[key]}, rank 1 has {second[key]}" for key in sorted(first)]
    for where in refusals(start([changed(material, keys) for keys in (first, second)]), "the recipe"):
        assert sorted(where.split("; ")) == differ


@pytest.mark.parametrize("key", ["cache.dir", "runtime.worker_timeout_s"])
def test_what_is_of_one_process_may_differ(
    key: str, material: Path, start: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as threads can go, which cannot load a model at once. Also the control of the refusals in this file."""

    def load(*args: object) -> NoReturn:
        raise StoppedError("enough", "Here the test ends.")

    monkeypatch.setattr(pipeline, "load", load)
    own = str(material / "other cache") if key == "cache.dir" else 99.0
    ends = start([make_recipe(material, **SHORT), changed(material, {key: own})])
    assert [(code, event["code"]) for code, event in ends] == [(StoppedError.exit_code, "enough")] * 2


@pytest.mark.parametrize("theirs", ["0.1", None])
def test_other_software_is_refused(
    theirs: str | None, material: Path, start: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = ["diffusers", "peft", "transformers", "triton"]

    def version(name: str) -> str:
        if name not in packages:
            return metadata.version(name)
        if start.rank == 0:
            return "9.9"
        if theirs is None:
            raise metadata.PackageNotFoundError(name)
        return theirs

    monkeypatch.setattr("lora_rocm.foundation.packages.version", version)
    differ = [f"{package}: rank 0 has 9.9, rank 1 has {theirs or 'nothing'}" for package in packages]
    for where in refusals(start([make_recipe(material, **SHORT)] * 2), "software"):
        assert sorted(where.split("; ")) == differ


def test_another_number_format_is_refused(material: Path, start: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    formats = (torch.float32, torch.bfloat16)  # a card that computes one that the other does not
    monkeypatch.setattr(OpenedDevice, "dtype", lambda opened: formats[start.rank])
    ends = start([make_recipe(material, **SHORT)] * 2)
    assert refusals(ends, "software") == ["precision: rank 0 has torch.float32, rank 1 has torch.bfloat16"] * 2


def test_other_images_are_refused(material: Path, start: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same path on another machine has other content."""
    prepare_data, caption = pipeline.prepare_data, material / "images" / "bild 1.txt"
    before = caption.read_bytes()

    def elsewhere(begin: StartContext, family: ModelFamily) -> Data:
        if begin.world.me.rank == 1:
            caption.write_text("another caption", encoding="utf-8")
        return prepare_data(begin, family)

    monkeypatch.setattr(pipeline, "prepare_data", elsewhere)
    try:
        ends = start([make_recipe(material, **SHORT)] * 2)
    finally:
        caption.write_bytes(before)
    assert all("samples: rank 0 has" in where for where in refusals(ends, "the training data"))


@pytest.mark.slow
@pytest.mark.parametrize(("second", "codes"), [(3, [2, 2]), (2, [0, 0])])
def test_real_processes_are_refused_too_and_do_not_stand_still(
    second: int, codes: list[int], material: Path, tmp_path: Path
) -> None:
    children = []
    for rank, env in enumerate(environments({**os.environ, "PYTHONPATH": str(ROOT)}, 2)):
        own = tmp_path / f"of rank {rank}.yaml"
        recipe = changed(material, {"train.max_train_steps": second if rank else 2})
        own.write_text(dump_recipe(recipe), encoding="utf-8")
        words = ["train", str(own), "--run-dir", str(tmp_path / "run"), "--resume", "latest"]
        command = [sys.executable, "-m", "lora_rocm", *words, "--set", "runtime.device=cpu"]
        children.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    said = [child.communicate(timeout=200)[0].decode("utf-8", "replace") for child in children]
    assert [child.returncode for child in children] == codes, said
    if codes[0]:
        assert all(says(each, "train/train-max-train-steps-rank-0-has") for each in said), said
