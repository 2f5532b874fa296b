"""The quality of products in eight bits: families on which they are worse than int8 storage are refused."""

from __future__ import annotations

from dataclasses import replace

from lora_rocm.families.registry import FAMILIES
from lora_rocm.recipe.eight_bit import Quality, WholeModelErrors, products_text, qualities, worse_than_storage

MEASURED = Quality("sdxl", "fp8", (0.01, 0.02), (-0.01, 0.005))


def test_a_family_is_refused_where_every_start_is_worse() -> None:
    assert MEASURED.is_worse
    assert not replace(MEASURED, loss=(0.004, 0.02)).is_worse, "one start is not"
    assert not replace(MEASURED, loss_of_int8=(-0.01, 0.015)).is_worse
    assert {key for key, row in qualities().items() if row.is_worse} == {("z-image", "fp8")}
    assert worse_than_storage("z-image", "fp8") and worse_than_storage("sdxl", "fp8") is None
    assert worse_than_storage("anima", "int8") is None, "not measured"


def test_each_row_is_of_a_family_and_its_losses_are_in_order() -> None:
    names = {spec.name for spec in FAMILIES}
    for row in qualities().values():
        assert row.family in names and row.product in ("fp8", "int8")
        assert all(list(found) == sorted(found) and len(found) == 2 for found in (row.loss, row.loss_of_int8))


def test_the_sentence_has_the_figures() -> None:
    assert "+1.0 to +2.0 %" in MEASURED.losses and "-1.0 to +0.5 %" in MEASURED.losses
    assert products_text("sdxl", "SDXL", "fp8") != products_text("anima", "Anima", "fp8")


def test_errors_of_a_whole_model_are_added() -> None:
    row = replace(MEASURED, whole=WholeModelErrors(0.08, 0.13, 0.14))
    rows = qualities()
    before = rows[("sdxl", "fp8")]
    rows[("sdxl", "fp8")] = row
    try:
        text = products_text("sdxl", "SDXL", "fp8")
    finally:
        rows[("sdxl", "fp8")] = before
    assert row.losses in text and all(figure in text for figure in ("8 %", "13 and 14 %"))
