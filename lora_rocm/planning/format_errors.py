"""Sentences about the quality that a frozen base loses by its number format, as measured (``format_errors.toml``)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lora_rocm.foundation.tables import read_rows


@dataclass(frozen=True)
class WholeModel:
    """Errors measured on a full-size model with random weights.

    output, a, b: relative errors of the predictions and of the gradients of a LoRA's A and B.
    """

    family: str
    output: float
    a: float
    b: float


@dataclass(frozen=True)
class FormatError:
    """A row of ``format_errors.toml``, which describes the fields at its top. name: value of ``model.quantization``."""

    name: str
    weights: float
    loss: tuple[float, ...]
    whole: tuple[WholeModel, ...]


@cache
def format_errors() -> dict[str, FormatError]:
    """Return the rows of ``format_errors.toml`` by name."""
    return {row.name: row for row in read_rows(Path(__file__).with_suffix(".toml"), FormatError)}


def weights_text(name: str) -> str:
    """Return a clause on how much a format changes the weights."""
    return f"{name} rounds the frozen weights: {100 * format_errors()[name].weights:.1f} % of their size"


def loss_text(name: str) -> str:
    """Return a clause on how much a format changes the loss."""
    low, high = (100 * share for share in format_errors()[name].loss)
    return f"a tiny model's loss after 200 steps changed by {low:+.1f} to {high:+.1f} %"


def whole_text(name: str, family: str, title: str) -> str:
    """Return a clause on how much a format changes the predictions and gradients of a whole model.

    Args:
        name: name of the format.
        family: name of the model's family. If it was not measured, the clause has the range over all measured families.
        title: title of the family.
    """
    row = format_errors()[name]
    own = [model for model in row.whole if model.family == family]
    of, model = own or row.whole, title if own else "image models"
    gradients = _range([share for each in of for share in (each.a, each.b)])
    return (
        f"over full-size {model} with random weights (errors add up less in trained ones) it changes the predictions "
        f"by {_range([each.output for each in of])} and the LoRA's gradients by {gradients}"
    )


def _range(shares: list[float]) -> str:
    """Return shares as "4 to 5 %", or as "4 %" if they round to the same number."""
    low, high = (f"{100 * share:.0f}" for share in (min(shares), max(shares)))
    return f"{low} %" if low == high else f"{low} to {high} %"
