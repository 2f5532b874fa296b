"""What programs do with LoRA files, by spelling; each line was tried with the program or read in its source."""

from __future__ import annotations

import pytest

from lora_rocm.families.registry import PRODUCT, RESERVED
from lora_rocm.model_files.readers import UNKNOWN, readers_of, spelling_of

IMAGE_FAMILIES = {*PRODUCT.names, *RESERVED} - {"causal-lm"}
NATIVE_FLUX = "double_blocks.0.img_attn.qkv"
NATIVE_ANIMA = "blocks.0.self_attn.q_proj"


def names(module: str, *, alpha: bool = False, down: str = "lora_A") -> list[str]:
    return [f"{module}.{down}.weight", *([f"{module}.alpha"] if alpha else [])]


@pytest.mark.parametrize(("family", "module", "alpha", "diffusers", "comfyui"), [
    ("sdxl", "lora_unet_down_blocks_1_attentions_0_proj_in", True, "reads it", "reads it"),
    ("sdxl", "unet.mid_block.attentions.0.proj_in", False, "reads it", "without the attention layers"),
    ("sd3", "transformer.transformer_blocks.0.attn.to_q", False, "reads it", "reads it"),
    ("sd3", "transformer.transformer_blocks.0.attn.to_q", True, "another strength", "reads it"),
    ("sd3", "lora_unet_joint_blocks_0_x_block_attn_qkv", True, "nothing", "reads it"),
    ("flux", "transformer.single_transformer_blocks.0.attn.to_q", True, "reads it", "reads it"),
    ("flux", f"diffusion_model.{NATIVE_FLUX}", True, "nothing", "reads it"),
    ("chroma", "diffusion_model.transformer_blocks.0.attn.to_q", False, "nothing", UNKNOWN),
    ("flux", "lora_transformer_single_transformer_blocks_0_attn_to_q", True, "nothing", "reads it"),
    ("flux2", f"diffusion_model.{NATIVE_FLUX}", True, "refuses", "reads it"),
    ("flux2", f"diffusion_model.{NATIVE_FLUX}", False, "reads it", "reads it"),
    ("qwen-image", "transformer.transformer_blocks.0.img_mlp.net.2", True, "refuses", "reads it"),
    ("qwen-image", "diffusion_model.transformer_blocks.0.img_mlp.net.2", True, "reads it", "reads it"),
    ("z-image", "diffusion_model.layers.0.attention.qkv", False, "without the attention", "reads it"),
    ("z-image", "diffusion_model.layers.0.attention.to_q", True, "reads it", "reads it"),
    ("z-image", "lora_unet_layers_0_attention_to_q", True, "reads it", "nothing"),
    ("z-image", "lora_unet_layers_0_attention_qkv", True, "reads it", "reads it"),
    ("wan", "transformer.blocks.0.attn1.to_q", False, "reads it", "nothing"),
    ("wan", "diffusion_model.blocks.0.self_attn.q", True, "reads it", "reads it"),
    ("wan", "diffusion_model.blocks.0.attn1.to_q", False, "refuses", "nothing"),
    ("ltx2", "transformer.transformer_blocks.0.attn1.to_q", True, "another strength", "nothing"),
    ("ltx2", "diffusion_model.transformer_blocks.0.attn1.to_q", False, "reads it", "reads it"),
    ("anima", f"diffusion_model.{NATIVE_ANIMA}", False, "reads it", "reads it"),
    ("anima", f"diffusion_model.{NATIVE_ANIMA}", True, "refuses", "reads it"),
    ("anima", f"lora_unet_{NATIVE_ANIMA.replace('.', '_')}", True, "nothing", "reads it"),
    ("anima", "transformer.transformer_blocks.0.attn1.to_q", False, "reads it", "nothing"),
    ("krea2", "diffusion_model.transformer_blocks.0.attn.to_gate", False, "refuses", "reads it"),
    ("krea2", "base_model.model.blocks.0.attn.wq", False, "reads it", UNKNOWN),
    ("sdxl", "base_model.model.mid_block.attentions.0.proj_in", False, "nothing", "nothing"),
    ("z-image", "base_model.model.layers.0.attention.to_q", False, "nothing", "nothing"),
    ("flux", "base_model.model.transformer_blocks.0.attn.to_q", False, "fails", "nothing"),
])  # fmt: skip
def test_what_programs_do(family: str, module: str, alpha: bool, diffusers: str, comfyui: str) -> None:
    found = readers_of(names(module, alpha=alpha), [family])
    assert found is not None and diffusers in found.diffusers and comfyui in found.comfyui
    assert found.kohya.startswith("read it") is (spelling_of(names(module)) == "kohya")


def test_trained_norms() -> None:
    module = names("lora_unet_input_blocks_4_1_proj_in", alpha=True)
    for ending in ("w_norm", "b_norm"):
        found = readers_of([*module, f"lora_unet_out_0.{ending}"], ["sdxl"])
        assert found is not None and found.diffusers == "refuses it" and "norms out" in found.kohya


def test_up_and_down_are_not_what_diffusers_expects_beside_a_prefix() -> None:
    found = readers_of(names(f"diffusion_model.{NATIVE_ANIMA}", down="lora_down"), ["anima"])
    assert found is not None and found.diffusers == "refuses it"


def test_every_image_family_has_a_spelling_that_both_read() -> None:
    modules = (
        "lora_unet_down_blocks_1_attentions_0_proj_in",
        "transformer.transformer_blocks.0.attn.to_q",
        "diffusion_model.blocks.0.self_attn.q",
    )
    for family in IMAGE_FAMILIES:
        found = [readers_of(names(module), [family]) for module in modules]
        assert any(row is not None and row.diffusers == row.comfyui == "reads it" for row in found), family


def test_who_reads_a_peft_folder_is_known_of_every_family() -> None:
    for family in PRODUCT.names:
        found = readers_of(names("base_model.model.layers.0.to_q"), [family])
        assert found is not None and found.peft == "reads it", family


@pytest.mark.parametrize(
    ("rank", "told"), [(16, "reads it"), (17, "only if it is started with --max-lora-rank 32"), (513, "up to 512")]
)
def test_ranks_that_vllm_has_to_be_told(rank: int, told: str) -> None:
    found = readers_of(names("base_model.model.model.layers.0.self_attn.q_proj"), ["causal-lm"])
    assert found is not None and told in found.of_rank(rank).vllm
    assert bool(found.of_rank(rank).cannot_read) == (rank > 16)


def test_what_is_not_known_is_said_so() -> None:
    module = "lora_unet_down_blocks_1_attentions_0_proj_in"
    assert readers_of(names(module), ["sd15", "sdxl"]) is not None
    assert readers_of(names(module), []) is None and readers_of(names(module), ["sdxl", "flux"]) is None
    assert readers_of(names("model.layers.0.q_proj"), ["causal-lm"]) is None and spelling_of([]) == ""
