"""Fused transformers are the transformers that they were: outputs, gradients, names; and they keep less."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from diffusers import CosmosTransformer3DModel, FluxTransformer2DModel, ZImageTransformer2DModel
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from lora_rocm.families.common.dit.blocks import cosmos, flux, z_image
from lora_rocm.kernels.lora_layer import LoraLinear, with_lean_layers
from lora_rocm.kernels.quantised import quantised
from lora_rocm.kernels.weight_format import dense_weight

ATTENTION = r".*\.(to_q|to_k|to_v|to_out\.0|add_[qkv]_proj|to_add_out)"
ALL = r".*(layers|refiner|blocks)\..*"
ROUNDING = 1e-5


def make_z_image() -> nn.Module:
    sizes = {"dim": 32, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 12}
    model: nn.Module = ZImageTransformer2DModel(in_channels=4, axes_dims=[4, 6, 6], axes_lens=[128, 16, 16], **sizes)
    return model


def run_z_image(model: Any, dtype: torch.dtype, rng: torch.Generator, lengths: tuple[int, int] = (9, 9)) -> Tensor:
    images = [torch.randn(4, 1, 8, 8, generator=rng).to(dtype) for _ in lengths]
    texts = [torch.randn(length, 12, generator=rng).to(dtype) for length in lengths]
    return torch.stack(model(images, torch.tensor([0.3, 0.6], dtype=dtype), texts, return_dict=False)[0])


def make_flux() -> nn.Module:
    sizes = {"num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2}
    sizes |= {"in_channels": 4, "joint_attention_dim": 12, "pooled_projection_dim": 8}
    model: nn.Module = FluxTransformer2DModel(axes_dims_rope=(4, 6, 6), **sizes)
    return model


def run_flux(model: Any, dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    image, text = torch.randn(2, 6, 4, generator=rng).to(dtype), torch.randn(2, 5, 12, generator=rng).to(dtype)
    pooled, places = torch.randn(2, 8, generator=rng).to(dtype), torch.arange(18).view(6, 3).float()
    output: Tensor = model(
        image, text, pooled, torch.tensor([0.3, 0.6], dtype=dtype), places, torch.zeros(5, 3), return_dict=False
    )[0]
    return output


def make_cosmos() -> nn.Module:
    sizes = {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
    sizes |= {"mlp_ratio": 2.0, "text_embed_dim": 12, "adaln_lora_dim": 4, "extra_pos_embed_type": None}
    model: nn.Module = CosmosTransformer3DModel(max_size=(4, 16, 16), concat_padding_mask=False, **sizes)
    return model


def run_cosmos(model: Any, dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    image, text = torch.randn(2, 4, 1, 8, 12, generator=rng).to(dtype), torch.randn(2, 7, 12, generator=rng).to(dtype)
    output: Tensor = model(image, torch.tensor([0.3, 0.6], dtype=dtype), text, return_dict=False)[0]
    return output


@dataclass(frozen=True)
class Fused:
    make: Callable[[], nn.Module]
    run: Callable[..., Tensor]
    fuse: Callable[..., None]


FAMILIES = {
    "z_image": Fused(make_z_image, run_z_image, z_image.fuse),
    "flux": Fused(make_flux, run_flux, flux.fuse),
    "cosmos": Fused(make_cosmos, run_cosmos, cosmos.fuse),
}
families = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def adapted(family: Fused, targets: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Module.to(pickle.loads(made(family, targets)), dtype)


@cache
def made(family: Fused, targets: str) -> bytes:
    """A model with an adapter, pickled: reading it takes a small part of the time that making takes."""
    torch.manual_seed(0)
    model = family.make().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.5))
    linear = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    paths = [path for path in linear if re.fullmatch(targets, path)]
    inject_adapter_in_model(with_lean_layers(LoraConfig(r=4, lora_alpha=2, target_modules=paths)), model)
    assert len(paths) == sum(isinstance(module, LoraLinear) for module in model.modules())
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter) * 0.2
    return pickle.dumps(model)


def outcome(family: Fused, model: nn.Module, dtype: torch.dtype, **given: Any) -> tuple[Tensor, Tensor]:
    """(output, gradient of the adapter as one vector), in float32."""
    output = family.run(model, dtype, torch.Generator().manual_seed(1), **given)
    model.zero_grad()
    scale = 256.0 if dtype is torch.float16 else 1.0  # as in training
    (output.float().square().mean() * scale).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    flat = torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten().float() / scale for p in trained])
    return output.detach().float(), flat


def far(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> float:
    return max(float((one - other).norm() / other.norm()) for one, other in zip(found, wanted, strict=True))


@families
@pytest.mark.parametrize("targets", [ATTENTION, ALL], ids=["attention", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_and_gradients_are_those_of_diffusers(family: Fused, targets: str, dtype: torch.dtype) -> None:
    model = adapted(family, targets)
    names = {name: p.shape for name, p in model.named_parameters()}
    wanted = outcome(family, model, torch.float32)
    model = adapted(family, targets, dtype)
    rounding = far(outcome(family, model, dtype), wanted)
    family.fuse(model, "eager")
    assert {name: p.shape for name, p in model.named_parameters()} == names
    assert far(outcome(family, model, dtype), wanted) <= max(1.2 * rounding, ROUNDING)


def stored(model: nn.Module, name: str, packed: bool) -> nn.Module:
    """The model with the frozen layers of its blocks in a format, or with the dense weights that this format means."""
    weight_format = quantised(name, r"(layers|refiner|blocks)\.")
    for path, layer in weight_format.chosen(model).items():
        if not layer.weight.requires_grad:
            found = weight_format.packed(layer)
            if packed:
                model.set_submodule(path, found)
            else:
                layer.weight.data = dense_weight(found)
    return model


QUICK = {("int8", ALL), ("nf4", ATTENTION)}
PACKED = [
    pytest.param(name, targets, id=f"{name}-{kind}", marks=() if (name, targets) in QUICK else pytest.mark.slow)
    for name in ("int8", "fp8", "nf4")
    for kind, targets in (("attention", ATTENTION), ("all", ALL))
]


@families
@pytest.mark.parametrize(("name", "targets"), PACKED)
def test_on_a_packed_base_they_are_those_of_diffusers_on_its_dense_weights(
    family: Fused, name: str, targets: str
) -> None:
    exact = outcome(family, adapted(family, targets), torch.float32)
    wanted = outcome(family, stored(adapted(family, targets), name, packed=False), torch.float32)
    model = stored(adapted(family, targets), name, packed=True)
    assert far(outcome(family, model, torch.float32), wanted) <= ROUNDING
    family.fuse(model, "eager")
    assert far(outcome(family, model, torch.float32), wanted) <= ROUNDING
    assert far(exact, wanted) > 100 * ROUNDING, "the control: another base"


GATES = {
    "flux": {"norm1.linear.weight": (2, 5), "norm1_context.linear.weight": (2, 5), ".norm.linear.weight": (2,)},
    "cosmos": {"t_embedder.linear_2.weight": (2,)},
}
"""Ending of a layer's name -> which of its outputs, counted in widths of the model, are the gates of branches."""
BRANCHES = ("to_out.0.base_layer.weight", "ff.net.2.weight", "ff_context.net.2.weight", "proj_out.weight")


def with_large_branches(name: str, dtype: torch.dtype) -> nn.Module:
    model = adapted(FAMILIES[name], ATTENTION)
    for path, parameter in model.named_parameters():
        if path.endswith(BRANCHES) and "blocks" in path:
            parameter.data *= 100
        for ending, places in GATES[name].items():
            for place in places if path.endswith(ending) else ():
                parameter.data[32 * place : 32 * (place + 1)] *= 30
    return nn.Module.to(model, dtype)


def largest_sum(family: Fused, model: nn.Module) -> float:
    """The largest number that a block gives."""
    found = [0.0]

    def note(block: nn.Module, given: Any, output: Any) -> None:
        found.extend(float(each.detach().abs().max()) for each in (output if isinstance(output, tuple) else (output,)))

    hooks = [each.register_forward_hook(note) for each in model.modules() if type(each).__name__.endswith("Block")]
    outcome(family, model, torch.float32)
    for hook in hooks:
        hook.remove()
    return max(found)


@pytest.mark.parametrize("name", GATES)
def test_in_float16_residual_sums_beyond_its_range_are_right(name: str) -> None:
    """As near as float16 is without such sums, and nearer than bfloat16. diffusers' blocks overflow: the control."""
    family, half = FAMILIES[name], torch.float16
    model = with_large_branches(name, torch.float32)
    assert largest_sum(family, model) > 2 * torch.finfo(half).max
    wanted = outcome(family, model, torch.float32)
    plain, library = adapted(family, ATTENTION, half), with_large_branches(name, half)
    rounding = far(outcome(family, plain, half), outcome(family, adapted(family, ATTENTION), torch.float32))
    assert not far(outcome(family, library, half), wanted) < 0.1
    family.fuse(library, "eager")
    off = far(outcome(family, library, half), wanted)
    other = with_large_branches(name, torch.bfloat16)
    family.fuse(other, "eager")
    assert off < 2 * rounding < 0.02 and 2 * off < far(outcome(family, other, torch.bfloat16), wanted)


@families
def test_a_changed_norm_is_noticed(family: Fused) -> None:
    wanted = outcome(family, adapted(family, ATTENTION), torch.float32)
    model = adapted(family, ATTENTION)
    family.fuse(model, "eager")
    for name, parameter in model.named_parameters():
        if "norm_q" in name:
            parameter.data *= -1
    assert far(outcome(family, model, torch.float32), wanted) > 1e-2


def test_texts_of_different_length_are_masked() -> None:
    family, lengths = FAMILIES["z_image"], (9, 40)
    wanted = outcome(family, adapted(family, ATTENTION), torch.float32, lengths=lengths)
    model = adapted(family, ATTENTION)
    family.fuse(model, "eager")
    assert far(outcome(family, model, torch.float32, lengths=lengths), wanted) <= ROUNDING


@families
@pytest.mark.parametrize("targets", [ATTENTION, ALL], ids=["attention", "all"])
def test_a_fused_model_keeps_less(family: Fused, targets: str) -> None:
    def kept_bytes(fused: bool) -> int:
        model = adapted(family, targets, torch.bfloat16)
        if fused:
            family.fuse(model, "eager")
        weights = {parameter.data_ptr() for parameter in model.parameters()}
        kept: dict[int, int] = {}
        with saved_tensors_hooks(lambda t: kept.update({t.untyped_storage().data_ptr(): t.nbytes}) or t, lambda t: t):
            family.run(model, torch.bfloat16, torch.Generator().manual_seed(1))
        return sum(size for at, size in kept.items() if at not in weights)

    assert kept_bytes(fused=True) < 0.9 * kept_bytes(fused=False)


@families
def test_without_a_plain_lora_the_layers_are_called_one_by_one(family: Fused) -> None:
    model = adapted(family, ATTENTION)
    family.fuse(model, "eager")
    wanted = outcome(family, model, torch.float32)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.ndim == 2 and not module.weight.requires_grad:
            module.weight.data = module.weight.data.clone()  # as offloading replaces weights
    assert far(outcome(family, model, torch.float32), wanted) <= ROUNDING


class Joins(TorchDispatchMode):
    """Counts tensors [B, S, D] that are joined from two."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.cat.default and args[0][0].ndim == 3
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad", [True, False])
def test_text_and_image_of_flux_are_joined_once(grad: bool) -> None:
    model = adapted(FAMILIES["flux"], ATTENTION)
    flux.fuse(model, "eager")
    single: Any = model.single_transformer_blocks
    text, image, temb = torch.randn(1, 5, 32, requires_grad=True), torch.randn(1, 6, 32), torch.randn(1, 32)
    turns = (torch.ones(11, 16), torch.zeros(11, 16))
    with torch.set_grad_enabled(grad), Joins() as joins:
        parts = single[0](image, text, temb, turns)
        found = torch.cat(single[1](parts[1], parts[0], temb, turns), dim=1)
        assert joins.count == 2
        again = single[0](image, text, temb, turns)
        copied = torch.cat(single[1](again[1].clone(), again[0], temb, turns), dim=1)
        turned = torch.cat(single[1](parts[0], parts[1], temb, turns), dim=1)
        assert joins.count == 7, "the control: tensors of their own, and the other order"
    torch.testing.assert_close(found, copied)
    assert not torch.allclose(found[:, :6], turned[:, :6])
    if grad:
        wanted, *given = (torch.autograd.grad(each.sum(), text)[0] for each in (found, copied))
        torch.testing.assert_close(given[0], wanted)
