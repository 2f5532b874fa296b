"""The documented errors of a frozen base's formats: each existing format has figures, of existing families."""

from __future__ import annotations

from typing import get_args

import pytest

from lora_rocm.families.registry import FAMILIES
from lora_rocm.planning.format_errors import format_errors, loss_text, weights_text, whole_text
from lora_rocm.recipe.sections import Quantization
from tests.wording import Worded, says, says_if, worded


def test_every_format_has_figures() -> None:
    assert [*format_errors()] == [name for name in get_args(Quantization) if name != "none"]
    for row in format_errors().values():
        assert {model.family for model in row.whole} <= set(FAMILIES.names) and len(row.loss) == 2
        assert row.loss[0] < row.loss[1], "of several runs"
        assert all(row.weights < min(model.output, model.a, model.b) < 1 for model in row.whole)


@pytest.mark.parametrize(("family", "words"), [
    ("flux", worded("planning/over-full-size-flux-1-with-random")),
    ("sdxl", worded("planning/over-full-size-image-models-with-random")),
])  # fmt: skip
def test_a_family_has_its_own_figures_or_the_range_of_all(family: str, words: Worded) -> None:
    text = whole_text("int8", family, FAMILIES[family].title)
    assert says(text, words) and says_if(family == "sdxl", text, "planning/by-2-to-3")
    assert "0.8 %" in weights_text("int8") and says(loss_text("int8"), "planning/after-200-steps")
