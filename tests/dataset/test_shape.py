"""A shape is named as users know it, ordered by its cost, and found again in the written result."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_rocm.dataset.images.buckets import image_shape, largest_shape
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.recipe.schema import DataSection

axes = st.dictionaries(st.sampled_from(["h", "w", "frames", "tokens", "seconds_of_sound"]), st.integers(1, 10**6))


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (SampleShape.of(h=768, w=1024), "1024x768"),
        (image_shape((768, 1024)), "1024x768"),
        (SampleShape.of(frames=17, h=480, w=832), "832x480, 17 frames"),
        (SampleShape.of(tokens=512), "512 tokens"),
        (SampleShape.of(h=64, w=96, control_2_h=32, control_2_w=128, frames=5), "96x64, 5 frames, control_2 128x32"),
    ],
)
def test_a_shape_in_words(shape: SampleShape, text: str) -> None:
    assert str(shape) == text and SampleShape.parse(text) == shape


@given(axes.filter(lambda drawn: bool(drawn) and ("h" in drawn) == ("w" in drawn)))
def test_words_are_read_back(drawn: dict[str, int]) -> None:
    shape = SampleShape.of(**drawn)
    assert SampleShape.parse(str(shape)) == shape
    assert {name: shape[name] for name in drawn} == drawn


@given(axes, st.integers(0, 2**60))
def test_json_is_read_back(drawn: dict[str, int], cost: int) -> None:
    shape = SampleShape.of(cost, **drawn)
    assert SampleShape.from_json(json.loads(json.dumps(shape.to_json()))) == shape


@pytest.mark.parametrize("text", ["", "1024", "x768", "1024x768x3", "1024 x 768", "17 Frames"])
def test_other_words_are_no_shape(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"shape: {text!r}")):
        SampleShape.parse(text)


@pytest.mark.parametrize("value", [{}, {"axes": {"h": "8"}, "cost": 1}, {"axes": {"H W": 8}, "cost": 1}, {"axes": 3}])
def test_other_json_is_no_shape(value: dict[str, object]) -> None:
    with pytest.raises((ValueError, LookupError, TypeError, AttributeError)):
        SampleShape.from_json(value)


def test_the_cost_decides_and_then_the_axes() -> None:
    square, wide, clip = SampleShape.of(h=64, w=64), SampleShape.of(h=32, w=128), SampleShape.of(frames=2, h=32, w=64)
    dear = SampleShape.of(10**6, tokens=1)
    assert (
        SampleShape.of(h=64, w=64, control_h=32, control_w=8, control_2_h=2, control_2_w=2).cost
        == 64 * 64 + 32 * 8 + 2 * 2
    )
    assert square.cost == wide.cost == clip.cost and clip != square
    assert sorted([dear, square, wide, clip], key=lambda shape: shape.order) == [clip, wide, square, dear]


def test_an_axis_that_is_not_there_is_an_error() -> None:
    with pytest.raises(KeyError):
        SampleShape.of(h=1, w=1)["frames"]


def test_the_largest_bucket_of_a_recipe() -> None:
    sources = ({"path": "a", "resolution": 512}, {"path": "b", "resolution": 700})
    data = DataSection.model_validate({"sources": sources, "enable_bucket": False})
    assert largest_shape(data) == SampleShape.of(h=640, w=640)
    bucketed = DataSection(path="a", resolution=96, bucket_step=32)
    assert largest_shape(bucketed) == SampleShape.of(h=96, w=96)
