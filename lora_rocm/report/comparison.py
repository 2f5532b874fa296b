"""``compare.html``: compares the LoRA files of a run by their images and held-out losses, and names the best step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.foundation.units import count_text, number_text
from lora_rocm.page_parts.charts import Series
from lora_rocm.page_parts.texts import t
from lora_rocm.report.html import Paragraph, PictureTable, ReportBox, page, plot, preview, section, table

PREVIEW_SIDE_PX = 256
CLEAR_ERRORS = 2.0  # standard errors beyond which a difference counts
NO_LOSSES = (
    "There is no held-out loss. Train with data.validation_split: 0.1 (a tenth of the samples is held out); then this "
    "page names the best step and whether later ones overfit."
)
UNKNOWN_LOSSES = "There is no held-out loss: the held-out samples are no longer usable, or no loss is finite."


@dataclass(frozen=True)
class Compared:
    """Results of one LoRA file; with ``updates`` 0, results of the base without a LoRA.

    losses: mean loss of each held-out sample, by its key; NaN if not finite. images: starting with the images of the
    first strength.
    """

    updates: int
    losses: Mapping[str, float]
    images: Sequence[Path]

    @property
    def loss(self) -> float:
        """Mean loss over the samples; NaN if there are no samples."""
        return statistics.fmean(self.losses.values()) if self.losses else math.nan

    @property
    def label(self) -> str:
        return f"step {self.updates}" if self.updates else "without LoRA"


def comparison_page(
    title: str,
    compared: Sequence[Compared],
    prompts: Sequence[str],
    strengths: Sequence[float],
    remarks: Sequence[str] = (),
    holds_out: bool = False,
) -> str:
    """Return the page's HTML.

    Args:
        title: the name of the run.
        compared: the results to compare.
        prompts: the prompt of each image of one strength.
        strengths: the strengths of the LoRA at which images were drawn.
        remarks: notices, such as missing parts of the comparison.
        holds_out: whether the run has held-out samples.
    """
    rows = [(one.label, f"{one.loss:.4g}", number_text(_error([*one.losses.values()]))) for one in compared]
    points = [(one.updates, one.loss) for one in compared]
    samples = count_text(max((len(one.losses) for one in compared), default=0), "sample")
    head = ("", "held-out loss", f"standard error over {samples}")
    losses = [
        table(head, rows),
        plot(t("report.held_out_loss"), [Series(t("run.loss"), points, "dots")], t("report.step")),
    ]
    said, none = verdict(compared), UNKNOWN_LOSSES if holds_out else NO_LOSSES
    files = count_text(len(compared) - 1, "LoRA file")
    return page(
        f"{title}: lora-rocm compare",
        title,
        [Paragraph(f"{files} of one run, from the same seeds", "soft"), *map(Paragraph, remarks)],
        [
            section(t("report.held_out_loss"), Paragraph(said or none), *(losses if said else ())),
            *(_images(compared, prompts, number, strength) for number, strength in enumerate(strengths)),
        ],
    )


def _images(compared: Sequence[Compared], prompts: Sequence[str], number: int, strength: float) -> ReportBox | None:
    if not prompts:
        return None
    rows = []
    for one in compared:
        first = number * len(prompts) if one.updates else 0
        drawn = zip(one.images[first : first + len(prompts)], prompts, strict=True)
        cells = [preview(path, PREVIEW_SIDE_PX, f"{one.label}: {prompt}") for path, prompt in drawn]
        rows.append((one.label, cells))
    return section(t("report.strength", strength=f"{strength:g}"), PictureTable(prompts, rows))


def verdict(compared: Sequence[Compared]) -> str:
    """Sentences about the step with the lowest held-out loss and later overfitting; empty without held-out losses."""
    trained = [one for one in compared if one.updates and math.isfinite(one.loss)]
    if not trained:
        return ""
    best, last = min(trained, key=lambda one: one.loss), trained[-1]
    said = f"The held-out loss is lowest after step {best.updates}: {number_text(best.loss)}."
    base = next((one.loss for one in compared if not one.updates), math.nan)
    if base < best.loss:
        said += f" Without the LoRA it is even lower, {number_text(base)}: no step is better than the base."
    if best is last:
        return f"{said} No later step is compared, so overfitting is not visible."
    higher = [last.losses[key] - loss for key, loss in best.losses.items()]
    mean, error = statistics.fmean(higher), _error(higher)
    said += f" After step {last.updates} it is higher by {number_text(mean)}"
    if error is None:
        return f"{said}; with one held-out sample this may be chance."
    said += f", with a standard error of {number_text(error)} over the same {len(higher)} samples: "
    clear = "later steps overfit." if mean > CLEAR_ERRORS * error else "this may be chance, no clear overfitting."
    return said + clear


def _error(values: Sequence[float]) -> float | None:
    """The standard error of the mean; None if there are fewer than two values, or if one is not finite."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    return statistics.stdev(values) / math.sqrt(len(values))
