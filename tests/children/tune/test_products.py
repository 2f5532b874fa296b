"""Tuning of matrix products with an injected tuner: only a solution that gives the default's result is believed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lora_rocm.checks.timing import MeasuredRow, measure
from lora_rocm.children.tune.job import Laid, Product
from lora_rocm.children.tune.products import Tuner, prepared

CPU = torch.device("cpu")


def laid(*shape: int, dtype: torch.dtype, transposed: bool = False) -> Laid:
    strides = (1, shape[0]) if transposed else (shape[1], 1)
    return Laid(shape, strides, dtype)


def product(dtype: torch.dtype, name: str = "mm") -> Product:
    sides = (laid(5, 32, dtype=dtype), laid(32, 6, dtype=dtype, transposed=True))
    return Product(name, (Laid((6,), (1,), dtype), *sides) if name == "addmm" else sides)


class FakeTuner(Tuner):
    """Its chosen solution gives the result, spoilt."""

    def __init__(self, spoil: Callable[[Tensor], Tensor]) -> None:
        self.spoil, self.tuned_first = spoil, 0

    def default(self, product: Callable[[], Tensor]) -> Tensor:
        return product()

    def tuned(self, product: Callable[[], Tensor], first: bool) -> Tensor:
        self.tuned_first += first
        return self.spoil(product())

    def entries(self) -> list[list[Any]]:
        return [["Gemm", f"nt_{number}", "Gemm_Rocblas_7", 0.1] for number in range(self.tuned_first)]

    def validators(self) -> list[list[str]]:
        return [["PT_VERSION", "2.13.0"]]


def row_of(tuner: FakeTuner, what: Product, capfd: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    work = MeasuredRow({"product": str(what)}, 1.0, lambda: prepared(what, CPU, tuner, found), found)
    measure([work], 0, lambda call: call(), limit_s=60)  # type: ignore[arg-type, return-value]
    row: dict[str, Any] = json.loads(capfd.readouterr().out.splitlines()[-1])
    return row


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["mm", "addmm"])
def test_a_right_solution_gives_its_entries(dtype: torch.dtype, name: str, capfd: Any) -> None:
    row = row_of(FakeTuner(lambda result: result), product(dtype, name), capfd)
    assert row["problem"] is None and row["default_s"] > 0 and row["seconds"] > 0
    assert row["entries"] == [["Gemm", "nt_0", "Gemm_Rocblas_7", 0.1]] and row["validators"]


def forgets_a_row(result: Tensor) -> Tensor:
    return torch.cat([result[:-1], result[-1:] * 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spoil", [lambda result: result * 1.1, lambda result: result * float("inf"), forgets_a_row])
def test_a_wrong_solution_gives_none(dtype: torch.dtype, spoil: Any, capfd: Any) -> None:
    row = row_of(FakeTuner(spoil), product(dtype), capfd)
    assert "wrong: the chosen solution" in row["problem"] and "entries" not in row


def test_inputs_lie_as_in_the_step() -> None:
    own = torch.Generator().manual_seed(0)
    assert laid(4, 3, dtype=torch.float32, transposed=True).random(CPU, own).stride() == (1, 4)
    assert Laid((4, 3), (0, 1), torch.float32).random(CPU, own).stride() == (0, 1), "expanded: one row for all"
