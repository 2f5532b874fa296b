"""The quality of products in eight bits by family, as measured (``eight_bit.toml``)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lora_rocm.foundation.tables import read_rows


@dataclass(frozen=True)
class WholeModelErrors:
    """Relative errors of a full-size model: of its predictions, and of the gradients of a LoRA's A and B."""

    output: float
    a: float
    b: float


@dataclass(frozen=True)
class Quality:
    """A row of ``eight_bit.toml``, which describes the fields at its top."""

    family: str
    product: str
    loss: tuple[float, ...]
    loss_of_int8: tuple[float, ...]
    whole: WholeModelErrors | None = None

    @property
    def is_worse(self) -> bool:
        """Whether each start lost more by the products than any start lost by a base stored in int8."""
        return min(self.loss) > max(self.loss_of_int8)

    @property
    def losses(self) -> str:
        """The increases of the loss, as a clause."""
        own, other = (" to ".join(f"{100 * share:+.1f}" for share in found) for found in (self.loss, self.loss_of_int8))
        products = f"products in {self.product}"
        return f"a tiny model's loss after 200 steps changed by {own} % with {products}, by {other} % with int8 storage"


@cache
def qualities() -> dict[tuple[str, str], Quality]:
    """Return the rows of ``eight_bit.toml`` by family and product."""
    rows = read_rows(Path(__file__).with_suffix(".toml"), Quality)
    return {(row.family, row.product): row for row in rows}


def worse_than_storage(family: str, product: str) -> str | None:
    """Return a clause with the losses if products are worse than int8 storage; None if not, or if not measured."""
    found = qualities().get((family, product))
    return found.losses if found is not None and found.is_worse else None


def products_text(family: str, title: str, product: str) -> str:
    """Return a sentence about the quality of a family's products."""
    found = qualities().get((family, product))
    if found is None:
        return f"the quality of products in {product} was not measured on {title}"
    text = f"{title}: {found.losses}"
    if found.whole is None:
        return text
    shares = f"{100 * found.whole.output:.0f} %", f"{100 * found.whole.a:.0f} and {100 * found.whole.b:.0f} %"
    return f"{text}; at full size with random weights predictions change by {shares[0]}, gradients by {shares[1]}"
