"""Names, on SDXL's published config: against lists built from the sgm layout, and against diffusers' own converter."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from accelerate import init_empty_weights
from diffusers import UNet2DConditionModel
from diffusers.loaders.lora_conversion_utils import (
    _convert_non_diffusers_lora_to_diffusers,
    _maybe_map_sgm_blocks_to_diffusers,
)
from diffusers.utils.state_dict_utils import convert_unet_state_dict_to_peft
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from lora_rocm.families.common.unet import lora_file_names
from lora_rocm.families.sdxl.family import LAYOUT, Sdxl
from lora_rocm.model_files.config_file import Config
from tests.tiny_models import tiny_pipeline, tiny_recipe
from tests.wording import saying

CONFIG = Config(UNet2DConditionModel.load_config(LAYOUT.configs / "unet"), LAYOUT.configs / "unet")
PUBLISHED_PARAMETERS = {
    "unet": 2_567_463_684,
    "text_encoder": 123_060_480,
    "text_encoder_2": 694_659_840,
    "vae": 83_653_863,
}

# sgm: block number -> (channels, transformer depth); from the original sd_xl_base.yaml: channel_mult 1 2 4,
# num_res_blocks 2, attention_resolutions 4 2, transformer_depth 1 2 10
ATTENTIONS = {
    **{f"input_blocks_{n}_1": (640, 2) for n in (4, 5)},
    **{f"input_blocks_{n}_1": (1280, 10) for n in (7, 8)},
    "middle_block_1": (1280, 10),
    **{f"output_blocks_{n}_1": (1280, 10) for n in (0, 1, 2)},
    **{f"output_blocks_{n}_1": (640, 2) for n in (3, 4, 5)},
}
# sgm: resnets (input channels, output channels)
RESNETS = {
    "input_blocks_1_0": (320, 320),
    "input_blocks_2_0": (320, 320),
    "input_blocks_4_0": (320, 640),
    "input_blocks_5_0": (640, 640),
    "input_blocks_7_0": (640, 1280),
    "input_blocks_8_0": (1280, 1280),
    "middle_block_0": (1280, 1280),
    "middle_block_2": (1280, 1280),
    "output_blocks_0_0": (2560, 1280),
    "output_blocks_1_0": (2560, 1280),
    "output_blocks_2_0": (1920, 1280),
    "output_blocks_3_0": (1920, 640),
    "output_blocks_4_0": (1280, 640),
    "output_blocks_5_0": (960, 640),
    "output_blocks_6_0": (960, 320),
    "output_blocks_7_0": (640, 320),
    "output_blocks_8_0": (640, 320),
}
SAMPLERS = {
    "input_blocks_3_0_op": 320,
    "input_blocks_6_0_op": 640,
    "output_blocks_2_2_conv": 1280,
    "output_blocks_5_2_conv": 640,
}
Shapes = dict[str, tuple[int, ...]]


def expected_attention_keys() -> Shapes:
    """The names of kohya's default targets in the sgm layout, with the shapes of the weights."""
    keys: Shapes = {}
    for block, (width, depth) in ATTENTIONS.items():
        keys[f"lora_unet_{block}_proj_in"] = keys[f"lora_unet_{block}_proj_out"] = (width, width)
        for layer in range(depth):
            name = f"lora_unet_{block}_transformer_blocks_{layer}"
            for attention, context in (("attn1", width), ("attn2", 2048)):
                keys[f"{name}_{attention}_to_q"] = keys[f"{name}_{attention}_to_out_0"] = (width, width)
                keys[f"{name}_{attention}_to_k"] = keys[f"{name}_{attention}_to_v"] = (width, context)
            keys[f"{name}_ff_net_0_proj"] = (8 * width, width)
            keys[f"{name}_ff_net_2"] = (width, 4 * width)
    return keys


def expected_conv_keys() -> Shapes:
    keys: Shapes = {}
    for block, (before, after) in RESNETS.items():
        keys[f"lora_unet_{block}_in_layers_2"] = (after, before, 3, 3)
        keys[f"lora_unet_{block}_out_layers_3"] = (after, after, 3, 3)
        keys[f"lora_unet_{block}_emb_layers_1"] = (after, 1280)
        if before != after:
            keys[f"lora_unet_{block}_skip_connection"] = (after, before, 1, 1)
    return keys | {f"lora_unet_{name}": (width, width, 3, 3) for name, width in SAMPLERS.items()}


@lru_cache(maxsize=1)
def real_unet() -> nn.Module:
    with init_empty_weights():
        return UNet2DConditionModel.from_config(CONFIG.values)


def kohya_shapes(preset: str) -> Shapes:
    pattern = lora_file_names.UNET_TARGETS[preset]
    return {
        lora_file_names.kohya_key("unet", name, CONFIG): tuple(module.weight.shape)
        for name, module in real_unet().named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d) and re.fullmatch(pattern, name)
    }


def test_the_packaged_configs_are_the_published_model() -> None:
    from lora_rocm.base_models.loading import BaseSource

    source = BaseSource("published", LAYOUT, LAYOUT.configs, None)
    counts = {name: sum(p.numel() for p in source.skeleton(name).parameters()) for name in LAYOUT.parts}
    assert counts == PUBLISHED_PARAMETERS


def test_every_key_of_the_default_preset() -> None:
    found = kohya_shapes("attention-mlp")
    assert found == expected_attention_keys()
    assert len(found) == 722


def test_every_key_of_the_attention_preset() -> None:
    found = kohya_shapes("attention")
    assert found == {name: shape for name, shape in expected_attention_keys().items() if "attn" in name}
    assert len(found) == 560


def test_every_key_of_the_conv_preset() -> None:
    assert kohya_shapes("attention-mlp-conv") == expected_attention_keys() | expected_conv_keys()


def test_every_matched_module_is_a_linear_or_a_convolution() -> None:
    for pattern in lora_file_names.UNET_TARGETS.values():
        for name, module in real_unet().named_modules():
            assert not re.fullmatch(pattern, name) or isinstance(module, nn.Linear | nn.Conv2d), name


@pytest.mark.parametrize(("component", "prefix", "layers", "cls"), [
    ("text_encoder", "lora_te1", 12, CLIPTextModel),
    ("text_encoder_2", "lora_te2", 32, CLIPTextModelWithProjection),
])  # fmt: skip
def test_every_key_of_the_text_encoders(component: str, prefix: str, layers: int, cls: type[nn.Module]) -> None:
    with init_empty_weights():
        model = cls(CLIPTextConfig.from_pretrained(LAYOUT.configs / component))
    found = {
        lora_file_names.kohya_key(component, name, CONFIG)
        for name, _ in model.named_modules()
        if re.fullmatch(lora_file_names.TEXT, name)
    }
    parts = ("self_attn_q_proj", "self_attn_k_proj", "self_attn_v_proj", "self_attn_out_proj", "mlp_fc1", "mlp_fc2")
    expected = {f"{prefix}_text_model_encoder_layers_{n}_{part}" for n in range(layers) for part in parts}
    assert found == expected
    assert len(found) == 6 * layers  # 72 and 192


def test_both_levels_of_transformers_give_one_key() -> None:
    short, long = "encoder.layers.0.mlp.fc1", "text_model.encoder.layers.0.mlp.fc1"
    for name in (short, long):
        assert re.fullmatch(lora_file_names.TEXT, name)
        assert lora_file_names.kohya_key("text_encoder", name, CONFIG) == "lora_te1_text_model_encoder_layers_0_mlp_fc1"


@pytest.mark.parametrize("preset", list(lora_file_names.UNET_TARGETS))
def test_diffusers_converts_every_key_back(preset: str) -> None:
    """Its sgm mapping and converter take all names, leave none over, and find the modules we started from."""
    shapes = kohya_shapes(preset)
    state = {}
    for key in shapes:
        state |= {f"{key}.lora_down.weight": torch.zeros(1, 1), f"{key}.lora_up.weight": torch.zeros(1, 1)}
        state[f"{key}.alpha"] = torch.tensor(1.0)
    mapped = _maybe_map_sgm_blocks_to_diffusers(state, real_unet().config)
    converted, alphas = _convert_non_diffusers_lora_to_diffusers(mapped)
    names = {name.removeprefix("unet.") for name in convert_unet_state_dict_to_peft(converted)}
    pattern = lora_file_names.UNET_TARGETS[preset]
    modules = [
        name
        for name, module in real_unet().named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d) and re.fullmatch(pattern, name)
    ]
    assert names == {f"{name}.lora_{side}.weight" for name in modules for side in "AB"}
    assert len(alphas) == len(shapes)


def test_every_weight_of_the_unet_has_its_original_name() -> None:
    """Against the layout of the one-file checkpoint, over all modules and not only those that are adapted."""
    from tests.tiny_models import _sgm_unet

    unet = tiny_pipeline().unet
    original = _sgm_unet(
        {f"{name}.weight": torch.zeros(()) for name, m in unet.named_modules() if hasattr(m, "weight")}
    )
    linear = [name for name, module in unet.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    config = Config(json.loads(unet.to_json_string()), Path("config.json"))
    assert {lora_file_names.sgm_name(name, config) + ".weight" for name in linear} <= original.keys()
    assert len(linear) > 150


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(ValueError, check=saying("families/not-a-module")):
        lora_file_names.sgm_name("transformer.blocks.0", CONFIG)


def test_presets_cover_unet_and_text_encoders() -> None:
    assert {frozenset(targets) for targets in Sdxl(tiny_recipe("any")).lora_targets.values()} == {
        frozenset({"unet", "text_encoder", "text_encoder_2"})
    }
    assert Path(LAYOUT.configs).is_dir()
