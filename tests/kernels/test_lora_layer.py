"""PEFT's mechanism for taking our linear layer is not public: this pins the part that we need."""

from __future__ import annotations

import inspect
import json

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Conv2d, Linear
from torch import Tensor, nn

from lora_rocm.families.base import LoadedModel
from lora_rocm.families.common.recompute import Recomputing
from lora_rocm.kernels.adapter_dropout import AdapterDropout, DropoutDraws
from lora_rocm.kernels.lora_layer import LoraLinear, drop_ranks, with_lean_layers


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(4, 6), nn.Conv2d(4, 6, 1)


def injected(lean: bool) -> Model:
    config = LoraConfig(r=2, target_modules=["linear", "conv"])
    model = Model().requires_grad_(False)
    inject_adapter_in_model(with_lean_layers(config) if lean else config, model)
    return model


def test_peft_takes_our_class_for_linear_layers_and_for_nothing_else() -> None:
    ours, plain = injected(lean=True), injected(lean=False)
    assert type(ours.linear) is LoraLinear and type(ours.conv) is Conv2d
    assert type(plain.linear) is Linear and type(plain.conv) is Conv2d, "the control"
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert ours.linear.scaling == plain.linear.scaling and ours.linear.r == plain.linear.r


def test_the_registration_is_the_one_we_know_and_leaves_no_trace_in_a_file() -> None:
    assert list(inspect.signature(LoraConfig._register_custom_module).parameters) == ["self", "mapping"]
    written = json.dumps(with_lean_layers(LoraConfig(r=2)).to_dict(), default=str)
    assert "LoraLinear" not in written


@pytest.mark.parametrize(
    ("spoil", "is_plain"),
    [
        (lambda layer: None, True),
        (lambda layer: layer.enable_adapters(False), False),
        (lambda layer: layer.merge(), False),
        (lambda layer: layer.lora_A.double(), False),
        (lambda layer: layer.base_layer.weight.requires_grad_(True), True),  # ``forward`` itself turns away
    ],
)
def test_what_is_not_the_plain_case_goes_the_way_of_peft(spoil: object, is_plain: bool) -> None:
    layer = injected(lean=True).linear
    assert isinstance(layer, LoraLinear) and callable(spoil)
    spoil(layer)
    assert (layer.plain(torch.zeros(1, 4)) is not None) is is_plain


def dropping(rank_dropout: float, module_dropout: float) -> Model:
    """Layers of rank 2 that add rows of ones for each rank that is kept."""
    model = injected(lean=True)
    for layer in (model.linear, model.conv):
        assert isinstance(layer, LoraLinear | Conv2d)
        drop_ranks(layer, "default", rank_dropout, module_dropout)
        nn.init.ones_(layer.lora_A["default"].weight)
        nn.init.zeros_(layer.lora_B["default"].weight)
        with torch.no_grad():
            layer.lora_B["default"].weight.flatten(1)[:2] = torch.eye(2)  # output 0 is rank 0, output 1 rank 1
    return model


def ranks(model: Model, samples: int = 4000) -> tuple[Tensor, Tensor]:
    """The contributions of the two ranks to each sample, as a share of their sum: (linear [B, S, 2], conv [B, H, W,
    2]).
    """
    shares = []
    for layer, x in ((model.linear, torch.ones(samples, 3, 4)), (model.conv, torch.ones(samples, 4, 2, 2))):
        added = layer(x) - layer.base_layer(x)
        shares.append(
            (added.movedim(1, -1) if x.ndim == 4 else added)[..., :2].detach() / (4 * layer.scaling["default"])
        )
    return shares[0], shares[1]


def test_ranks_are_dropped_for_each_sample_and_the_others_scaled() -> None:
    """As by kohya's rank_dropout: whole ranks of a sample, in all tokens and pixels alike; the mean stays."""
    for shares in ranks(dropping(0.25, 0.0)):
        flat = shares.flatten(1, -2)
        assert torch.allclose(flat, flat[:, :1].expand_as(flat), atol=1e-5)
        kept = flat[:, 0]
        assert torch.all((kept.abs() < 1e-5) | ((kept - 1 / 0.75).abs() < 1e-5))
        bound = 5 * (0.25 / 0.75 / len(kept)) ** 0.5  # five standard deviations of the mean
        assert torch.all((kept.mean(0) - 1).abs() < bound)
        both = ((kept[:, 0] > 0) == (kept[:, 1] > 0)).float().mean()
        assert both < 0.75, "the ranks are drawn apart"


def test_a_dropped_module_adds_nothing_to_a_whole_batch() -> None:
    model, seen = dropping(0.0, 0.5), set()
    draws = DropoutDraws(model.modules())
    for seed in range(20):
        draws.draw(seed)
        seen |= {round(float(shares.sum())) for shares in ranks(model, samples=1)}
    assert seen == {0, 6, 8}


def test_nothing_is_dropped_outside_of_training_and_the_fused_product_knows_it() -> None:
    model, plain = dropping(0.5, 0.5), injected(lean=True)
    x = torch.zeros(1, 4)
    assert isinstance(model.linear, LoraLinear) and isinstance(plain.linear, LoraLinear)
    assert model.linear.plain(x) is None and plain.linear.plain(x) is not None
    model.eval()
    assert model.linear.plain(x) is not None
    assert all(torch.allclose(shares, torch.ones_like(shares), atol=1e-5) for shares in ranks(model, samples=4))


def test_ranks_are_drawn_before_a_pass_and_stay_through_it() -> None:
    """As a captured graph and recomputation need it: at one address, equal until the next draw, by the seed alone."""
    model, x, seen = dropping(0.5, 0.2), torch.ones(8, 3, 4), []
    draws, drop = DropoutDraws(model.modules()), model.linear.lora_dropout["ranks"]
    assert isinstance(drop, AdapterDropout) and draws
    address = draws.factors(drop, 8, x.device).data_ptr()
    for seed in (3, 4, 3):
        draws.draw(seed)
        one = model.linear(x)
        model.linear(x[:5])  # other rows have their own draws
        assert torch.equal(model.linear(x), one)
        seen.append(one)
    assert torch.equal(seen[0], seen[2]) and not torch.equal(seen[0], seen[1])
    assert draws.factors(drop, 8, x.device).data_ptr() == address
    late = DropoutDraws(model.modules())  # with rows from the middle of a pass
    late.draw(3)
    assert torch.equal(model.linear(x), seen[0])


@pytest.mark.parametrize("drawn_between", [False, True])
def test_a_recomputed_layer_drops_the_same_ranks_again(drawn_between: bool) -> None:
    """``drawn_between``, the control: others are drawn before recomputation."""
    model = dropping(0.5, 0.2)
    with torch.no_grad():
        model.linear.lora_B["default"].weight.normal_()
    x, found, between = torch.randn(8, 64, 4), [], nn.Linear(6, 4)
    draws, recomputing = DropoutDraws(model.modules()), LoadedModel({"model": model}, torch.float32, x.device)
    for run in (None, Recomputing(recomputing)):
        draws.draw(3)
        y = x
        for block in (model.linear, between, model.linear):
            y = block(y) if run is None else run(block, y)
        if drawn_between and run is not None:
            draws.draw(4)
        found.append(torch.autograd.grad(y.square().sum(), model.linear.lora_A["default"].weight)[0])
    assert torch.equal(*found) is not drawn_between
