"""Child process that tunes a recipe's matrix products: ``python -m lora_rocm.trials.products_child JOB``.

Each product is computed by the library's default, then tuned, and computed by the chosen solution. Its row has the
entries of the table only if both agree with float32. A product that crashes or hangs ends the process; the parent
continues after it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.cuda import tunable

from lora_rocm.bench.device_child import told
from lora_rocm.checks.timing import Work, measure, own_seconds, seconds_of
from lora_rocm.device.backend_settings import apply
from lora_rocm.device.precision import choose_device, compute_dtype
from lora_rocm.families.base import family_for
from lora_rocm.families.registry import PRODUCT, Registry
from lora_rocm.hardware.settings import settings_from
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.trials.step_calls import Product, count_calls

SOLUTION_MS = 10
"""Time for one solution of a product; there are hundreds to thousands of them."""
BOUND_EPS = 4.0
"""Allowed error in units of eps of the dtype, relative to the result's largest number: the result is rounded once, and
once more for each partial sum that a solution keeps in the dtype. In float32 the sum itself rounds, too (``_bound``).
"""


class Tuner(Protocol):
    """Solutions of matrix products."""

    def default(self, product: Callable[[], Tensor]) -> Tensor:
        """Compute by the library's own choice."""
        ...

    def tuned(self, product: Callable[[], Tensor], first: bool) -> Tensor:
        """Compute by the fastest solution; ``first``: find it."""
        ...

    def entries(self) -> list[list[Any]]:
        """(operation, parameters, solution, milliseconds) of all products tuned in this process."""
        ...

    def validators(self) -> list[list[str]]:
        """(name, version) of all that the entries hold for."""
        ...


class TorchTuner:
    """PyTorch's TunableOp."""

    def __init__(self, folder: Path) -> None:
        tunable.set_filename(str(folder / "none.csv"))  # else it reads and writes a file in the current folder
        tunable.set_max_tuning_duration(SOLUTION_MS)

    def default(self, product: Callable[[], Tensor]) -> Tensor:
        tunable.enable(False)
        return product()

    def tuned(self, product: Callable[[], Tensor], first: bool) -> Tensor:
        tunable.enable(True)
        tunable.tuning_enable(first)
        return product()

    def entries(self) -> list[list[Any]]:
        return [[*entry] for entry in tunable.get_results()]  # type: ignore[misc]

    def validators(self) -> list[list[str]]:
        return [[str(part) for part in pair] for pair in tunable.get_validators()]


def prepared(product: Product, device: torch.device, tuner: Tuner, found: dict[str, Any]) -> Callable[[], float]:
    """Tune a product and check the chosen solution; return a function that times it, in seconds.

    Raises:
        RuntimeError: a result is wrong.
    """
    own = torch.Generator(device).manual_seed(0)
    inputs = [laid.random(device, own) for laid in product.inputs]
    run = partial(product.run, inputs)
    wanted = tuner.default(partial(product.run, [tensor.float() for tensor in inputs]))
    bound = _bound(product)
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


def _bound(product: Product) -> float:
    terms, dtype = product.inputs[-1].shape[-2], product.inputs[-1].dtype
    eps = torch.finfo(dtype).eps
    return BOUND_EPS * eps * (terms**0.5 if dtype is torch.float32 else 1)


def _require(got: Tensor, wanted: Tensor, bound: float, what: str) -> None:
    error = float((got.float() - wanted).abs().max() / wanted.abs().max())
    if not error <= bound:
        raise RuntimeError(f"wrong: the {what} solution is off by {error:.2g} of the largest number")


def main(tuner: Tuner | None = None, registry: Registry = PRODUCT) -> int:
    """Tune the products of the job file named by the last argument."""
    path = Path(sys.argv[-1])
    job = json.loads(path.read_text(encoding="utf-8"))
    return told(lambda: _tune(job, tuner or TorchTuner(path.parent), registry))


def _tune(job: dict[str, Any], tuner: Tuner, registry: Registry) -> None:
    recipe, settings = recipe_from(job["recipe"], registry), settings_from(os.environ)
    device = choose_device(recipe.runtime.device, settings)
    apply(settings, device)
    dtype = compute_dtype(recipe.train.mixed_precision, device, settings)
    calls = count_calls(recipe, family_for(recipe), dtype, settings, device.type == "cuda")
    works = []
    for product, count in calls.products.items():
        found: dict[str, Any] = {}
        fields = {"product": str(product), "count": count}
        works.append(Work(fields, 1.0, partial(prepared, product, device, tuner, found), found))
    measure(works, job["start"], own_seconds, job["limit_s"])


if __name__ == "__main__":
    sys.exit(main())
