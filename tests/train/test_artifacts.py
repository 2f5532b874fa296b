"""What a run leaves behind where memory does not suffice for the pictures: the run is not ended by them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from lora_rocm.families.sdxl_encoders import VaeEncoder
from lora_rocm.host.settings import Settings
from lora_rocm.recipe.schema import Recipe
from lora_rocm.run.events import read_events
from lora_rocm.run.layout import RunDir
from lora_rocm.train import artifacts, run
from lora_rocm.train.artifacts import Artifacts
from lora_rocm.train.loop import Position
from lora_rocm.train.session import Session
from tests.tiny_models import FEW_TARGETS
from tests.train.test_run import make_recipe, material, start

__all__ = ["material"]

FULL = "HIP out of memory. Tried to allocate 4.00 GiB."


opened: list[Session] = []


@pytest.fixture(autouse=True)
def closing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files are closed; and looking for garbage in a process as large as the tests' takes too long."""
    monkeypatch.setattr(artifacts, "empty_pools", lambda: None)
    yield
    while opened:
        opened.pop().close()


class Adapter:
    """Counts who looks at the base model alone, and who asked for casting."""

    @contextmanager
    def disabled(self) -> Iterator[None]:
        yield

    casting_inputs = disabled


class Rig:
    """Artifacts over a family whose previews find a full device where ``is_full`` says so of ``in_tiles``."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, is_full: Callable[[bool], bool]) -> None:
        self.asked: list[bool] = []
        self.is_full = is_full
        self.session = Session(RunDir(folder).create(), watch_parent=False)
        self.session.run_dir.recipe.touch()
        opened.append(self.session)
        sample = {"prompts": ["a cat"], "steps": 2, "width": 64, "height": 64}
        sections = {"data": {"path": "p"}, "sample": sample, "train": {"max_train_steps": 6}}
        sections["model"] = {"name_or_path": "builtin:tiny-sdxl"}
        parts: dict[str, Any] = dict.fromkeys(("model", "transfer", "data_identity", "steps_per_epoch", "room"))
        self.artifacts = Artifacts(
            session=self.session,
            recipe=Recipe.model_validate(sections),
            family=self,  # type: ignore[arg-type]
            adapter=Adapter(),  # type: ignore[arg-type]
            optimizer=SimpleNamespace(ema={}),  # type: ignore[arg-type]
            guard=SimpleNamespace(check_all=lambda updates: None),  # type: ignore[arg-type]
            prepared=SimpleNamespace(text_lookup=None, samples=()),  # type: ignore[arg-type]
            **parts,
        )
        monkeypatch.setattr(Artifacts, "_export", lambda self, form, position: form)
        monkeypatch.setattr(Artifacts, "_concept", lambda self, before, after: {"score": 1.0})

    def preview(self, model: Any, requests: list[Any], text: Any, in_tiles: bool) -> list[Image.Image]:
        self.asked.append(in_tiles)
        if self.is_full(in_tiles):
            raise torch.OutOfMemoryError(FULL)
        return [Image.new("RGB", (request.width, request.height)) for request in requests]

    def run(self) -> Rig:
        """The pictures of a run of 6 updates that draws every 3."""
        self.artifacts.preview_before()
        for updates in (3, 6):
            self.artifacts.preview(updates)
        self.artifacts.finish(Position(iteration=6, updates=6))
        return self

    def drawn(self) -> list[int]:
        return [event["updates"] for event in told(self.session.run_dir.path, "preview")]

    def result(self) -> dict[str, Any]:
        return json.loads(self.session.run_dir.result.read_text(encoding="utf-8"))


def told(run_dir: Path, event_type: str) -> list[dict[str, Any]]:
    return [event for event in read_events(RunDir(run_dir).events()) if event["type"] == event_type]


def test_previews_that_fit_are_drawn_once_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path, monkeypatch, lambda in_tiles: False).run()
    assert rig.asked == [False] * 3 and rig.drawn() == [0, 3, 6]
    assert rig.result() == {"updates": 6, "exports": ["kohya"], "concept": {"score": 1.0}}
    assert told(tmp_path, "notice") == told(tmp_path, "change") == []


def test_previews_that_do_not_fit_are_decoded_in_tiles_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path, monkeypatch, lambda in_tiles: not in_tiles).run()
    assert rig.asked == [False, True, True, True] and rig.drawn() == [0, 3, 6]
    assert [event["id"] for event in told(tmp_path, "change")] == ["vae-tiling"]
    assert rig.result()["concept"] and rig.session.run_dir.before_after.exists()


@pytest.mark.parametrize("fit", [0, 1])
def test_pictures_that_cannot_be_drawn_do_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fit: int
) -> None:
    rig = Rig(tmp_path, monkeypatch, lambda in_tiles: len(rig.asked) > fit)
    rig.run()
    said = [event["text"] for event in told(tmp_path, "notice")]
    assert any("No pictures after step 6" in text and FULL in text and "sample.width" in text for text in said)
    assert rig.drawn() == [0][:fit] and rig.result() == {"updates": 6, "exports": ["kohya"]}
    assert not rig.session.run_dir.before_after.exists()


def test_the_pictures_before_are_drawn_at_the_end_where_there_is_room_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path, monkeypatch, lambda in_tiles: len(rig.asked) <= 2)
    rig.run()
    assert rig.drawn() == [3, 6, 0] and rig.session.run_dir.before_after.exists()


def test_other_errors_of_a_preview_still_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path, monkeypatch, lambda in_tiles: False)

    def lost(in_tiles: bool) -> bool:
        raise RuntimeError("HIP error: unspecified launch failure")

    rig.is_full = lost
    with pytest.raises(RuntimeError, match="launch failure"):
        rig.run()


def test_a_run_goes_on_although_the_next_start_is_told_to_use_tiles(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures in tiles are the same pictures: a checkpoint made with them, or before them, is gone on from."""
    recipe = make_recipe(
        material, cache={"dir": str(tmp_path / "cache")}, lora={"targets": [FEW_TARGETS]}, train={"max_train_steps": 4}
    )
    load = VaeEncoder.load

    def full(self: VaeEncoder, device: torch.device) -> Any:
        encode = load(self, device)

        def encoded(pixels_CHW: Any) -> Any:
            if not self._small_tiles and pixels_CHW.shape[2] > 64:
                raise torch.OutOfMemoryError(FULL)
            return encode(pixels_CHW)

        return encoded

    monkeypatch.setattr(VaeEncoder, "load", full)
    assert not start(recipe, tmp_path / "run", stop_at=1)
    assert [event["id"] for event in told(tmp_path / "run", "change")] == ["vae-tiling"]
    made = sorted((tmp_path / "cache" / "image").rglob("*.safetensors"))
    original = run.Start

    def in_tiles(*arguments: Any) -> run.Start:
        return replace(original(*arguments), settings=Settings(vae_tiling=True))

    monkeypatch.setattr(run, "Start", in_tiles)
    assert start(recipe, tmp_path / "run")
    assert sorted((tmp_path / "cache" / "image").rglob("*.safetensors")) == made
    assert told(tmp_path / "run", "step")[-1]["updates"] == 4
