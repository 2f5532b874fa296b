"""Finds images that are never learned, from the recorded loss of each sample (``rundir.sample_losses``).

The loss of a diffusion model depends mostly on the noise level drawn. So a loss is compared with the mean of all losses
at similar noise levels, as a ratio. An image is an outlier if its ratio is far above the other images', also in the
newer half of its visits. No image is judged by few visits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lora_rocm.page_parts.charts import Point
from lora_rocm.page_parts.texts import t
from lora_rocm.report.html import Paragraph, ReportBox, section, table
from lora_rocm.rundir.sample_losses import SampleLosses

LEAST_VISITS = 20
LEAST_IMAGES = 8
"""Images with enough visits that are needed to judge one of them."""
LEVELS = 20
"""Number of groups of noise levels, with equally many losses each."""
OUTLIER_Z = 3.5
SIGMA_OF_MAD = 1.4826
"""Standard deviation of a normal distribution, divided by its median absolute deviation."""
LEAST_SPREAD = 0.01
"""Smallest spread of the images' logarithms, so that almost equal images do not make one of them an outlier."""
PART_VISITS, MAX_PARTS = 5, 12
"""Least visits for a point of an image's curve, and most points."""
MAX_SHOWN = 20
"""Number of images that the report lists, the most unusual ones."""


@dataclass(frozen=True)
class ImageLoss:
    """The loss of one image.

    Attributes:
        name: the image, as its path in its folder.
        visits: number of updates in which it was trained.
        ratio: its loss relative to the mean at its noise levels: 1 is usual.
        late_ratio: the same for the newer half of its visits.
        z: distance of its ratio from the other images', in standard deviations of the logarithm.
        is_outlier: whether it is never learned: z is high, also in the newer half.
        hints: possible causes.
    """

    name: str
    visits: int
    ratio: float
    late_ratio: float
    z: float
    is_outlier: bool
    hints: tuple[str, ...] = ()


@dataclass(frozen=True)
class RelativeLosses:
    """Losses relative to the mean at their noise levels, in the order of training.

    above: logarithm of the loss, less the mean logarithm at its noise level.
    """

    names: tuple[str, ...]
    updates: NDArray[np.int64]
    sample: NDArray[np.int64]
    above: NDArray[np.float64]

    @classmethod
    def of(cls, losses: SampleLosses) -> RelativeLosses:
        known = losses.loss > 0  # a weight of 0 at some noise levels gives a loss of 0
        order = losses.updates[known].argsort(kind="stable")
        logs, position = np.log(losses.loss[known]), losses.position[known]
        above = _above_usual(logs, position) if len(logs) else logs
        return cls(losses.names, losses.updates[known][order], losses.sample[known][order], above[order])

    def curve(self, name: str) -> tuple[list[Point], list[Point]]:
        """Return the mean of an image over its visits, and the mean of all images in the same updates.

        Each point has ``PART_VISITS`` visits of the image or more. The means are ratios, as in ``ImageLoss``.
        """
        own = np.flatnonzero(self.sample == self.names.index(name))
        found, usual = list[Point](), list[Point]()
        for part in np.array_split(own, max(1, min(MAX_PARTS, len(own) // PART_VISITS))):
            between = slice(*np.searchsorted(self.updates, (self.updates[part[0]], self.updates[part[-1]] + 1)))
            updates = float(self.updates[part].mean().round())
            found.append((updates, math.exp(self.above[part].mean())))
            usual.append((updates, math.exp(self.above[between].mean())))
        return found, usual


def judged(losses: RelativeLosses) -> list[ImageLoss]:
    """Return the judged images, the one with the highest z first.

    Images with fewer than ``LEAST_VISITS`` visits are omitted. With fewer than ``LEAST_IMAGES`` others, all are.
    """
    sample, above = losses.sample, losses.above
    # The means of each image, over all of its visits and the newer half
    counts = np.bincount(sample, minlength=len(losses.names))
    enough = np.flatnonzero(counts >= LEAST_VISITS)
    if len(enough) < LEAST_IMAGES:
        return []
    grouped = np.split(above[sample.argsort(kind="stable")], counts.cumsum()[:-1])
    values = [grouped[index] for index in enough]
    late = [each[len(each) // 2 :] for each in values]
    z, late_z = _scores(values), _scores(late)
    found = [
        ImageLoss(
            losses.names[index],
            len(own),
            math.exp(own.mean()),
            math.exp(newer.mean()),
            float(score),
            bool(score >= OUTLIER_Z and late_score >= OUTLIER_Z),
        )
        for index, own, newer, score, late_score in zip(enough, values, late, z, late_z, strict=True)
    ]
    return sorted(found, key=lambda each: -each.z)


def _above_usual(logs: NDArray[np.float64], position: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return by how much each logarithm is above the mean of its group of noise levels."""
    edges = np.quantile(position, np.linspace(0, 1, LEVELS + 1)[1:-1])
    group = np.searchsorted(edges, position, side="right")
    sizes = np.bincount(group, minlength=LEVELS)
    means = np.bincount(group, logs, minlength=LEVELS) / np.maximum(sizes, 1)
    above: NDArray[np.float64] = logs - means[group]
    return above


def _scores(values: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return the robust z-score of each image's mean, which also counts the uncertainty of this mean."""
    means = np.array([each.mean() for each in values])
    errors = np.array([each.var(ddof=1) / len(each) if len(each) > 1 else math.inf for each in values])
    middle = np.median(means)
    spread = max(SIGMA_OF_MAD * float(np.median(np.abs(means - middle))), LEAST_SPREAD)
    scores: NDArray[np.float64] = (means - middle) / np.sqrt(spread**2 + errors)
    return scores


def images_section(images: Sequence[ImageLoss], lost: Sequence[str] = ()) -> ReportBox | None:
    """The section of the report about images that are never learned; None if there is too little to judge.

    ``lost``: sentences about damaged files of losses.
    """
    title, outliers = t("images_losses.title"), [each for each in images if each.is_outlier]
    remarks = [Paragraph(text, "bad") for text in lost]
    if not images:
        return section(title, *remarks)
    if not outliers:
        about = f"None of the {len(images)} images with at least {LEAST_VISITS} visits has a loss far above the others."
        return section(title, *remarks, Paragraph(about, "good"))
    note = (
        f"Each loss is compared with the mean at its noise level; 1.00 is usual. z is the distance from the other "
        f"images; an image is listed from {OUTLIER_Z:g} on. It may be blurred, a duplicate, or have a wrong caption."
    )
    rows = [
        (each.name, each.visits, f"{each.ratio:.2f}", f"{each.late_ratio:.2f}", f"{each.z:.1f}", "; ".join(each.hints))
        for each in outliers[:MAX_SHOWN]
    ]
    head = ("image", "visits", "relative loss", "in the newer half", "z", "")
    return section(title, *remarks, Paragraph(note, "soft"), table(head, rows))
