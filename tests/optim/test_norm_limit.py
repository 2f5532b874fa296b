"""Max-norm regularisation against the formula of kohya's scripts, worked out weight by weight."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lora_rocm.adapters.flat_params import FlatWeights
from lora_rocm.optim.base import GatedOptimizer
from lora_rocm.optim.norm_limit import Factors, NormLimit
from lora_rocm.recipe.optim_sections import AdamwSection

FREE, HELD = torch.tensor(0.0), torch.tensor(1.0)
SHAPES = (((2, 6), (5, 2)), ((2, 6), (5, 2)), ((3, 4, 3, 3), (8, 3, 1, 1)))
SCALES = (0.5, 2.0, 1.0)


def pairs(dtype: torch.dtype = torch.float32, size: float = 1.0) -> list[tuple[Tensor, Tensor, float]]:
    rng = torch.Generator().manual_seed(0)
    drawn = [[torch.randn(shape, generator=rng).mul_(size).to(dtype) for shape in shapes] for shapes in SHAPES]
    return [(down, up, scale) for (down, up), scale in zip(drawn, SCALES, strict=True)]


def named(pairs: list[tuple[Tensor, Tensor, float]]) -> list[tuple[Factors, float]]:
    return [({"lora_A": down, "lora_B": up}, scale) for down, up, scale in pairs]


def norm(down: Tensor, up: Tensor, scale: float) -> float:
    return float((scale * up.float().flatten(1) @ down.float().flatten(1)).norm())


def test_larger_updates_get_the_norm_and_the_others_keep_their_bits() -> None:
    made, before = pairs(), pairs()
    sizes = [norm(*pair) for pair in made]
    most = sorted(sizes)[1] * 0.999
    NormLimit(named(made), most).apply(FREE)
    assert sum(size > most for size in sizes) == 2
    for (down, up, scale), (old_down, old_up, _), size in zip(made, before, sizes, strict=True):
        root = math.sqrt(min(1.0, most / size))
        assert torch.allclose(down, old_down * root) and torch.allclose(up, old_up * root)
        if size <= most:
            assert torch.equal(down, old_down) and torch.equal(up, old_up)
        else:
            assert math.isclose(norm(down, up, scale), most, rel_tol=1e-5)


def test_zero_updates_and_a_held_step_change_no_bit() -> None:
    for made, held in ((pairs(size=0.0), FREE), (pairs(), HELD), (pairs(torch.bfloat16), HELD)):
        before = [(down.clone(), up.clone()) for down, up, _ in made]
        NormLimit(named(made), 0.1).apply(held)
        assert all(
            torch.equal(old, now)
            for olds, nows in zip(before, made, strict=True)
            for old, now in zip(olds, nows[:2], strict=True)
        )


def test_the_optimizer_limits_after_its_update_and_guards_what_it_wrote() -> None:
    leaves = {
        f"{n}.{role}": nn.Parameter(t) for n, pair in enumerate(pairs()) for role, t in zip("AB", pair[:2], strict=True)
    }
    weights = FlatWeights(leaves)
    held = [(weights.parameters[f"{n}.A"], weights.parameters[f"{n}.B"], scale) for n, scale in enumerate(SCALES)]
    groups = [{"names": list(leaves), "lr": 1e-2}]
    how = {"max_train_steps": 9, "ema_decay": 0.0, "use_loss_scale": False}
    optimizer = GatedOptimizer(weights, groups, AdamwSection(), limit=NormLimit(named(held), 0.5), **how)
    for blocked in (HELD, FREE):
        before = weights.masters.clone()
        weights.gradients.fill_(1.0)
        optimizer.step(0, blocked)
        assert float(optimizer.state_guard.check()) == 0
        assert torch.equal(before, weights.masters) is bool(blocked)
    assert all(norm(*pair) <= 0.5 * (1 + 1e-5) for pair in held)
