"""Every model and component is recognised as itself and as nothing else, from names and shapes of its tensors.

The models have their published widths and one or two layers, on the meta device.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import diffusers
import pytest
import transformers
from accelerate import init_empty_weights

from lora_rocm.families.registry import FAMILIES, RESERVED
from lora_rocm.model_files import models
from lora_rocm.model_files.models import (
    OTHER,
    PARTS,
    RecognisedModel,
    Shapes,
    is_of_class,
    model_of,
    models_in,
    pipeline_of,
)
from lora_rocm.model_files.recognise_adapter import foreign_name, origin_of

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")  # diffusers' own
ENCODER_BLOCKS: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
}
UNET: dict[str, Any] = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("UpBlock2D",) * 2,
}
SMALL_UNET: dict[str, Any] = {**UNET, "block_out_channels": (32, 64), "layers_per_block": 1}
SD3: dict[str, Any] = {"pos_embed_max_size": 8, "num_layers": 2, "attention_head_dim": 64, "joint_attention_dim": 4096}
FLUX: dict[str, Any] = {"num_layers": 1, "num_single_layers": 1}
WAN: dict[str, Any] = {"num_layers": 1}
ANIMA: dict[str, Any] = {
    "num_attention_heads": 16,
    "num_layers": 1,
    "text_embed_dim": 1024,
    "adaln_lora_dim": 256,
    "extra_pos_embed_type": None,
}
KREA: dict[str, Any] = {"num_layers": 1, "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1}
WAN_22_VAE: dict[str, Any] = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}
DIFFUSERS: list[tuple[str, dict[str, Any], str, str]] = [
    ("UNet2DConditionModel", {**SMALL_UNET, "cross_attention_dim": 768}, "sd15", "Stable Diffusion 1.x"),
    ("UNet2DConditionModel", {**SMALL_UNET, "cross_attention_dim": 1024}, "sd2", "Stable Diffusion 2.x"),
    ("UNet2DConditionModel", {**SMALL_UNET, "cross_attention_dim": 2048}, "sdxl", "SDXL"),
    (
        "SD3Transformer2DModel",
        {**SD3, "num_attention_heads": 24, "caption_projection_dim": 1536, "dual_attention_layers": (0,)},
        "sd3",
        "3.5 medium",
    ),
    ("SD3Transformer2DModel", {**SD3, "num_attention_heads": 38, "caption_projection_dim": 2432}, "sd3", "3.5 large"),
    ("FluxTransformer2DModel", {**FLUX, "guidance_embeds": True}, "flux", "dev"),
    ("FluxTransformer2DModel", FLUX, "flux", "schnell"),
    ("FluxTransformer2DModel", {**FLUX, "in_channels": 384, "guidance_embeds": True}, OTHER, "Fill"),
    ("FluxTransformer2DModel", {**FLUX, "in_channels": 128, "guidance_embeds": True}, OTHER, "Depth or Canny"),
    ("ChromaTransformer2DModel", FLUX, "chroma", "Chroma"),
    ("Flux2Transformer2DModel", {**FLUX, "num_attention_heads": 48}, "flux2", "dev"),
    ("Flux2Transformer2DModel", {**FLUX, "num_attention_heads": 24, "guidance_embeds": False}, "flux2", "klein 4B"),
    ("Flux2Transformer2DModel", {**FLUX, "num_attention_heads": 32, "guidance_embeds": False}, "flux2", "klein 9B"),
    ("QwenImageTransformer2DModel", {"num_layers": 1}, "qwen-image", "Qwen-Image"),
    ("ZImageTransformer2DModel", {"n_layers": 1, "n_refiner_layers": 1}, "z-image", "Z-Image"),
    ("WanTransformer3DModel", WAN, "wan", "14B"),
    ("WanTransformer3DModel", {**WAN, "num_attention_heads": 12}, "wan", "1.3B"),
    ("WanTransformer3DModel", {**WAN, "in_channels": 36}, "wan", "2.2 image-to-video"),
    ("WanTransformer3DModel", {**WAN, "in_channels": 36, "image_dim": 1280}, "wan", "2.1 image-to-video"),
    ("WanTransformer3DModel", {**WAN, "in_channels": 48, "num_attention_heads": 24}, "wan", "2.2 5B"),
    ("LTX2VideoTransformer3DModel", {"num_layers": 1}, "ltx2", "LTX-2"),
    ("CosmosTransformer3DModel", ANIMA, "anima", "Anima"),
    ("CosmosTransformer3DModel", {**ANIMA, "extra_pos_embed_type": "learnable"}, OTHER, "Cosmos"),
    ("CosmosTransformer3DModel", {**ANIMA, "num_attention_heads": 40}, OTHER, "Cosmos"),
    ("HunyuanVideoTransformer3DModel", {**FLUX, "num_refiner_layers": 1}, OTHER, "HunyuanVideo"),
    ("AnimaTextConditioner", {"num_layers": 1}, "anima", "conditioner"),
    ("Krea2Transformer2DModel", KREA, "krea2", "Krea 2"),
    ("AutoencoderKL", {**ENCODER_BLOCKS, "latent_channels": 4}, "vae", "XL (4"),
    ("AutoencoderKL", {**ENCODER_BLOCKS, "latent_channels": 16, "use_quant_conv": False}, "vae", "FLUX.1, Z-Image"),
    ("AutoencoderKLFlux2", {}, "vae", "FLUX.2"),
    ("AutoencoderKLQwenImage", {}, "vae", "Qwen-Image or Wan 2.1"),
    ("AutoencoderKLWan", {}, "vae", "Qwen-Image or Wan 2.1"),
    ("AutoencoderKLWan", WAN_22_VAE, "vae", "Wan 2.2 5B"),
    ("AutoencoderKLLTX2Video", {}, "vae", "LTX-2"),
]
CLIP: dict[str, Any] = {"num_hidden_layers": 1}
T5: dict[str, Any] = {"d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_heads": 64, "num_layers": 2}
GATED = {"feed_forward_proj": "gated-gelu"}
QWEN: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
MISTRAL: dict[str, Any] = {"hidden_size": 5120, "vocab_size": 131072, "num_hidden_layers": 1}
TRANSFORMERS: list[tuple[str, dict[str, Any], str, str]] = [
    ("CLIPTextModel", {**CLIP, "hidden_size": 768, "num_attention_heads": 12}, "clip", "CLIP-L"),
    ("CLIPTextModel", {**CLIP, "hidden_size": 1024, "num_attention_heads": 16}, "clip", "OpenCLIP-H"),
    ("CLIPTextModelWithProjection", {**CLIP, "hidden_size": 1280, "num_attention_heads": 20}, "clip", "CLIP-G"),
    ("T5EncoderModel", {**T5, **GATED}, "t5", "T5-XXL"),
    ("UMT5EncoderModel", {**T5, **GATED}, "umt5", "UMT5-XXL"),
    ("Qwen3ForCausalLM", {**QWEN, "hidden_size": 1024}, "causal-lm", "0.6B"),
    ("Qwen3ForCausalLM", {**QWEN, "hidden_size": 2560}, "causal-lm", "4B"),
    ("Qwen3ForCausalLM", {**QWEN, "hidden_size": 4096}, "causal-lm", "8B"),
    ("Qwen3Model", {**QWEN, "hidden_size": 1024}, "causal-lm", "0.6B"),
    ("MistralForCausalLM", MISTRAL, "causal-lm", "Mistral Small"),
    ("LlamaForCausalLM", {"hidden_size": 4096, "num_hidden_layers": 1}, "causal-lm", "a language model"),
]
NATIVE: dict[str, tuple[dict[str, tuple[int, ...]], str, str]] = {
    "sd15": ({"input_blocks.4.1.transformer_blocks.0.attn2.to_k.weight": (640, 768)}, "sd15", "1.x UNet"),
    "sd2": ({"input_blocks.4.1.transformer_blocks.0.attn2.to_k.weight": (640, 1024)}, "sd2", "2.x UNet"),
    "sdxl": ({"input_blocks.4.1.transformer_blocks.0.attn2.to_k.weight": (640, 2048)}, "sdxl", "SDXL UNet"),
    "sd35-large": ({"joint_blocks.0.x_block.attn.qkv.weight": (1,), "joint_blocks.37.x": (1,)}, "sd3", "large"),
    "sd35-medium": (
        {"joint_blocks.0.x_block.attn.qkv.weight": (1,), "joint_blocks.0.x_block.attn2.qkv.weight": (1,)},
        "sd3",
        "medium",
    ),
    "flux-dev": (
        {
            "double_blocks.0.img_attn.qkv.weight": (9216, 3072),
            "guidance_in.in_layer.weight": (1,),
            "time_in.in_layer.weight": (1,),
            "img_in.weight": (3072, 64),
        },
        "flux",
        "dev",
    ),
    "flux-fill": (
        {"double_blocks.0.img_attn.qkv.weight": (9216, 3072), "img_in.weight": (3072, 384)},
        OTHER,
        "Fill",
    ),
    "schnell": (
        {"double_blocks.0.img_attn.qkv.weight": (9216, 3072), "time_in.in_layer.weight": (1,)},
        "flux",
        "schnell",
    ),
    "chroma": (
        {"double_blocks.0.img_attn.qkv.weight": (9216, 3072), "distilled_guidance_layer.in_proj.bias": (5120,)},
        "chroma",
        "Chroma",
    ),
    "klein-4b": (
        {
            "double_blocks.0.img_attn.qkv.weight": (9216, 3072),
            "single_stream_modulation.lin.weight": (9216, 3072),
            "img_in.weight": (3072, 128),
        },
        "flux2",
        "klein 4B",
    ),
    "edit-2511": (
        {
            "txt_norm.weight": (3584,),
            "transformer_blocks.0.attn.add_q_proj.weight": (3072, 3072),
            "__index_timestep_zero__": (0,),
        },
        "qwen-image",
        "2511",
    ),
    "z-image": (
        {
            "cap_embedder.1.weight": (3840, 2560),
            "cap_pad_token": (1, 3840),
            "noise_refiner.0.attention.qkv.weight": (1,),
        },
        "z-image",
        "Z-Image",
    ),
    "wan-i2v": (
        {
            "head.modulation": (1,),
            "blocks.0.self_attn.q.weight": (5120, 5120),
            "img_emb.proj.0.weight": (1280,),
            "patch_embedding.weight": (5120, 36, 1, 2, 2),
        },
        "wan",
        "2.1 image-to-video",
    ),
    "ltx2": (
        {"av_ca_a2v_gate_adaln_single.linear.weight": (1,), "adaln_single.linear.weight": (1,)},
        "ltx2",
        "LTX-2",
    ),
    "anima": (
        {
            "blocks.0.mlp.layer1.weight": (8192, 2048),
            "x_embedder.proj.1.weight": (2048, 68),
            "llm_adapter.blocks.0.cross_attn.q_proj.weight": (1024, 1024),
        },
        "anima",
        "Anima",
    ),
    "cosmos": ({"blocks.0.mlp.layer1.weight": (8192, 2048), "x_embedder.proj.1.weight": (2048, 68)}, OTHER, "Cosmos"),
    "krea2": ({"txtfusion.projector.weight": (1, 12), "blocks.0.attn.wq.weight": (6144, 6144)}, "krea2", "Krea 2"),
    "openclip": (
        {"transformer.resblocks.0.attn.in_proj_weight": (1,), "token_embedding.weight": (49408, 1280)},
        "clip",
        "CLIP-G",
    ),
    "qwen2.5-vl": (
        {
            "model.layers.0.self_attn.q_proj.weight": (3584, 3584),
            "model.layers.0.self_attn.k_proj.bias": (512,),
            "model.embed_tokens.weight": (152064, 3584),
        },
        "causal-lm",
        "Qwen2.5-VL",
    ),
    "qwen3-vl": (
        {
            "model.language_model.layers.0.self_attn.q_proj.weight": (4096, 2560),
            "model.language_model.layers.0.self_attn.q_norm.weight": (128,),
            "model.language_model.embed_tokens.weight": (151936, 2560),
        },
        "causal-lm",
        "Qwen3-VL 4B",
    ),
    "gemma3": (
        {
            "model.layers.0.self_attn.q_proj.weight": (4096, 3840),
            "model.layers.0.self_attn.q_norm.weight": (256,),
            "model.embed_tokens.weight": (262208, 3840),
        },
        "causal-lm",
        "Gemma 3 12B",
    ),
    "wan-vae": (
        {"decoder.middle.0.residual.0.gamma": (1,), "decoder.conv1.weight": (384, 16, 3, 3, 3)},
        "vae",
        "Wan 2.1",
    ),
    "sd-vae": ({"decoder.conv_in.weight": (512, 4, 3, 3), "decoder.mid.block_1.norm1.weight": (512,)}, "vae", "XL (4"),
}


@cache
def samples() -> dict[str, tuple[Shapes, str, str]]:
    found: dict[str, tuple[Shapes, str, str]] = dict(NATIVE)
    with init_empty_weights():
        for number, (name, config, family, words) in enumerate([*DIFFUSERS, *TRANSFORMERS]):
            if hasattr(diffusers, name):
                module = getattr(diffusers, name)(**config)
            else:
                made_by = getattr(transformers, name)
                module = made_by(made_by.config_class(**config))
            found[f"{name}-{number}"] = {key: tuple(t.shape) for key, t in module.state_dict().items()}, family, words
    return found


def test_each_model_is_recognised_as_itself_and_as_nothing_else() -> None:
    for name, (shapes, family, words) in samples().items():
        for prefix in ("", "model.diffusion_model."):
            found = models_in({prefix + key: shape for key, shape in shapes.items()})
            assert [each.family for each in found] == [family], f"{prefix}{name}: {found}"
            assert words in found[0].title and found[0].prefix == prefix, f"{prefix}{name}: {found}"
        if name not in NATIVE:
            assert is_of_class(found[0], name) and not is_of_class(found[0], "UNetTransformer")


def adapter_of(shapes: Shapes, prefix: str, chosen: str, kind: str = "lora") -> Shapes:
    """An adapter of rank 4 on the linear layers of the blocks that have ``chosen`` in their names."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if len(shape) == 2 and module != name and chosen in module and ("blocks." in module or "layers." in module):
            module = prefix + (module.replace(".", "_") if prefix.endswith("_") else module)
            rows, columns = shape
            found |= {
                "lora": {f"{module}.lora_A.weight": (4, columns), f"{module}.lora_B.weight": (rows, 4)},
                "dora": {f"{module}.lora_A.weight": (4, columns), f"{module}.lora_magnitude_vector": (rows,)},
                "loha": {f"{module}.hada_w1_a": (rows, 4), f"{module}.hada_w1_b": (4, columns)},
                "lokr": {f"{module}.lokr_w1": (2, 4), f"{module}.lokr_w2": (rows // 2, columns // 4)},
                "lokr in factors": {
                    f"{module}.lokr_w1": (2, 4),
                    f"{module}.lokr_w2_a": (rows // 2, 3),
                    f"{module}.lokr_w2_b": (3, columns // 4),
                },
                "oft": {f"{module}.oft_blocks": (4, 8, 8)},
            }[kind]
    return found


PREFIXES = ("transformer.", "diffusion_model.", "lora_unet_", "lora_transformer_", "base_model.model.", "lycoris_")


def test_an_adapter_of_each_model_is_of_its_family_and_of_few_others() -> None:
    tried = 0
    for name, (shapes, family, _) in samples().items():
        if family in {*FAMILIES.names, *RESERVED} - {"causal-lm"} and "Conditioner" not in name and name not in NATIVE:
            for number, prefix in enumerate(PREFIXES):
                lora, attention = adapter_of(shapes, prefix, ""), adapter_of(shapes, prefix, "att")
                origin, least = origin_of(lora, lora), origin_of(attention, attention)
                assert origin is not None and origin.families == (family,), f"{prefix}{name}: {origin}"
                assert least is not None and family in least.families, f"{prefix}{name}: {least}"
                assert family not in FAMILIES or foreign_name(lora, [family]) is None, f"{prefix}{name}: no mixture"
                kind = ("dora", "loha", "lokr", "lokr in factors")[number % 4]
                other = adapter_of(shapes, prefix, "att", kind)
                assert origin_of(other, other) == least, f"{kind}: {prefix}{name}"
                tried += 1
    assert tried > 120


@pytest.mark.parametrize("kind", ["lora", "dora", "loha", "lokr", "lokr in factors", "oft"])
@pytest.mark.parametrize("prefix", [*PREFIXES, ""])
def test_a_model_of_another_width_is_not_taken_for_another_family(prefix: str, kind: str) -> None:
    """Names that two families share identify neither; the controls have the same names, or nearly the same."""

    def families(blocks: str, width: int) -> tuple[str, ...] | None:
        layers = {f"{blocks}.{n}.attn{n + 1}.to_{part}.weight": (width, width) for n in range(2) for part in "qkv"}
        adapter = adapter_of(layers, prefix, "", kind)
        origin = origin_of(adapter, adapter)
        return None if origin is None else origin.families

    untold = ("anima", "ltx2") if kind == "oft" else None
    known = {("transformer_blocks", 2048): "anima", ("transformer_blocks", 4096): "ltx2", ("blocks", 5120): "wan"}
    assert families("transformer_blocks", 32) == untold
    for (blocks, width), family in known.items():
        assert families(blocks, width) == (untold if untold and family != "wan" else (family,))


def test_every_family_has_a_sample_and_a_row_finds_nothing_that_is_not_there() -> None:
    tested = {family for _, family, _ in samples().values()}
    assert {*FAMILIES.names, *RESERVED} <= tested
    for shapes, _, _ in samples().values():
        for row in models._table().models:
            if models._fits(row, sorted(shapes), shapes, ""):
                for start in row.has:
                    lost = {key: shape for key, shape in shapes.items() if not key.startswith(start)}
                    assert not models._fits(row, sorted(lost), lost, "")


def test_components_are_taken_by_keys_that_their_families_have() -> None:
    variants = [each for row in models._table().models for each in row.variants]
    told = {(family, key) for each in variants for family, key in each.keys.items()}
    assert {family for family, _ in told} == {spec.name for spec in FAMILIES} - {"causal-lm"}
    assert all(key in FAMILIES[family].model_section.part_keys for family, key in told)


def test_a_file_with_several_components_names_the_model_first() -> None:
    shapes = {f"model.diffusion_model.{name}": shape for name, shape in NATIVE["flux-dev"][0].items()} | {
        f"vae.{name}": shape for name, shape in NATIVE["sd-vae"][0].items()
    }
    shapes["text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q.weight"] = (4096, 4096)
    assert [each.part for each in models_in(shapes)] == ["transformer", "text encoder", "vae"]
    found = model_of(shapes)
    assert found == RecognisedModel("flux", "a FLUX.1 dev or Kontext model", "transformer", "model.diffusion_model.")
    assert model_of({"blob": (1,)}) is None and model_of({}) is None


@pytest.mark.parametrize(("kind", "families"), [
    ("StableDiffusionXLPipeline", ("sdxl",)),
    ("StableDiffusionPipeline", ("sd15", "sd2")),
    ("Flux2KleinPipeline", ("flux2",)),
    ("FluxKontextPipeline", ("flux",)),
    ("LTX2Pipeline", ("ltx2",)),
    ("LTXPipeline", (OTHER,)),
])  # fmt: skip
def test_pipelines(kind: str, families: tuple[str, ...]) -> None:
    found = pipeline_of(kind)
    assert found is not None and found.families == families
    assert pipeline_of("SomeNewPipeline") is None and "whole" in PARTS
