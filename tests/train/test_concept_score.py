"""The concept score rises when the concept appears, and only then."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from lora_rocm.train.concept_score import descriptor, nearer, score

BACKGROUNDS = ("white", "blue", "yellow", "black", "gray")


@pytest.fixture(scope="module")
def zibus() -> list[Image.Image]:
    folder = Path(str(resources.files("lora_rocm.builtin") / "demo_images"))
    return [Image.open(path).convert("RGB") for path in sorted(folder.glob("zibu_*.png"))]


def plain(colour: str) -> Image.Image:
    return Image.new("RGB", (128, 128), colour)


def with_square(colour: str) -> Image.Image:
    image = plain(colour)
    ImageDraw.Draw(image).rectangle((40, 40, 90, 90), fill="green")
    return image


def test_images_with_the_concept_score_high_and_the_control_stays(zibus: list[Image.Image]) -> None:
    before = [plain(colour) for colour in BACKGROUNDS]
    controls = [with_square(colour) for colour in BACKGROUNDS]
    found = score([*before, *controls], [*zibus[:5], *controls], zibus[5:], num_control=5)
    assert found.score >= 0.8 and found.control == 0.5 and found.num_previews == 5
    assert found.distances["after"] < 0.8 * found.distances["before"]


def test_nothing_learned_scores_one_half(zibus: list[Image.Image]) -> None:
    """Negative control: the same images before and after."""
    before = [plain(colour) for colour in BACKGROUNDS]
    assert score(before, before, zibus, num_control=0).score == 0.5


def test_another_concept_does_not_score(zibus: list[Image.Image]) -> None:
    """Negative control: something new appears, and it is not the taught concept."""
    before = [plain(colour) for colour in BACKGROUNDS]
    wrong = score(before, [with_square(colour) for colour in BACKGROUNDS], zibus, num_control=0)
    right = score(before, zibus[:5], zibus[5:], num_control=0)
    assert wrong.score < right.score and wrong.distances["after"] > 1.2 * right.distances["after"]


def test_descriptor_is_a_unit_vector_whatever_the_size(zibus: list[Image.Image]) -> None:
    for image in (zibus[0], zibus[0].resize((512, 384)), plain("black").convert("L"), plain("white").resize((1, 1))):
        assert np.isfinite(descriptor(image)).all()
        assert 0.5 < np.linalg.norm(descriptor(image)) <= 1.0 + 1e-9
    assert np.linalg.norm(descriptor(zibus[0]) - descriptor(zibus[0].resize((256, 256)))) < 0.2


def test_ties_count_half() -> None:
    assert nearer(np.array([1.0, 2.0]), np.array([1.0, 3.0])) == 0.625
