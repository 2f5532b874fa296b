"""A fused UNet is the UNet that it was: outputs, gradients, names, switches; and it is fused where it can be."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import Attention
from diffusers.models.unets.unet_2d_blocks import CrossAttnUpBlock2D, UpBlock2D
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import lora_rocm
from lora_rocm.device.placement.base import Resident
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.families.base import LoadedModel
from lora_rocm.families.common.recompute import Recomputing
from lora_rocm.families.common.unet.fused_unet import (
    FusedGEGLU,
    FusedResnet,
    FusedTransformer,
    FusedUNetBlock,
    fuse,
    merge_projections,
)
from lora_rocm.families.common.unet.lora_file_names import UNET_TARGETS
from lora_rocm.kernels.frozen_conv import FrozenConv2d
from lora_rocm.kernels.lora_layer import LoraLinear, with_lean_layers

FOLDER = Path(lora_rocm.__file__).parent / "builtin" / "tiny_sdxl" / "unet"
FEWER_LAYERS = {  # of the tiny model: two levels, the lower one with attention
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (48, 80),
    "attention_head_dim": (3, 5),
    "layers_per_block": 1,
}
CPU = torch.device("cpu")
ROUNDING = 1e-5


def make(
    preset: str = "attention", lean: bool = True, depth: int = 1, linear: bool = True, **how: Any
) -> UNet2DConditionModel:
    unet: UNet2DConditionModel = pickle.loads(made(preset, lean, depth, linear, json.dumps(how)))
    return unet


@cache
def made(preset: str, lean: bool, depth: int, linear: bool, how: str) -> bytes:
    """A UNet with an adapter, pickled: reading it takes a small part of the time that making takes. ``how`` as JSON."""
    torch.manual_seed(0)
    shape = {"transformer_layers_per_block": [1, depth], "use_linear_projection": linear}
    config = UNet2DConditionModel.load_config(FOLDER) | FEWER_LAYERS | shape
    unet = UNet2DConditionModel.from_config(config).requires_grad_(False).eval()
    paths = [path for path, _ in unet.named_modules() if re.fullmatch(UNET_TARGETS[preset], path)]
    given = {"r": 4, "lora_alpha": 2, "target_modules": "|".join(map(re.escape, paths)), **json.loads(how)}
    config = LoraConfig(**given)
    inject_adapter_in_model(with_lean_layers(config) if lean else config, unet)
    for parameter in unet.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter) * 0.2
    return pickle.dumps(unet)


def run(unet: UNet2DConditionModel) -> tuple[Tensor, Tensor]:
    """(output, gradient of the adapter as one vector)."""
    rng = torch.Generator().manual_seed(1)
    text, pooled = torch.randn(2, 7, 160, generator=rng), torch.randn(2, 96, generator=rng)
    conditions = {"text_embeds": pooled, "time_ids": torch.zeros(2, 6)}
    latents = torch.randn(2, 4, 8, 12, generator=rng)
    output = unet(latents, torch.tensor([3, 500]), text, added_cond_kwargs=conditions, return_dict=False)[0]
    unet.zero_grad()
    output.square().mean().backward()
    adapter = [p for p in unet.parameters() if p.requires_grad]
    flat = torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in adapter])
    return output.detach(), flat


def off(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))


def layers(unet: nn.Module) -> Iterator[LoraLinear]:
    return (module for module in unet.modules() if isinstance(module, LoraLinear))


@pytest.fixture(scope="module")
def plain() -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    yield {preset: run(make(preset, lean=False)) for preset in UNET_TARGETS}
    made.cache_clear()


@pytest.mark.parametrize(
    ("preset", "channels_last"),
    [*((preset, False) for preset in UNET_TARGETS), ("attention-mlp-conv", True)],
)
def test_output_and_gradients_are_those_of_the_plain_unet(
    preset: str, channels_last: bool, plain: dict[str, tuple[Tensor, Tensor]]
) -> None:
    unet = make(preset)
    fuse(unet, "eager", channels_last)
    assert off(run(unet), plain[preset]) < ROUNDING


@pytest.mark.parametrize("preset", ["attention", "attention-mlp-conv"])
def test_projections_that_are_convolutions(preset: str) -> None:
    """As in SD 1.5: frozen, and with a LoRA."""
    unet = make(preset, linear=False)
    fuse(unet, "eager", channels_last=True)
    projection = unet.mid_block.attentions[0].proj_in
    assert hasattr(projection, "lora_A") is (preset == "attention-mlp-conv")
    assert off(run(unet), run(make(preset, lean=False, linear=False))) < ROUNDING


def test_several_blocks_in_a_row() -> None:
    unet = make("attention-mlp-conv", depth=2)
    fuse(unet, "eager")
    wanted = run(make("attention-mlp-conv", lean=False, depth=2))
    assert off(run(unet), wanted) < ROUNDING
    unet.enable_gradient_checkpointing(Recomputing(LoadedModel({"unet": unet}, torch.float32, CPU)))
    assert off(run(unet.train()), wanted) < ROUNDING


def test_a_wrong_kernel_would_be_seen(plain: dict[str, tuple[Tensor, Tensor]]) -> None:
    unet = make()
    fuse(unet, "eager")
    next(layers(unet)).scaling["default"] *= 1.01
    assert off(run(unet), plain["attention"]) > ROUNDING


def test_names_parameters_and_bytes_stay() -> None:
    unet, before = make("attention-mlp-conv"), make("attention-mlp-conv")
    parameters = {name: id(p) for name, p in unet.named_parameters()}
    for _ in range(2):
        fuse(unet, "eager")
        assert {name: id(p) for name, p in unet.named_parameters()} == parameters
        assert [name for name, _ in unet.named_modules()] == [name for name, _ in before.named_modules()]
        assert list(unet.state_dict()) == list(before.state_dict())
    found = unet.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in before.state_dict().items())
    kinds = [type(module) for module in unet.modules()]
    assert all(kind in kinds for kind in (FusedUNetBlock, FusedGEGLU, FusedResnet, FusedTransformer))


def test_the_guard_still_sees_a_merged_weight() -> None:
    unet = make()
    door = Resident(DeviceTransfer(torch.device("cpu"), pin=False))
    door.place(unet, "unet")
    fuse(unet, "eager", channels_last=True)
    assert door.changed() == []
    attention = unet.mid_block.attentions[0].transformer_blocks[0].attn1
    attention.processor.merged.weight_OI[-1, -1] += 1  # the last row of to_v
    assert door.changed() == ["unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_v.base_layer.weight"]


def switch_off(unet: nn.Module) -> None:
    for module in unet.modules():
        if hasattr(module, "enable_adapters") and hasattr(module, "lora_A"):
            module.enable_adapters(False)


def set_strength(unet: nn.Module) -> None:
    for module in unet.modules():
        if hasattr(module, "set_scale") and hasattr(module, "lora_A"):
            module.set_scale("default", 0.25)


def one_off(unet: nn.Module) -> None:
    unet.get_submodule("mid_block.attentions.0.transformer_blocks.0.attn1.to_k").enable_adapters(False)


def merge(unet: nn.Module) -> None:
    unet.get_submodule("mid_block.attentions.0.transformer_blocks.0.attn1.to_q").merge()


def other_weight(unet: nn.Module) -> None:
    layer = unet.get_submodule("mid_block.attentions.0.transformer_blocks.0.attn1.to_q")
    layer.base_layer.weight.data = layer.base_layer.weight.data * 2


@pytest.mark.parametrize(
    "change",
    [switch_off, *(pytest.param(one, marks=pytest.mark.slow) for one in (set_strength, one_off, merge)), other_weight],
)
def test_switches_work_as_on_the_plain_unet(change: Callable[[nn.Module], None]) -> None:
    unet, reference = make(), make(lean=False)
    untouched = run(reference)
    fuse(unet, "eager")
    for each in (unet, reference):
        change(each)
        if change is switch_off:
            next(p for p in each.parameters()).requires_grad_(True)  # something to differentiate
    assert off(run(unet)[:1], run(reference)[:1]) < ROUNDING
    if change is not merge:  # which is not meant to be seen
        assert off(run(reference)[:1], untouched[:1]) > ROUNDING


@pytest.mark.parametrize("how", [{"use_dora": True}, {"use_rslora": True}])
def test_other_kinds_of_adapter(how: dict[str, bool]) -> None:
    unet = make(**how)
    fuse(unet, "eager")
    assert off(run(unet), run(make(lean=False, **how))) < ROUNDING


def test_dora_on_convolutions_in_channels_last() -> None:
    unet = make("attention-mlp-conv", use_dora=True)
    fuse(unet, "eager", channels_last=True)
    assert off(run(unet), run(make("attention-mlp-conv", lean=False, use_dora=True))) < ROUNDING


def test_dropout_drops_in_training_and_not_else() -> None:
    unet = make(lora_dropout=0.5)
    fuse(unet, "eager")
    assert off(run(unet), run(make(lean=False, lora_dropout=0.5))) < ROUNDING
    for layer in layers(unet):
        layer.train()
    assert off(run(unet)[:1], run(unet)[:1]) > ROUNDING


def test_autocast_goes_the_plain_way() -> None:
    unet, reference = make(), make(lean=False)
    for module in unet.modules():
        if isinstance(module, Attention):
            merge_projections(module)
    with torch.autocast("cpu", torch.bfloat16):
        assert off(run(unet)[:1], run(reference)[:1]) < ROUNDING


@pytest.mark.parametrize("channels_last", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_checkpointing_gives_the_same(channels_last: bool, plain: dict[str, tuple[Tensor, Tensor]]) -> None:
    unet = make()
    fuse(unet, "eager", channels_last)
    unet.enable_gradient_checkpointing()
    unet.train()
    assert off(run(unet), plain["attention"]) < ROUNDING


def kept_bytes(unet: UNet2DConditionModel) -> int:
    """Bytes that the pass keeps for its backward, each piece of memory counted once, without weights."""
    weights = {p.untyped_storage().data_ptr() for p in unet.parameters()}
    pieces: dict[int, int] = {}
    held: list[Tensor] = []  # so that no place is taken twice

    def pack(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in weights:
            pieces[memory.data_ptr()] = memory.nbytes()
            held.append(tensor.detach())
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run(unet)
    return sum(pieces.values())


@pytest.mark.slow
@pytest.mark.parametrize("channels_last", [False, True])
def test_neighbours_computed_again_together_give_the_same_and_keep_less(channels_last: bool) -> None:
    wanted, kept = run(make(lean=False, depth=4)), []
    for together in (False, True):
        unet = make(depth=4).train()
        fuse(unet, "eager", channels_last)
        unet.enable_gradient_checkpointing(Recomputing(LoadedModel({"unet": unet}, torch.float32, CPU), None, together))
        assert off(run(unet), wanted) < ROUNDING
        kept.append(kept_bytes(unet))
    assert kept[1] < 0.95 * kept[0]


def test_what_frozen_convolutions_were_given_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    for frozen in (False, True):
        unet = make()
        if not frozen:
            monkeypatch.setattr(FrozenConv2d, "fits", lambda module: False)
        fuse(unet, "eager")
        monkeypatch.undo()
        kept.append(kept_bytes(unet))
    assert kept[1] < 0.95 * kept[0]


def test_skips_are_joined_where_recomputing_forgets_them() -> None:
    kept = []
    for joined_within in (False, True):
        unet = make().train()
        fuse(unet, "eager")
        if not joined_within:
            for block in unet.up_blocks:
                block.__class__ = CrossAttnUpBlock2D if hasattr(block, "attentions") else UpBlock2D
        unet.enable_gradient_checkpointing(Recomputing(LoadedModel({"unet": unet}, torch.float32, CPU)))
        kept.append(kept_bytes(unet))
    assert kept[1] < 0.95 * kept[0]


def test_free_u_goes_diffusers_way(plain: dict[str, tuple[Tensor, Tensor]]) -> None:
    unet, reference = make(), make(lean=False)
    fuse(unet, "eager")
    for each in (unet, reference):
        each.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    assert off(run(unet), run(reference)) < ROUNDING < off(run(reference)[:1], plain["attention"][:1])


def test_there_is_less_to_launch() -> None:
    class Count(TorchDispatchMode):
        launches = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.launches += not func.is_view
            return func(*args, **(kwargs or {}))

    counted = []
    for fused in (False, True):
        unet = make(lean=fused)
        if fused:
            fuse(unet, "eager")
        with Count() as count:
            run(unet)
        counted.append(count.launches)
    assert counted[1] < 0.8 * counted[0]
