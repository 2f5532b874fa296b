"""Experts are computed where PyTorch's grouped product does not take the dtype, and by that product where it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations import moe

from lora_rocm.families.causal_lm import architecture
from lora_rocm.families.causal_lm.architecture import states_of
from lora_rocm.families.causal_lm.family import CausalLM
from tests.families.causal_lm.test_family import recipe_of
from tests.tiny_llm import write_tiny_llm

CPU = torch.device("cpu")
ASKED = architecture.takes_grouped
IDS_BS = torch.arange(3, 35)[None]


@contextmanager
def refusing_all_but_bf16() -> Iterator[list[torch.dtype]]:
    """PyTorch's grouped product as it is on a GPU up to torch 2.11; the dtypes that it took."""
    product, taken, asked = torch.nn.functional.grouped_mm, list[torch.dtype](), ASKED

    def grouped_mm(rows: Tensor, weight: Tensor, **more: Any) -> Tensor:
        if rows.dtype is not torch.bfloat16:
            raise RuntimeError("Expected mat_a to be BFloat16 matrix got Float")
        taken.append(rows.dtype)
        return product(rows, weight, **more)

    asked.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "grouped_mm", grouped_mm)
        yield taken
    asked.cache_clear()


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gemma4_experts"])
def test_experts_in_float32_where_the_grouped_product_takes_bf16_alone(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[Any]()
    monkeypatch.setattr(architecture.LOG, "warning", lambda *said_of: said.append(said_of))
    model = CausalLM(recipe_of(write_tiny_llm(tmp_path / name, name))).load(torch.float32, CPU).components["model"]
    wanted = states_of(model, IDS_BS)
    assert not said  # it is silent where the product takes the dtype
    with refusing_all_but_bf16():
        found = states_of(model, IDS_BS)
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert len(said) == 1 and said[0][1] is torch.float32


def test_the_fault_is_one_without_the_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CausalLM(recipe_of(write_tiny_llm(tmp_path / "m", "mixtral"))).load(torch.float32, CPU).components["model"]
    monkeypatch.setattr(architecture, "takes_grouped", lambda device, dtype: True)
    with refusing_all_but_bf16(), pytest.raises(RuntimeError, match="BFloat16"):
        states_of(model, IDS_BS)
    assert moe._can_use_grouped_mm.asks_dtype  # type: ignore[attr-defined]


def test_bfloat16_keeps_the_grouped_product(tmp_path: Path) -> None:
    model = CausalLM(recipe_of(write_tiny_llm(tmp_path / "m", "mixtral"))).load(torch.bfloat16, CPU).components["model"]
    with refusing_all_but_bf16() as taken:
        states_of(model, IDS_BS)
    assert len(taken) >= 4  # two products of each block
