"""The reader of ComfyUI's rules, against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lora_rocm.export.comfyui_check import apply_comfy

WEIGHT = torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 2.0]])
UP, DOWN = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0, 0.0, 1.0]])


def patched(tensors: dict[str, Tensor], weight: Tensor = WEIGHT, **how: bool) -> Tensor:
    names = {f"k.{name}": tensor for name, tensor in tensors.items()}
    ((key, result),) = apply_comfy(names, {"k": weight}, **how)
    assert key == "k"
    return result


LORA = {"lora_up.weight": UP, "lora_down.weight": DOWN}


def test_without_alpha_the_scale_is_one() -> None:
    assert patched(LORA).tolist() == [[4.0, 4.0, 1.0], [2.0, 0.0, 4.0]]


def test_alpha_over_rank() -> None:
    assert patched({**LORA, "alpha": torch.tensor(0.5)}).tolist() == [[3.5, 4.0, 0.5], [1.0, 0.0, 3.0]]


def test_convolutions() -> None:
    weight = torch.zeros(2, 3, 3, 3)
    up, down = torch.ones(2, 4, 1, 1), torch.ones(4, 3, 3, 3)
    result = patched({"lora_up.weight": up, "lora_down.weight": down, "alpha": torch.tensor(2.0)}, weight)
    assert result.unique().tolist() == [2.0]
    assert result.shape == weight.shape


def test_dora_by_the_definition_and_by_comfyui() -> None:
    """m * (W + dW) / ||W + dW||, and with the base weight's norm instead."""
    dora = {**LORA, "alpha": torch.tensor(1.0), "dora_scale": torch.tensor([[10.0], [2.0]])}
    moved = torch.tensor([[4.0, 4.0, 1.0], [2.0, 0.0, 4.0]])
    exact = moved * torch.tensor([[10.0 / 33**0.5], [2.0 / 20**0.5]])
    torch.testing.assert_close(patched(dora), exact)
    torch.testing.assert_close(patched(dora, norm_of_base=True), moved * torch.tensor([[2.0], [1.0]]))


def test_dora_on_the_input_axis() -> None:
    dora = {**LORA, "dora_scale": torch.tensor([[1.0, 1.0, 1.0]])}
    torch.testing.assert_close(patched(dora).norm(dim=0), torch.ones(3))


def test_a_stray_key_is_an_error() -> None:
    with pytest.raises(KeyError, match="other"):
        list(apply_comfy({"other.lora_up.weight": UP}, {"k": WEIGHT}))


def test_modules_without_a_lora_are_left_out() -> None:
    assert list(apply_comfy({}, {"k": WEIGHT})) == []


W1, W2 = torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([[1.0, 3.0]])
KRONECKER = [[1.0, 3.0, 2.0, 6.0], [0.0, 0.0, 1.0, 3.0]]


def test_the_kronecker_product_of_a_lokr() -> None:
    """An alpha counts only where a factor is a product; then it is divided by the rank of that."""
    zero = torch.zeros(2, 4)
    assert patched({"lokr_w1": W1, "lokr_w2": W2, "alpha": torch.tensor(5.0)}, zero).tolist() == KRONECKER
    half = {"lokr_w1": W1, "lokr_w2_a": torch.ones(1, 2), "lokr_w2_b": torch.tensor([[0.5, 1.5], [0.5, 1.5]])}
    assert patched(half, zero).tolist() == KRONECKER
    assert patched(half | {"alpha": torch.tensor(1.0)}, zero).tolist() == [[n / 2 for n in row] for row in KRONECKER]


def test_the_kronecker_product_of_convolutions() -> None:
    w2 = torch.arange(18.0).reshape(1, 2, 3, 3)
    result = patched({"lokr_w1": W1, "lokr_w2": w2}, torch.zeros(2, 4, 3, 3))
    assert torch.equal(result[0, :2], w2[0]) and torch.equal(result[0, 2:], 2 * w2[0]) and not result[1, :2].any()
