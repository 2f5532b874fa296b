"""A fork trains on from its parent's checkpoint: unchanged, to the parent's bytes."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from lora_rocm.errors import ResumeError
from lora_rocm.recipe.load import load_recipe
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.run_view import RunView
from lora_rocm.supervisor.fork import ForkRequest, create_fork
from tests.train.runs import STEPS, bytes_of, losses_of, make_recipe, material, start, straight

__all__ = ["material", "straight"]


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def forked(parent: Path, to: Path, *overrides: str, step: int | None = 4) -> RunDir:
    return create_fork(ForkRequest(parent, step, overrides, run_dir=to)).run_dir


def trained(fork: RunDir) -> bool:
    return start(load_recipe(fork.recipe).recipe, fork.path)


def test_an_unchanged_fork_gives_the_bytes_of_its_parent_and_outlives_it(
    material: Path, straight: Path, tmp_path: Path
) -> None:
    parent = Path(shutil.copytree(straight, tmp_path / "parent"))
    before = digests(parent)
    fork = forked(parent, tmp_path / "fork")
    assert digests(parent) == before, "the parent is only read"
    shutil.rmtree(parent)
    assert RunView.of(fork).updates == 4
    assert trained(fork)
    assert bytes_of(fork.path) == bytes_of(straight)
    view = RunView.of(fork)
    assert view.outcome == "finished" and [point[0] for point in view.losses] == [5, 6]


def test_a_changed_value_takes_effect_from_the_checkpoint_on(material: Path, straight: Path, tmp_path: Path) -> None:
    fork = forked(straight, tmp_path / "fork", "optim.learning_rate=1e-2", "train.max_train_steps=7")
    assert trained(fork)
    assert bytes_of(fork.path) != bytes_of(straight)
    same, other = losses_of(straight)[4:], losses_of(fork.path)
    assert other[0] == pytest.approx(same[0], rel=1e-6), "the first update starts from the same weights"
    assert len(other) == 3 and other[1] != pytest.approx(same[1], rel=1e-6)
    origin = RunView.of(fork).forked_from
    assert origin is not None and origin.step == 4 and origin.run == straight
    assert {each.key for each in origin.differences} == {"optim.learning_rate", "train.max_train_steps"}


def test_other_data_are_still_refused_by_the_worker(material: Path, straight: Path, tmp_path: Path) -> None:
    """The fork's checkpoint has the fork's recipe, but the samples' identity of the parent."""
    fork = forked(straight, tmp_path / "fork")
    folder = Path(shutil.copytree(material / "images", tmp_path / "images"))
    next(folder.glob("*.png")).unlink()
    recipe = load_recipe(fork.recipe).recipe
    data = recipe.data.model_copy(update={"path": str(folder)})
    with pytest.raises(ResumeError) as caught:
        start(recipe.model_copy(update={"data": data}), fork.path)
    assert caught.value.code in ("resume-data-changed", "resume-recipe-changed")


def test_a_fork_of_a_fork(material: Path, straight: Path, tmp_path: Path) -> None:
    first = forked(straight, tmp_path / "first")
    second = forked(first.path, tmp_path / "second", step=None)
    assert trained(second) and bytes_of(second.path) == bytes_of(straight)
    origin = RunView.of(second).forked_from
    assert origin is not None and (origin.run, origin.step) == (first.path, 4)
    assert make_recipe(material).train.max_train_steps == STEPS
