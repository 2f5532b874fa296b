"""Versions of an image: crops inside what is given, mirrored with it, colours that change a little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lora_rocm.dataset.images.buckets import Geometry
from lora_rocm.dataset.images.image_io import resized_crop
from lora_rocm.dataset.images.views import (
    MOST_GAMMA,
    MOST_HUE_STEPS,
    PLAIN,
    ImageView,
    colour_change,
    recoloured,
    view_count,
    view_geometry,
    views_of,
    window,
)
from lora_rocm.dataset.sample_table import Sample
from lora_rocm.dataset.sources.given import Given, UnusableValue, loss_weight, rectangle
from lora_rocm.dataset.sources.scan import geometry_of
from lora_rocm.recipe.schema import DataSection
from tests.wording import saying, says

NOTHING = Given()


def sample_of(width: int, height: int, given: Given = NOTHING, key: str = "a.png", **keys: Any) -> tuple[Sample, Any]:
    data = DataSection(path="a", resolution=64, bucket_step=16, **keys)
    (options,) = data.resolved_sources()
    return Sample(key, 0, "", Path("a.png"), "", width, height, 1, options, given), data


def geometry(width: int, height: int, given: Given = NOTHING, **keys: Any) -> tuple[Sample, Geometry]:
    sample, data = sample_of(width, height, given, **keys)
    found = geometry_of(sample, data)
    assert isinstance(found, Geometry)
    return sample, found


def test_the_views_of_a_source() -> None:
    (plain,) = DataSection(path="a").resolved_sources()
    assert views_of(plain) == (PLAIN,) and not view_count(plain)
    (flipped,) = DataSection(path="a", flip_aug=True, random_crop=True).resolved_sources()
    assert views_of(flipped) == (PLAIN, ImageView(flip=True))
    assert says(view_count(flipped), "dataset/2-versions-of-each-image") and view_count(flipped).endswith(
        ": 2 (flip_aug)"
    )
    (many,) = DataSection(path="a", flip_aug=True, random_crop=4, color_aug=2).resolved_sources()
    assert len(set(views_of(many))) == 24 and views_of(many)[0] == PLAIN
    assert [view.flip for view in views_of(many)] == [False] * 12 + [True] * 12
    assert says(view_count(many), "dataset/24-versions-of-each-image-are-encoded")
    assert "4 (random_crop) x 3 (color_aug) x 2 (flip_aug)" in view_count(many)


def test_the_first_of_several_random_crops_is_the_only_one_of_one() -> None:
    """So entries of the cache are found again."""
    sample, first = geometry(300, 64, random_crop=True)
    _, of_many = geometry(300, 64, random_crop=9)
    assert first == of_many
    lefts = {view_geometry(first, sample, ImageView(crop=number)).crop_top_left[1] for number in range(9)}
    spare = first.resized_hw[1] - first.target_hw[1]
    assert len(lefts) > 5 and all(0 <= left <= spare for left in lefts) and max(lefts) - min(lefts) > spare / 3


@pytest.mark.parametrize("random_crop", [False, 5])
@pytest.mark.parametrize(("x", "y", "width", "height"), [(100, 10, 90, 80), (0, 0, 70, 200), (230, 130, 70, 70)])
def test_what_is_used_lies_in_the_given_crop(x: int, y: int, width: int, height: int, random_crop: Any) -> None:
    picture = np.zeros((200, 300, 3), np.uint8)
    picture[y : y + height, x : x + width] = 255
    image = Image.fromarray(picture)
    sample, found = geometry(300, 200, Given(crop=(x, y, width, height)), random_crop=random_crop, flip_aug=True)
    assert found.original_hw == (200, 300) and max(found.target_hw) <= 128
    for view in views_of(sample.options):
        seen = np.asarray(resized_crop(image, view_geometry(found, sample, view), view.flip))
        assert seen[2:-2, 2:-2].min() > 200, "within a pixel or two, all of it is white"
    _, whole = geometry(300, 200)
    assert np.asarray(resized_crop(image, whole, False)).min() == 0, "the control: without the crop black is seen"
    (top, left), size = window(found, sample.given.crop)
    assert top + size[0] <= found.resized_hw[0] and left + size[1] <= found.resized_hw[1]


def test_a_given_crop_has_the_size_of_its_part() -> None:
    """The scale is derived from the part, so a small part of a large image keeps its pixels."""
    _, found = geometry(1000, 800, Given(crop=(400, 300, 64, 64)))
    assert found.resized_hw == (800, 1000) and found.target_hw == (64, 64) and found.crop_top_left == (300, 400)
    sample, data = sample_of(1000, 800, Given(crop=(400, 300, 8, 8)))
    problem = geometry_of(sample, data)
    assert not isinstance(problem, Geometry) and "8x8" in problem.what


def test_colours_change_a_little() -> None:
    grid = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    image = Image.fromarray(grid)
    sample, _ = geometry(64, 64, color_aug=8)
    changes = [colour_change(sample, view) for view in views_of(sample.options)]
    assert changes[0] is None and np.array_equal(np.asarray(recoloured(image, None)), grid)
    assert len(set(changes)) == 9 and {change[0] for change in changes if change} == {"hue", "gamma"}
    for change in changes[1:]:
        assert change is not None
        kind, amount = change
        seen = np.asarray(recoloured(image, change)).astype(int)
        assert (seen != grid).any()
        if kind == "gamma":
            assert abs(amount - 1) <= MOST_GAMMA
            assert np.abs(seen - 255 * (grid / 255) ** amount).max() < 0.501
        else:
            assert 0 < abs(amount) <= MOST_HUE_STEPS
            assert np.abs(seen.max(axis=2) - grid.max(axis=2)).max() <= 1, "a turned hue keeps the brightness"
    red = Image.new("RGB", (1, 1), (255, 0, 0))
    assert recoloured(red, ("hue", 10.0)).getpixel((0, 0))[1] > 40 > recoloured(red, ("hue", -10.0)).getpixel((0, 0))[1]
    assert colour_change(sample_of(64, 64, key="b.png")[0], ImageView(colour=1)) != changes[1] or (
        colour_change(sample_of(64, 64, key="b.png")[0], ImageView(colour=2)) != changes[2]
    )


@pytest.mark.parametrize("value", [[1, 2, 3, 4], "1,2,3,4", "[1, 2, 3, 4]", (1, 2, 3, 4)])
def test_a_crop_is_a_list_or_its_text(value: object) -> None:
    assert rectangle(value) == (1, 2, 3, 4)


@pytest.mark.parametrize("value", [[1, 2, 3], [0, 0, 0, 4], [-1, 0, 2, 2], "a", [1.5, 2, 3, 4], [True, 1, 1, 1], None])
def test_another_value_is_no_crop(value: object) -> None:
    with pytest.raises(UnusableValue, check=saying("dataset/its-crop-is-no")):
        rectangle(value)


def test_weights_are_numbers_in_a_range() -> None:
    assert [loss_weight(value) for value in (2, "0.5", 1000.0)] == [2.0, 0.5, 1000.0]
    for value in (0, -1, "x", True, float("nan"), 1001, [1], "9" * 400, 10**400):
        with pytest.raises(UnusableValue, check=saying("dataset/its-weight-is-no-number")):
            loss_weight(value)


def test_what_is_given_is_kept_as_text() -> None:
    for given in (Given(), Given(2.5), Given(crop=(1, 2, 3, 4)), Given(0.1, (1, 2, 3, 4), ("a \x1e b", "c"))):
        assert Given.of_text(given.text) == given
    assert Given().text == ""
