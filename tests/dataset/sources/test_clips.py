"""Clips: a sub-folder of numbered images is one sample; its frames are in the order of their numbers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_rocm.dataset.sources.clips import LENGTH_BYTES, frames_in, frames_of, video_bytes
from lora_rocm.dataset.sources.sample_image import image_bytes
from lora_rocm.dataset.sources.scan import Scan, scan
from lora_rocm.recipe.schema import DataSection
from tests.wording import says


@pytest.fixture
def data(tmp_path: Path, make: SimpleNamespace) -> Path:
    """A still, a clip of ten frames with a caption next to it, and a folder in which not all images are numbered."""
    make.image(tmp_path / "data" / "still.png", caption="a still")
    for number in range(10):
        make.image(tmp_path / "data" / "sub" / "walk.v2" / f"frame {number + 1}.png", 64, 48, seed=number)
    (tmp_path / "data" / "sub" / "walk.v2.txt").write_text("a walk", encoding="utf-8")
    for number, name in enumerate(("1", "cover")):
        make.image(tmp_path / "data" / "mixed" / f"{name}.png", seed=50 + number, caption=name)
    return tmp_path / "data"


def scanned(make: SimpleNamespace, data: Path, **keys: Any) -> Scan:
    return scan(make.data(path=str(data), **keys))


def test_a_folder_of_numbered_images_is_a_sample(data: Path, make: SimpleNamespace) -> None:
    found = scanned(make, data, frames=9)
    said = {sample.key: (sample.frames, sample.caption, sample.width, sample.height) for sample in found.samples}
    assert said == {
        "mixed/1.png": (0, "1", 96, 64),
        "mixed/cover.png": (0, "cover", 96, 64),
        "still.png": (0, "a still", 96, 64),
        "sub/walk.v2": (9, "a walk", 64, 48),
    }
    assert not found.set_aside and len(found.notices) == 1, "the tenth frame is said"
    assert len(scanned(make, data).samples) == 13, "the control: without data.frames each image is for itself"


def test_frames_are_in_the_order_of_their_numbers(data: Path) -> None:
    clip = data / "sub" / "walk.v2"
    options = DataSection(path=str(data)).resolved_sources()[0]
    frames = frames_of(clip, data, options)
    assert [path.name for path in frames] == [f"frame {number + 1}.png" for number in range(10)]
    contents = [path.read_bytes() for path in frames[:3]]
    assert list(frames_in(video_bytes(clip, data, options, 3))) == contents


@pytest.mark.parametrize(
    ("keys", "left"),
    [
        ({"exclude": ["frame 1.png"]}, {1}),
        ({"exclude": ["sub/walk.v2/FRAME [12].png", "nothing"]}, {1, 2}),
        ({"include": ["frame 1*.png", "frame 5.png", "still.png"]}, {2, 3, 4, 6, 7, 8, 9}),
        ({"include": ["sub/*"], "exclude": ["*10.png"]}, {10}),
        ({}, set()),
    ],
)
def test_excluded_frames_are_not_read(data: Path, make: SimpleNamespace, keys: dict[str, Any], left: set[int]) -> None:
    """Neither their headers nor their bytes: the frames of a clip are the images that the walk finds without clips."""
    names = [f"frame {number}.png" for number in range(1, 11) if number not in left]
    alone = [sample.key for sample in scanned(make, data, **keys).samples if "walk" in sample.key]
    assert sorted(alone) == sorted(f"sub/walk.v2/{name}" for name in names)
    for number in left:
        (data / "sub" / "walk.v2" / f"frame {number}.png").write_bytes(b"no image")
    found = scanned(make, data, frames=[2, len(names)], **keys)
    (clip,) = (sample for sample in found.samples if sample.frames)
    assert clip.frames == len(names) and not found.set_aside
    contents = [(data / "sub" / "walk.v2" / name).read_bytes() for name in names]
    assert list(frames_in(image_bytes(clip))) == contents


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_frames_are_taken_apart_again(contents: list[bytes]) -> None:
    joined = b"".join(len(content).to_bytes(LENGTH_BYTES, "little") + content for content in contents)
    assert list(frames_in(joined)) == contents


@pytest.mark.parametrize(("frames", "used"), [([5, 9], 9), ([5, 13], 5), (10, 10), ([3], 3)])
def test_a_clip_has_the_most_frames_that_it_can(data: Path, make: SimpleNamespace, frames: Any, used: int) -> None:
    assert [sample.frames for sample in scanned(make, data, frames=frames).samples if sample.frames] == [used]


def test_a_clip_that_cannot_be_used_is_set_aside(data: Path, make: SimpleNamespace) -> None:
    (problem,) = scanned(make, data, frames=13).set_aside
    assert (
        problem.where.endswith("walk.v2") and "10 frames" in problem.what and says(problem.what, "dataset/at-least-13")
    )
    make.image(data / "sub" / "walk.v2" / "frame 5.png", 48, 48)
    (problem,) = scanned(make, data, frames=9).set_aside
    assert "64x48 and 48x48, from frame 5.png on" in problem.what
    assert not scanned(make, data, frames=4).set_aside, "what is not used is not looked at"
    make.image(data / "sub" / "walk.v2" / "frame 5.png", 64, 48)
    (data / "sub" / "walk.v2" / "frame 5.png").write_bytes(b"x")
    assert len(scanned(make, data, frames=9).set_aside) == 1


@pytest.mark.parametrize(("frames", "said"), [(9, True), (10, False)])
def test_frames_that_are_not_used_are_said(data: Path, make: SimpleNamespace, frames: int, said: bool) -> None:
    notices = [notice for notice in scanned(make, data, frames=frames).notices if "data.frames" in notice]
    assert ["walk.v2 (1)" in notice for notice in notices] == [True] * said
