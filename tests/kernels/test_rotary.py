"""The eager implementation of normed and rotated heads, compared with the libraries that models come from."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from lora_rocm.kernels.rotary import Rotation, norm_rotary

TOKENS, DIM = 5, 8


def angles(interleaved: bool) -> tuple[tuple[Tensor, Tensor], Rotation]:
    """A random angle for each token and pair: as diffusers has it, and as ``norm_rotary`` takes it."""
    turn = torch.randn(TOKENS, DIM // 2, generator=torch.Generator().manual_seed(1))
    both = turn.repeat_interleave(2, dim=1) if interleaved else torch.cat((turn, turn), dim=1)
    return (both.cos(), both.sin()), Rotation(turn.cos(), turn.sin(), interleaved)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("interleaved", [True, False])
def test_two_streams_are_turned_as_by_diffusers(interleaved: bool, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    theirs, ours = angles(interleaved)
    norm = torch.nn.RMSNorm(DIM, eps=1e-6).requires_grad_(False)
    norm.weight.copy_(torch.randn(DIM))
    text, image, dy = torch.randn(2, 2, 3, DIM), torch.randn(2, 3, 3, DIM), torch.randn(2, TOKENS, 3, DIM)

    def outcome(dtype: torch.dtype, plain: bool) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (text, image)]
        if plain:
            unbind = -1 if interleaved else -2
            joined = norm(torch.cat(leaves, dim=1))
            output: Tensor = apply_rotary_emb(joined, theirs, use_real_unbind_dim=unbind, sequence_dim=1)  # type: ignore[assignment]
        else:
            output = norm_rotary([(x, norm.weight.to(dtype)) for x in leaves], 1e-6, ours, "eager")
        return [output, *torch.autograd.grad(output, leaves, dy.to(dtype))]

    for found, wanted in zip(outcome(dtype, plain=False), outcome(torch.float32, plain=True), strict=True):
        assert found.dtype == dtype and (found - wanted).norm() <= tolerance * wanted.norm()


def test_angles_of_each_sample_turn_as_complex_numbers_do() -> None:
    torch.manual_seed(0)
    x, turn = torch.randn(2, TOKENS, 3, DIM), torch.randn(2, TOKENS, DIM // 2)
    unit = torch.polar(torch.ones_like(turn), turn)
    weight = torch.ones(DIM)
    normal = torch.nn.functional.rms_norm(x, (DIM,), weight, 1e-5)
    complex_ = torch.view_as_complex(normal.unflatten(-1, (-1, 2))) * unit.unsqueeze(2)
    rotation = Rotation(unit.real, unit.imag, interleaved=True)
    found = norm_rotary([(x, weight)], 1e-5, rotation, "eager")
    torch.testing.assert_close(found, torch.view_as_real(complex_).flatten(3))


def test_angles_of_different_strides_are_refused() -> None:
    one = torch.ones(TOKENS, DIM // 2)
    with pytest.raises(ValueError, match="strides"):
        Rotation(one, torch.zeros(1, 1).expand_as(one), interleaved=False)


def test_the_rotation_that_turns_nothing_leaves_the_norm() -> None:
    x, weight = torch.randn(2, TOKENS, 3, DIM), torch.randn(DIM)
    wanted = torch.nn.functional.rms_norm(x, (DIM,), weight, 1e-6)
    torch.testing.assert_close(norm_rotary([(x, weight)], 1e-6, Rotation.none(x), "eager"), wanted)


def test_heads_without_a_norm_are_turned_as_by_transformers_and_not_kept() -> None:
    """Its tables have each angle twice, in the dtype of the model; a weight in float32 is not rounded."""
    torch.manual_seed(0)
    (cos, sin), rotation = angles(interleaved=False)
    x, dy = torch.randn(2, TOKENS, 3, DIM, requires_grad=True), torch.randn(2, TOKENS, 3, DIM)
    wanted, _ = apply_rotary_pos_emb(x, x, cos[None], sin[None], unsqueeze_dim=2)
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        found = norm_rotary([(x, None)], 0.0, rotation, "eager")
    torch.testing.assert_close(found, wanted)
    for one, other in zip(*(torch.autograd.grad(output, x, dy) for output in (found, wanted)), strict=True):
        torch.testing.assert_close(one, other)
    assert kept and all(tensor.shape[-1] == DIM // 2 for tensor in kept)
    half = norm_rotary([(x.bfloat16(), 1 + 1e-3 * torch.ones(DIM))], 1e-6, rotation, "eager")
    assert half.dtype == torch.bfloat16
