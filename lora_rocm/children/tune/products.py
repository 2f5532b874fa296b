"""Child process that tunes a recipe's matrix products: ``python -m lora_rocm.children.tune.products JOB``.

Each product is computed with the library's default solution. Then it is tuned and computed with the chosen
solution. If both results agree with float32, its row gets the entries for TunableOp's table. If a product crashes
or hangs, the process ends. The parent starts a new one, which continues with the next product (``checks.timing``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.cuda import tunable

from lora_rocm.checks.timing import seconds_of
from lora_rocm.children.tune.job import Prepare, Product, RecipeWork, report_rows
from lora_rocm.processes.jobs import TuneProductsJob

SOLUTION_MS = 10
"""Time limit for tuning one solution, in milliseconds. A product has hundreds to thousands of solutions."""
MAX_EPS = 4.0
"""Largest error of a correct solution, in units of the dtype's eps and relative to the result's largest magnitude.

The result is rounded once, and once more for each partial sum that a solution stores in the dtype. In float32 the
sum is rounded, too, so the error grows with the square root of the number of terms.
"""


class Tuner:
    """Access to PyTorch's TunableOp."""

    def __init__(self) -> None:
        tunable.set_filename(os.devnull)  # else it reads and writes a file in the current folder
        tunable.set_max_tuning_duration(SOLUTION_MS)

    def default(self, product: Callable[[], Tensor]) -> Tensor:
        """Return the product, computed with the library's default solution."""
        tunable.enable(False)
        return product()

    def tuned(self, product: Callable[[], Tensor], first: bool) -> Tensor:
        """Return the product, computed with the fastest solution.

        ``first``: whether that solution has to be found first.
        """
        tunable.enable(True)
        tunable.tuning_enable(first)
        return product()

    def entries(self) -> list[list[Any]]:
        """Return (operation, parameters, solution, milliseconds) of all products that were tuned in this process."""
        return [[*entry] for entry in tunable.get_results()]  # type: ignore[misc]

    def validators(self) -> list[list[str]]:
        """Return (name, version) of the software for which the entries are valid."""
        return [[str(part) for part in pair] for pair in tunable.get_validators()]


def prepared(product: Product, device: torch.device, tuner: Tuner, found: dict[str, Any]) -> Callable[[], float]:
    """Tune a product, check the chosen solution, and return a function that times it (see ``Prepare``)."""
    own = torch.Generator(device).manual_seed(0)
    inputs = [laid.random(device, own) for laid in product.inputs]
    run = partial(product.run, inputs)
    wanted = tuner.default(partial(product.run, [tensor.float() for tensor in inputs]))
    terms, dtype = inputs[-1].shape[-2], inputs[-1].dtype
    bound = MAX_EPS * torch.finfo(dtype).eps * (terms**0.5 if dtype is torch.float32 else 1)
    _require(tuner.default(run), wanted, bound, "default")
    before = tuner.entries()
    for first in (True, False):
        _require(tuner.tuned(run, first), wanted, bound, "chosen")
    fresh = [entry for entry in tuner.entries() if entry not in before]

    def seconds() -> float:
        found["default_s"] = seconds_of(lambda: tuner.default(run), device)
        taken = seconds_of(lambda: tuner.tuned(run, False), device)
        found.update(entries=fresh, validators=tuner.validators())
        return taken

    return seconds


def _require(got: Tensor, wanted: Tensor, bound: float, what: str) -> None:
    error = float((got.float() - wanted).abs().max() / wanted.abs().max())
    if not error <= bound:
        raise RuntimeError(f"wrong: the {what} solution is off by up to {error:.2g} of the largest number")


def rows(job: TuneProductsJob, work: RecipeWork) -> Iterator[tuple[dict[str, Any], Prepare]]:
    """Yield (fields, preparation) of a row for each matrix product."""
    tuner = Tuner()
    for product, count in work.products.items():
        yield {"product": str(product), "count": count}, partial(prepared, product, work.device, tuner)


def main() -> int:
    """Tune the matrix products of the job's recipe, and return the exit code."""
    return report_rows(TuneProductsJob, rows)


if __name__ == "__main__":
    sys.exit(main())
