"""The directions in which a layer's inputs vary most match an exact decomposition and PEFT's EVA."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import EvaConfig, LoraConfig, get_peft_model
from peft.tuners.lora.eva import initialize_lora_eva_weights
from torch import Tensor, nn

from lora_rocm.train.input_start import InputSketch, new_sketch, reading

CPU = torch.device("cpu")


def inputs(count: int, features: int, spread: list[float], seed: int = 0, mean: float = 0.0) -> Tensor:
    """Inputs with a covariance that has the directions and sizes of ``spread``; the others vary by nothing."""
    rng = torch.Generator().manual_seed(seed)
    axes, _ = torch.linalg.qr(torch.randn(features, len(spread), generator=torch.Generator().manual_seed(99)))
    return torch.randn(count, len(spread), generator=rng) @ torch.diag(torch.tensor(spread)) @ axes.T + mean


def sketched(parts: list[Tensor], rank: int, passes: int = 2) -> InputSketch:
    sketch = new_sketch(parts[0].shape[-1], rank, 3, CPU)
    for number in range(passes):
        if number:
            sketch.begin_next_pass()
        for part in parts:
            sketch.add(part)
    return sketch


def exact(parts: list[Tensor], rank: int) -> tuple[Tensor, float]:
    whole = torch.cat([part.flatten(0, -2) for part in parts]).double()
    _, values, rows = torch.linalg.svd(whole - whole.mean(dim=0), full_matrices=False)
    return rows[:rank].float(), float(values[:rank].square().sum() / values.square().sum())


def overlap(one: Tensor, other: Tensor) -> float:
    """The smallest cosine of the angles between two subspaces of orthonormal rows."""
    return float(torch.linalg.svdvals(one @ other.T)[-1])


@pytest.mark.filterwarnings("ignore:lora with eva")
def test_the_directions_are_those_of_a_peft_start() -> None:
    """Both read the same batches through the same layers; the second layer's inputs are the first one's outputs."""
    torch.manual_seed(1)
    rank, spread = 4, [9.0, 5.0, 3.0, 2.0]
    batches = [inputs(64, 24, spread, seed, mean=0.7) for seed in range(3)]
    base = nn.Sequential(nn.Linear(24, 20), nn.Linear(20, 8))
    ours = copy.deepcopy(base)
    layers = {str(index): layer for index, layer in enumerate(ours)}
    sketches = {"0": new_sketch(24, rank, 0, CPU), "1": new_sketch(20, rank, 0, CPU)}
    with reading(layers, sketches), torch.no_grad():
        for number in range(2):
            for sketch in sketches.values() if number else ():
                sketch.begin_next_pass()
            for batch in batches:
                ours(batch)
    config = LoraConfig(r=rank, target_modules=["0", "1"], init_lora_weights="eva", eva_config=EvaConfig(rho=1.0))
    theirs: Any = get_peft_model(copy.deepcopy(base), config)
    initialize_lora_eva_weights(
        theirs,
        batches,
        forward_fn=lambda model, batch: model(batch),
        prepare_model_inputs_fn=None,
        prepare_layer_inputs_fn=lambda layer_input, model_input, name: layer_input[0],
        show_progress_bar=False,
    )
    for name, sketch in sketches.items():
        found, share = sketch.leading(rank)
        expected = theirs.base_model.model[int(name)].lora_A["default"].weight.detach()
        assert overlap(found, expected) > 1 - 1e-5 and share == pytest.approx(1.0, abs=1e-4)
        torch.testing.assert_close(found @ found.T, torch.eye(rank), atol=1e-5, rtol=0)
    assert overlap(sketches["0"].leading(rank)[0], torch.eye(24)[:rank]) < 0.9, "control: other directions"


def test_more_inputs_than_vectors_come_near_the_exact_directions() -> None:
    """Nothing spans the whole space: variances fall slowly, there are three times as many directions as vectors."""
    parts = [inputs(200, 96, [0.9**index for index in range(96)], seed, mean=5.0).view(4, 50, 96) for seed in range(3)]
    truth, best = exact(parts, 8)
    shares = []
    for passes in (1, 2):
        found, share = sketched(parts, 8, passes).leading(8)
        centred = torch.cat([part.flatten(0, -2) for part in parts])
        centred = centred - centred.mean(dim=0)
        held = float((centred @ found.T).square().sum() / centred.square().sum())
        assert share <= held + 1e-4, "what is said is never more than what is held"
        shares.append(held)
    assert shares[0] < shares[1] and shares[1] > 0.98 * best
    whole, share = sketched(parts, 48).leading(8)  # as many vectors as features
    assert overlap(whole, truth) > 1 - 1e-4 and share == pytest.approx(best, rel=1e-3)


def test_parts_of_the_inputs_give_what_the_whole_gives() -> None:
    whole = inputs(120, 30, [4.0, 3.0, 2.0, 1.0, 0.5, 0.2], mean=-3.0)
    together, share = sketched([whole], 3).leading(3)
    apart, same = sketched([whole[:7], whole[7:90], whole[90:]], 3).leading(3)
    torch.testing.assert_close(apart, together, rtol=1e-3, atol=1e-4)
    assert share == pytest.approx(same, rel=1e-4)
    again, _ = sketched([whole], 3).leading(3)
    assert torch.equal(again, together), "the same inputs give the same bytes"


def test_inputs_that_span_less_give_less() -> None:
    assert sketched([inputs(50, 16, [2.0, 1.0])], 4).leading(4)[0].shape == (2, 16)
    assert sketched([torch.ones(50, 16)], 4).leading(4)[0].shape == (0, 16), "what never varies has no direction"
    assert new_sketch(16, 4, 0, CPU).leading(4)[0].shape == (0, 16), "a layer that was not called"


def test_inputs_that_are_not_finite_are_told() -> None:
    with pytest.raises(ValueError, match="not finite"):
        sketched([torch.full((5, 16), torch.inf)], 4, passes=1).leading(4)
