"""Support of LoRA files in other programs, by spelling; each line was tried with the program or read in its source."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lycoris.modules.lokr import LokrModule
from peft.tuners.lokr.layer import factorization
from safetensors.torch import save_file

from lora_rocm.families.registry import FAMILIES, RESERVED
from lora_rocm.model_files.header import read_header
from lora_rocm.model_files.readers import (
    READ,
    UNKNOWN,
    is_cut_above_root,
    is_read,
    readers_of,
    readers_of_file,
    spelling_of,
)
from tests.wording import Worded, mentions, says, worded

IMAGE_FAMILIES = {*FAMILIES.names, *RESERVED} - {"causal-lm"}
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
    dora = readers_of([*module, f"{KEY}.dora_scale", "lora_unet_out_0.w_norm"], ["sdxl"])
    assert dora is not None and dora.diffusers == "refuses it" and "DoRA" in dora.kohya


@pytest.mark.parametrize("family", ["sd15", "sd2", "sdxl"])
def test_forge_and_a1111_read_the_usual_file(family: str) -> None:
    for module in (KEY, "lora_te1_text_model_encoder_layers_0_mlp_fc1"):
        found = readers_of(
            [f"{module}.{ending}" for ending in ("lora_down.weight", "lora_up.weight", "alpha")], [family]
        )
        assert found is not None and {"Forge", "A1111"} <= set(found.can_read)
    other = readers_of(["unet.mid_block.attentions.0.proj_in.lora_A.weight"], [family])
    assert other is not None and not {"Forge", "A1111"} & set(other.can_read), "the control"


KEY = "lora_unet_mid_block_attentions_0_proj_in"
KINDS = {
    "DoRA": ("lora_down.weight", "dora_scale"),
    "LoKr": ("lokr_w1", "lokr_w2"),
    "LoHa": ("hada_w1_a",),
    "OFT": ("oft_blocks",),
    "IA3": ("weight", "on_input"),
}


@pytest.mark.parametrize(
    ("kind", "reads"),
    [
        ("DoRA", ("lycoris",)),
        ("LoKr", ("comfyui", "forge", "a1111", "lycoris")),
        ("LoHa", ("comfyui", "forge", "a1111", "lycoris")),
        ("OFT", ("comfyui", "lycoris")),
        ("IA3", ()),
    ],
)
def test_a_kind_of_adapter_has_readers_of_its_own(kind: str, reads: tuple[str, ...]) -> None:
    """A program that is not known to read a kind is not listed as a reader, and a kind without a row is not known."""
    for family in ("sd15", "sdxl"):
        found = readers_of([f"{KEY}.{ending}" for ending in KINDS[kind]], [family])
        assert found is not None and "reads" not in found.diffusers.replace("reads none", ""), family
        assert tuple(name for name, text in found.by_program.items() if text in READ) == reads
    for family, prefix in (("flux", "transformer."), ("z-image", "diffusion_model."), ("anima", "diffusion_model.")):
        found = readers_of([f"{prefix}x.{ending}" for ending in KINDS[kind]], [family])
        assert found is not None and found.diffusers not in READ, family
    assert readers_of([f"{KEY}.{ending}" for ending in KINDS[kind]], ["sd3"]) is None
    assert readers_of([f"{KEY}.lora_down.weight"], ["sd3"]) is not None, "the control: a plain LoRA is known"


def test_a_dora_by_comfyui_s_rule_is_told_by_its_metadata() -> None:
    names_of_dora = [f"{KEY}.{ending}" for ending in KINDS["DoRA"]]
    found, usual = readers_of(names_of_dora, ["sdxl"], ["dora_norm"]), readers_of(names_of_dora, ["sdxl"], ["ss_steps"])
    assert found is not None and usual is not None
    assert (found.forge, usual.lycoris) == ("reads it", "reads it") and "base weight" in usual.forge
    assert "kohya format" in found.lycoris
    assert [text.partition(" (")[0] for text in found.can_read] == ["ComfyUI", "Forge"] and "15458" in found.can_read[0]
    assert usual.can_read == ("LyCORIS",)


def test_the_share_that_differs_stands_with_the_programs_where_it_does() -> None:
    usual = readers_of([f"{KEY}.{ending}" for ending in KINDS["DoRA"]], ["sdxl"])
    assert usual is not None and "%" not in str(usual.by_program)
    told = usual.differing(0.0734).by_program
    assert {name for name, text in told.items() if mentions(text, "model_files/7-3-of-the-change-differs")} == {
        "comfyui",
        "forge",
    }
    assert list(told) == list(usual.by_program)


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
    for family in FAMILIES.names:
        found = readers_of(names("base_model.model.layers.0.to_q"), [family])
        assert found is not None and found.peft == "reads it", family


@pytest.mark.parametrize(
    ("rank", "told"),
    [
        (16, worded("model_files/reads-it")),
        (17, worded("model_files/only-if-it-is-started-with-max")),
        (513, worded("model_files/up-to-512")),
    ],
)
def test_ranks_that_vllm_has_to_be_told(rank: int, told: Worded) -> None:
    found = readers_of(names("base_model.model.model.layers.0.self_attn.q_proj"), ["causal-lm"])
    assert found is not None and says(found.of_rank(rank).vllm, told)
    assert bool(found.of_rank(rank).cannot_read) == (rank > 16)


def test_what_is_not_known_is_said_so() -> None:
    module = "lora_unet_down_blocks_1_attentions_0_proj_in"
    assert readers_of(names(module), ["sd15", "sdxl"]) is not None
    assert readers_of(names(module), []) is None and readers_of(names(module), ["sdxl", "flux"]) is None
    assert readers_of(names("model.layers.0.q_proj"), ["causal-lm"]) is None and spelling_of([]) == ""


@pytest.mark.parametrize("factor", [4, 16, 32, 64, -1])
def test_lycoris_is_said_to_read_a_lokr_exactly_when_it_does(tmp_path: Path, factor: int) -> None:
    """By its own reader, for a layer of 320 outputs and 640 inputs, with roots 17.9 and 25.3."""
    (outer, height), (inner, width) = (factorization(side, factor) for side in (320, 640))
    tensors = {"lokr_w1": torch.ones(outer, inner), "lokr_w2": torch.ones(height, width), "alpha": torch.tensor(1.0)}
    w1, w2, alpha = tensors.values()
    try:
        with torch.no_grad():
            LokrModule.make_module_from_state_dict(
                "x", torch.nn.Linear(640, 320), w1, None, None, w2, None, None, None, None, alpha, None
            )
        reads = True
    except RuntimeError:
        reads = False
    assert reads is (factor < 32)
    name = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_q"
    save_file({f"{name}.{role}": tensor for role, tensor in tensors.items()}, tmp_path / "x.safetensors")
    readers = readers_of_file(read_header(tmp_path / "x.safetensors"), ["sdxl"])
    assert readers is not None and is_read(readers.lycoris) is reads and is_read(readers.comfyui)


def test_products_are_compared_by_their_outer_sides() -> None:
    def shapes(outer: int, height: int) -> dict[str, tuple[int, ...]]:
        return {"a.lokr_w1_a": (outer, 2), "a.lokr_w1_b": (2, 4), "a.lokr_w2_a": (height, 2), "a.lokr_w2_b": (2, 9)}

    assert is_cut_above_root(shapes(8, 4)) and not is_cut_above_root(shapes(4, 8))
