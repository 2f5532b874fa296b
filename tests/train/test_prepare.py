"""``lora-rocm prepare`` does what a run does before its first step, and the run afterwards does not do it again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_rocm.checks import kernel_choice
from lora_rocm.checks.kernel_choice import KernelChoice
from lora_rocm.commands.prepare import PrepareResult, render
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.layout import RunDir
from lora_rocm.train import dry_run, pipeline, worker
from lora_rocm.train.session import Session
from tests.event_lines import read_events
from tests.train.runs import CPU, bytes_of, dumped, make_recipe, material, start, straight
from tests.wording import says

BOTH = {"images", "captions"}
__all__ = ["material", "straight"]


def prepared(recipe: Recipe, folder: Path) -> RunDir:
    directory = RunDir(folder).create()
    session = Session(directory, watch_parent=False)
    try:
        pipeline.prepare_without_training(pipeline.StartContext(session, recipe, CPU, torch.float32))
    finally:
        session.close()
    return directory


def encoded(directory: RunDir) -> set[str]:
    """Whether a start encoded images and captions."""
    told = read_events(directory.events(), "cache")
    return {event["what"] for event in told if event["what"] in BOTH and event["per_second"]}


def test_a_run_afterwards_encodes_nothing_and_gives_the_same_bytes(
    material: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[float | None]()

    def choose(*_: object, limit_s: float | None, **__: object) -> KernelChoice:
        asked.append(limit_s)
        return KernelChoice(False)

    monkeypatch.setattr(kernel_choice, "choose", choose)
    recipe = make_recipe(material, cache={"dir": str(tmp_path / "cache")})
    first = prepared(recipe, tmp_path / "prepared")
    assert encoded(first) == BOTH and asked == [None], "it waits for all kernels"
    assert not first.list_checkpoints() and not first.result.exists()
    assert start(recipe, tmp_path / "run") and bytes_of(tmp_path / "run") == bytes_of(straight)
    assert not encoded(RunDir(tmp_path / "run")) and asked[1] == kernel_choice.LIMIT_S
    shutil.rmtree(tmp_path / "cache")
    assert encoded(prepared(recipe, tmp_path / "again")) == BOTH, "the control"


def test_adapters_of_an_earlier_start_are_not_attached_twice(
    material: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process accepts them by a file in the cache. Other targets and adapters from a file are attached."""
    attached, require, cache = list[object](), pipeline.require_startable, {"dir": str(tmp_path / "cache")}

    def counted(*given: Any) -> object:
        attached.append(1)
        return require(*given)

    def times(name: str, **changed: Any) -> int:
        dry_run.VERDICTS.clear()  # as in a new process
        attached.clear()
        prepared(make_recipe(material, cache=cache, **changed), tmp_path / name)
        return len(attached)

    monkeypatch.setattr(pipeline, "require_startable", counted)
    monkeypatch.setattr(pipeline, "choose_kernels", lambda *given, **how: None)
    assert [times("first"), times("second"), times("other", lora={"rank": 3})] == [1, 0, 1]
    from_file = {"rank": 2, "init_from": str(next(straight.rglob("*.safetensors")))}
    assert [times("from a file", lora=from_file), times("again", lora=from_file)] == [1, 1]
    token = {"rank": 2, "new_tokens": [{"token": "<toy>", "init": "cat"}]}  # the tokenizer may change
    assert [times("token", lora=token), times("token again", lora=token)] == [1, 1]
    dry_run.VERDICTS.clear()


def test_the_worker_ends_without_training(material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDir(tmp_path / "run").create()
    directory.recipe.write_text(dumped(make_recipe(material, runtime={"device": "cpu"})), encoding="utf-8")
    monkeypatch.setattr(Session, "_watch_parent", lambda self: None)
    threads = torch.get_num_threads()
    try:
        assert worker.main([str(directory.path), "--prepare"]) == 0
    finally:
        torch.set_num_threads(threads)
    (end,) = read_events(directory.events(), "end")
    assert (end["reason"], end["updates"], end["exit_code"]) == ("done", 0, 0)
    assert not read_events(directory.events(), "step") and not directory.list_checkpoints()


def test_the_result_in_words() -> None:
    result = PrepareResult(Path("cache"), 24, 2, {"64x64": 24}, 9, 12.0, 0)
    assert says(render(result), "train/samples-in-caches-kernels-checked")
    stopped = PrepareResult(Path("cache"), 0, 0, {}, 0, 1.0, 130)
    assert says(render(stopped), "train/stopped-while-preparing")
