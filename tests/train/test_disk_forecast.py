"""Room on the disk: reported before a run and before each checkpoint, with figures that are near the truth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_rocm.encoded_cache.cache import LatentCache
from lora_rocm.errors import StorageError
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.rundir.event_types import CacheEvent, Event
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.run_context import RunContext
from lora_rocm.train.disk_forecast import CacheRoom, DiskForecast, Sizes
from tests.supervisor.fake_run import listening
from tests.wording import says

MIB = 1 << 20
SIZES = Sizes(checkpoint_bytes=12_000_000, lora_bytes=2_000_000, exports_bytes=2_500_000)


def room(folder: Path, free: int | None, **sections: dict[str, Any]) -> tuple[DiskForecast, list[str]]:
    """A run of 10 updates with a checkpoint (11.4 MiB) after every second, and its messages."""
    recipe = recipe_from(
        {
            "model": {"name_or_path": "m"},
            "optim": sections.get("optim", {}),
            "data": {"path": "d", "resolution": 64},
            "train": {"max_train_steps": 10, **sections.get("train", {})},
            "output": {"save_every_n_steps": 2, **sections.get("output", {})},
            "sample": sections.get("sample", {}),
        }
    )
    said: list[str] = []
    return DiskForecast(RunDir(folder), recipe, 10, listening(said), 4, lambda path: free), said


def test_what_is_to_come_is_counted(tmp_path: Path) -> None:
    """Five LoRA files, and keep_last checkpoints with the next one before an old one goes; then there is no result."""
    needed = 3 * SIZES.checkpoint_bytes + 5 * SIZES.lora_bytes
    for free, told in ((needed + MIB, False), (needed + MIB - 1, True)):
        there, said = room(tmp_path, free)
        there.forecast(0, SIZES)
        assert bool(said) is told
    assert says(said[0], "train/5-lora-files-of-1-9-mib")
    assert str(tmp_path) in said[0]
    there.forecast(2, SIZES)
    assert len(said) == 1


def test_a_large_result_is_counted_with_the_checkpoints_that_are_kept(tmp_path: Path) -> None:
    large = replace(SIZES, exports_bytes=20 * SIZES.lora_bytes)
    needed = 2 * large.checkpoint_bytes + 3 * large.lora_bytes + large.exports_bytes
    for free, told in ((needed + MIB, False), (needed + MIB - 1, True)):
        there, said = room(tmp_path, free, output={"keep_last_loras": 3})
        there.forecast(0, large)
        assert bool(said) is told
    assert says(said[0], "train/3-lora-files-of-1-9-mib")


def test_what_is_there_already_counts_for_less(tmp_path: Path) -> None:
    """Late in a run with its checkpoints on the disk, little is still to come; without them more."""
    free = 40 * MIB
    fresh, said_fresh = room(tmp_path / "fresh", free)
    for updates in (6, 8):
        RunDir(tmp_path / "late").checkpoint(updates).mkdir(parents=True)
    late, said_late = room(tmp_path / "late", free)
    fresh.forecast(0, SIZES)
    late.forecast(8, SIZES)
    assert said_fresh and not said_late


@pytest.mark.parametrize(
    "more",
    [
        {"output": {"keep_last": 5}},
        {"sample": {"prompts": ["a"], "every_n_steps": 1, "width": 512, "height": 512}},
    ],
    ids=str,
)
def test_what_takes_more_is_told_sooner(tmp_path: Path, more: dict[str, Any]) -> None:
    plain, said = room(tmp_path, 48 * MIB)
    plain.forecast(0, SIZES)
    asking, said_more = room(tmp_path, 48 * MIB, **more)
    asking.forecast(0, SIZES)
    assert not said and said_more


def test_a_checkpoint_that_cannot_fit_is_not_begun(tmp_path: Path) -> None:
    for free in (None, 16 * MIB):
        room(tmp_path, free)[0].require_checkpoint(4, SIZES)
    with pytest.raises(StorageError, match=r"13.4 MiB needed, 12.0 MiB free") as caught:
        room(tmp_path, 12 * MIB)[0].require_checkpoint(4, SIZES)
    assert caught.value.code == "disk-low" and "step-00000004" in caught.value.where


def test_a_cache_that_will_not_fit_is_told_at_its_first_entries(tmp_path: Path) -> None:
    cache, said, progress = LatentCache(tmp_path / "cache"), list[str](), list[int]()
    frees = iter([MIB + 900_000, MIB + 600_000, 0])

    def note(event: Event) -> None:
        if isinstance(event, CacheEvent):
            progress.append(event.done)
        else:
            said.append(event.to_json()["text"])

    report = CacheRoom(cache, RunContext(note), lambda path: next(frees))
    report("images", 1, 9, 1.0)  # reading them writes nothing
    cache.writing = "image"
    report("images", 0, 9, 1.0)
    for number in range(2):
        cache.write_tensors("image", f"{number:040x}", {"latents": torch.zeros(25_000)}, "an image")
        report("images", number + 1, 9, 1.0)
    assert len(said) == 1 and says(said[0], "train/7-images-that-are-still-to-be")
    assert str(cache.root) in said[0] and progress == [1, 0, 1, 2]
    cache.write_tensors("image", f"{0:040x}", {"latents": torch.zeros(25_000)}, "an image")
    assert cache.written["image"][0] == 2  # it was there
