"""The page of ``lora-rocm compare``, and its sentences about the held-out losses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from PIL import Image

from lora_rocm.report.comparison import Compared, comparison_page, verdict
from tests.wording import Worded, says, worded


def compared(updates: int, *losses: float) -> Compared:
    return Compared(updates, {f"image {number}": loss for number, loss in enumerate(losses)}, [])


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ((0.5, 0.6, 0.7), worded("report/later-steps-overfit")),
        ((0.5, 0.1, 0.6), worded("report/that-may-be-chance")),
        ((0.1, 0.1, 0.1), worded("report/nothing-says-that-the-run-overfits")),
    ],
)
def test_later_steps_overfit_only_if_they_are_worse_by_more_than_chance(last: tuple[float, ...], words: Worded) -> None:
    """The differences are between equal samples: their losses differ far more than the steps do."""
    said = verdict([compared(0, 0.9, 0.9, 0.9), compared(10, 0.2, 0.3, 0.4), compared(20, *last)])
    assert says(said, words) and says(said, "report/lowest-after-step-value", value=10 if last[2] > 0.4 else 20)


def test_what_cannot_be_told_is_not_told() -> None:
    assert says(verdict([compared(10, 0.2), compared(20, 0.3)]), "report/does-not-tell")
    assert says(verdict([compared(0, 0.1), compared(10, 0.2)]), "report/no-step-is-better-than-none")
    assert verdict([compared(0), compared(10)]) == ""
    assert says(verdict([compared(10, math.nan, 0.1), compared(20, 0.3, 0.3)]), "report/after-step-20")


def test_losses_stand_there_with_their_standard_errors() -> None:
    """Of the means 0.3 and 0.2: the root of the sum of squared deviations over n (n - 1)."""
    html = comparison_page("zibu", [compared(0, 0.1, 0.2, 0.6), compared(10, 0.1, 0.2, 0.3)], [], [1.0])
    assert says(html, "report/standard-error-over-3-samples")
    assert "<td>0.3</td><td>0.1528</td>" in html and "<td>0.2</td><td>0.05774</td>" in html
    said = verdict([compared(10, 0.1, 0.2, 0.3), compared(20, 0.2, 0.4, 0.3)])
    assert says(said, "report/higher-by-0-1-with-a-standard")
    assert "<td>-</td>" in comparison_page("zibu", [compared(10, 0.5)], [], [1.0]), "one sample has none"


def test_the_page_has_an_image_of_each_step_prompt_and_strength(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.png" for number in range(4)]
    for path in paths:
        Image.new("RGB", (8, 8)).save(path)
    rows = [Compared(0, {}, paths[:2]), Compared(10, {}, paths)]
    html = comparison_page("zibu <x>", rows, ["a cat", "ein Hündchen <script>"], [0.5, 1.0], ["Step 3 <left> out"])
    assert "<script" not in html and "<p>Step 3 &lt;left&gt; out</p>" in html
    assert html.count('alt="step 10: ein Hündchen &lt;script&gt;"') == 2 == html.count('alt="step 10: a cat"')
    assert html.count("<img") == 2 * 2 + 4 and html.count("data:image/png") == 8
    assert "Strength 0.5" in html and "Strength 1" in html and "without LoRA" in html and "zibu &lt;x&gt;" in html
    assert "data.validation_split" in html  # there are no losses, and it explains how to get them
    html = comparison_page("zibu", rows, ["a cat", "a dog"], [1.0], holds_out=True)
    assert says(html, "report/cannot-be-used-any-more") and "data.validation_split" not in html
    html = comparison_page("zibu", [compared(0, 0.3, 0.2), compared(10, 0.1, 0.2)], [], [1.0])
    assert (
        says(html, "report/1-lora-file-of-one-run")
        and "<svg" in html
        and says(html, "report/lowest-after-step-10")
        and "data.validation_split" not in html
    )
