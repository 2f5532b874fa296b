"""The number of cases that a start compares, and of programs that it compiles for them on each card."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton")
from benchmarks.registers import CARDS, NoDriver, driver, dtype_on  # noqa: E402
from lora_rocm.checks.kernel_check import IN_EIGHT_BITS, Case, ExactCase, cases_for, launched  # noqa: E402
from lora_rocm.dataset.shape import SampleShape  # noqa: E402
from lora_rocm.families.base import family_for  # noqa: E402
from lora_rocm.memory.footprint import count, meta_model  # noqa: E402
from lora_rocm.planning.step_plan import Footprint  # noqa: E402
from lora_rocm.recipe.kinds import recipe_from  # noqa: E402
from tests.golden import GOLDEN, assert_golden  # noqa: E402
from tests.tiny_flux import write_tiny_flux  # noqa: E402
from tests.tiny_llm import write_tiny_llm  # noqa: E402
from tests.tiny_z_image import write_tiny_z_image  # noqa: E402

MAX_CASES = 12
IMAGE, TEXT = SampleShape.of(h=64, w=64), SampleShape.of(tokens=64)
BASES: dict[str, Callable[[Path], object]] = {
    "flux": write_tiny_flux,
    "z-image": write_tiny_z_image,
    "llama": write_tiny_llm,
    "gemma3": lambda folder: write_tiny_llm(folder, "gemma3"),
    "sdxl": lambda folder: None,
}
STARTS = [
    "flux",
    "flux int8",
    "flux nf4",
    "flux int8 x int8",
    "z-image",
    "z-image int8",
    "z-image int8 x int8",
    "flux fp8 x fp8",
    "llama",
    "llama nf4",
    "gemma3 nf4",
    pytest.param("sdxl", marks=pytest.mark.slow),
    pytest.param("sdxl int8", marks=pytest.mark.slow),
]
Cases = Sequence[Case | ExactCase]


def cases_of(start: str, folder: Path, dtype: torch.dtype) -> Cases:
    """The cases that the first start of a family compares. Names of kernels do not depend on the model's size."""
    return cases_for(footprint_of(start, folder, dtype).kernels, dtype)


def footprint_of(start: str, folder: Path, dtype: torch.dtype) -> Footprint:
    """The counted memory of a start. "flux int8 x int8" has products in eight bits."""
    name, _, quantization = start.partition(" ")
    quantization, _, compute = quantization.partition(" x ")
    BASES[name](folder)
    is_text = name in ("llama", "gemma3")
    model = {"family": "causal-lm" if is_text else name}
    model["name_or_path"] = str(folder) if name != "sdxl" else "builtin:tiny-sdxl"
    model |= {"quantization": quantization} if quantization else {}
    model |= {"compute": compute} if compute else {}
    data = {"sources": [{"dataset": "builtin:demo-chats"}]} if is_text else {"path": str(folder)}
    sections: dict[str, Any] = {"model": model, "data": data, "train": {"max_train_steps": 1}}
    sections |= {"runtime": {"profile": "fast"}}
    recipe = recipe_from(sections | {"lora": {"rank": 4, "targets": "all-linear" if is_text else "attention"}})
    family = family_for(recipe)
    return count(family, meta_model(family, recipe, dtype), recipe, TEXT if is_text else IMAGE)


def programs(cases: Cases, gfx: str) -> set[tuple[str, str]]:
    """The programs that Triton compiles for the launches of these cases on a card. Nothing is compiled."""
    found, calls = set[tuple[str, str]](), list[tuple[Any, tuple[Any, ...], dict[str, Any]]]()

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        calls.append((kernel, args, options))

    def compile_nothing(kernel: Any, key: str, *args: Any) -> None:
        found.add((kernel.fn.__name__, key))

    with mock.patch.object(triton.JITFunction, "run", record), torch.enable_grad():
        for case in cases:
            launched(case, torch.device("cpu"), dtype_on(gfx))
    with (
        mock.patch.object(type(driver), "active", NoDriver(gfx)),
        mock.patch.object(triton.JITFunction, "_do_compile", compile_nothing),
    ):
        for kernel, args, options in calls:
            kernel.run(*args, grid=None, warmup=True, **options)
    return found


def recorded() -> Iterator[tuple[str, str, int, int]]:
    """(start, card, cases, programs)"""
    for line in (GOLDEN / "kernels" / "starts.txt").read_text(encoding="utf-8").splitlines()[1:]:
        start, gfx, cases, kernels = line.split(", ")
        yield start, gfx, int(cases), int(kernels)


@pytest.mark.parametrize("start", STARTS)
def test_a_start_compares_at_most_twelve_cases(start: str, tmp_path: Path) -> None:
    cases = cases_of(start, tmp_path / "a base ä", torch.bfloat16)
    assert 2 < len(cases) <= MAX_CASES
    assert {number for name, gfx, number, _ in recorded() if name == start and gfx == "gfx1100"} == {len(cases)}


@pytest.mark.parametrize("stored", ["int8", "fp8"])
def test_a_start_with_products_in_eight_bits_counts_and_compares_them(stored: str, tmp_path: Path) -> None:
    plain, eight = (
        footprint_of(f"flux {how}", tmp_path / how.replace(" ", "-"), torch.bfloat16)
        for how in (stored, f"{stored} x {stored}")
    )
    assert all(block.dense_bytes for block in plain.blocks) and not any(block.dense_bytes for block in eight.blocks)
    assert eight.weight_bytes == plain.weight_bytes and plain.work.eight_bit_flops == 0
    flops = eight.work.flops + eight.work.eight_bit_flops
    assert flops == pytest.approx(plain.work.flops, rel=0.02) and eight.work.eight_bit_flops > flops / 2
    unproven = {kernel for case in cases_for(eight.kernels, torch.bfloat16) for kernel in case.kernels}
    assert {f"eight_bit.product: {stored}", f"eight_bit.scaled_rows: {stored}", "eight_bit.turned: int8"} <= unproven
    of_eight_bits = {case for case in IN_EIGHT_BITS if {*case.kernels} & {*(eight.kernels or ())}}
    assert of_eight_bits and not of_eight_bits & {*cases_for(plain.kernels, torch.bfloat16)}


def test_more_kernels_would_be_seen() -> None:
    assert len(cases_for(None, torch.bfloat16)) > MAX_CASES
    assert {gfx for _, gfx, _, _ in recorded()} == {*CARDS}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_programs_of_a_start_on_each_card_are_as_recorded(tmp_path: Path) -> None:
    lines = ["family and format, card, cases, compiled programs"]
    for number, each in enumerate(STARTS):
        start = each if isinstance(each, str) else str(each.values[0])
        for gfx in CARDS:
            cases = cases_of(start, tmp_path / f"{number} {gfx}", dtype_on(gfx))
            lines.append(f"{start}, {gfx}, {len(cases)}, {len(programs(cases, gfx))}")
    assert_golden("kernels", "starts", "\n".join(lines) + "\n")
