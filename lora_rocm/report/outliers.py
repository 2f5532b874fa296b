"""Finds steps with an unusually high loss or gradient norm in ``step`` events, and shows them in a table.

The loss of a diffusion model depends mostly on the timestep drawn. Even in a healthy run with small batches, one step
in a hundred has five times the usual loss. So the threshold is the higher of a fixed factor and the run's own noise.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from lora_rocm.foundation.units import number_text
from lora_rocm.page_parts.texts import t
from lora_rocm.report.html import Paragraph, ReportBox, section, table
from lora_rocm.rundir.event_types import StepEvent

WINDOW_STEPS, LEAST_STEPS = 50, 20
"""The usual value is the median of the last WINDOW_STEPS steps, computed once there are LEAST_STEPS steps."""
LOSS_TIMES, NORM_TIMES = 5.0, 10.0
NOISE_TIMES = 6.0
"""Threshold for the logarithm, in standard deviations estimated from the window's median deviation."""
SIGMA_OF_MAD = 1.4826
"""Standard deviation of a normal distribution, divided by its median absolute deviation."""


@dataclass(frozen=True)
class Spike:
    """One outlier step. The usual values are the ones before this step, or None if there were too few steps."""

    updates: int
    iteration: int
    loss: float | None
    grad_norm: float | None
    usual_loss: float | None
    usual_norm: float | None


class Usual:
    """The last values of a series, as logarithms. Values that are not finite or not positive are skipped."""

    def __init__(self, times: float) -> None:
        self._least, self._logs = math.log(times), deque[float](maxlen=WINDOW_STEPS)

    @property
    def value(self) -> float | None:
        return math.exp(median(self._logs)) if len(self._logs) >= LEAST_STEPS else None

    def is_outlier(self, value: float | None) -> bool:
        """Return whether a value is far above the usual value, and add it to the window."""
        if value is None or not math.isfinite(value) or value <= 0:
            return False
        found, log = False, math.log(value)
        if len(self._logs) >= LEAST_STEPS:
            middle = median(self._logs)
            sigma = SIGMA_OF_MAD * median(abs(one - middle) for one in self._logs)
            found = log - middle > max(self._least, NOISE_TIMES * sigma)
        self._logs.append(log)
        return found


def spikes(steps: Iterable[StepEvent]) -> list[Spike]:
    """The outlier steps in order. ``steps``: the current steps, without steps that were repeated later."""
    losses, norms, found = Usual(LOSS_TIMES), Usual(NORM_TIMES), []
    for step in steps:
        usual_loss, usual_norm = losses.value, norms.value
        high = [losses.is_outlier(step.loss), norms.is_outlier(step.grad_norm)]
        if any(high):
            row = Spike(
                step.updates, step.iteration, step.loss, step.grad_norm, usual_loss, usual_norm
            )  # fmt: skip
            found.append(row)
    return found


def spikes_section(steps: Sequence[StepEvent]) -> ReportBox | None:
    """The section of the report about outlier steps; None if there are too few steps."""
    if len(steps) <= LEAST_STEPS:
        return None
    title, found = t("report.outlier_steps"), spikes(steps)
    if not found:
        return section(title, Paragraph("None: no step's loss or gradient is far above those before it.", "good"))
    note = (
        f"Usual: the median of the last {WINDOW_STEPS} steps. A few such steps do no harm; many point to "
        "bad images or captions, or a learning rate that is too high."
    )
    rows = [
        (
            spike.updates,
            *map(number_text, (spike.loss, spike.usual_loss, spike.grad_norm, spike.usual_norm)),
            spike.iteration,
        )
        for spike in found
    ]
    head = ("step", "loss", "usual", "gradient norm", "usual", "iteration")
    return section(title, Paragraph(note, "soft"), table(head, rows))
