"""A score of whether the concept was learned: are previews made after training closer to the training samples?

Each image becomes a descriptor: its colours, and its edge orientations by place. An image's distance is the distance to
its nearest training image. The score is the probability that a preview made after training has a smaller distance than
one made before. This is the area under the ROC curve: 0.5 means no change, 1.0 means that every preview is closer. The
control is the same number for prompts without the concept. It should stay near 0.5; only a score above its control is
evidence.

The score is rough: it ignores the content of an image. With n previews it has at most n * n + 1 values, so a few
previews prove little (``report.concept_text``). Texts have no score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE_PX = 64
COLOUR_LEVELS = 4
CELLS = 4
ORIENTATIONS = 8

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class ConceptScore:
    """The score of a run.

    score: probability from 0 to 1, see the module. control: the same for control prompts, or None without any.
    distances: mean distance of each group of previews. num_previews: number of previews made after training, without
    control prompts.
    """

    score: float
    control: float | None
    distances: dict[str, float]
    num_previews: int


def descriptor(image: Image.Image) -> Vector:
    """Describe an image by a colour histogram and a grid of edge orientations, weighted equally."""
    pixels_HWC = (
        np.asarray(image.convert("RGB").resize((SIDE_PX, SIDE_PX), Image.Resampling.BOX), dtype=np.float64) / 255
    )
    levels_HWC = np.minimum((pixels_HWC * COLOUR_LEVELS).astype(int), COLOUR_LEVELS - 1)
    codes = levels_HWC @ np.array([COLOUR_LEVELS**2, COLOUR_LEVELS, 1])
    colours = np.sqrt(np.bincount(codes.ravel(), minlength=COLOUR_LEVELS**3))
    dy_HW, dx_HW = np.gradient(pixels_HWC.mean(axis=2))
    strength_HW = np.hypot(dx_HW, dy_HW)
    orientation_HW = ((np.arctan2(dy_HW, dx_HW) % np.pi) / np.pi * ORIENTATIONS).astype(int) % ORIENTATIONS
    cell = SIDE_PX // CELLS
    cells_HW = (np.arange(SIDE_PX)[:, None] // cell) * CELLS + np.arange(SIDE_PX)[None, :] // cell
    bins = np.bincount(
        (cells_HW * ORIENTATIONS + orientation_HW).ravel(),
        weights=strength_HW.ravel(),
        minlength=CELLS**2 * ORIENTATIONS,
    )
    described: Vector = np.concatenate([_unit(colours), _unit(np.sqrt(bins))]) / np.sqrt(2)
    return described


def _unit(vector: Vector) -> Vector:
    norm = float(np.linalg.norm(vector))
    return vector / norm if norm else vector


def nearest_distance(images: Sequence[Image.Image], references: Sequence[Image.Image]) -> Vector:
    """The distance of each image to its nearest reference."""
    found = np.stack([descriptor(image) for image in images])
    known = np.stack([descriptor(image) for image in references])
    return np.asarray(np.linalg.norm(found[:, None] - known[None], axis=2).min(axis=1))


def nearer(after: Vector, before: Vector) -> float:
    """Probability that a random ``after`` distance is smaller than a random ``before`` one; ties count half."""
    pairs = before[:, None] - after[None]
    return float(((pairs > 0) + 0.5 * (pairs == 0)).mean())


def score(
    before: Sequence[Image.Image], after: Sequence[Image.Image], training: Sequence[Image.Image], num_control: int
) -> ConceptScore:
    """The score of a run. The last ``num_control`` images of ``before`` and of ``after`` are of control prompts."""
    split = len(before) - num_control
    distance_before, distance_after = nearest_distance(before, training), nearest_distance(after, training)
    distances = {"before": float(distance_before[:split].mean()), "after": float(distance_after[:split].mean())}
    control = None
    if num_control:
        control = nearer(distance_after[split:], distance_before[split:])
        distances["control before"] = float(distance_before[split:].mean())
        distances["control after"] = float(distance_after[split:].mean())
    return ConceptScore(nearer(distance_after[:split], distance_before[:split]), control, distances, split)
