"""LoRAs of other families are named as such; a file of the family at hand, and one without any mark, are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lora_rocm.adapters.lora_files.lora_reader import components_of
from lora_rocm.errors import AdapterError
from lora_rocm.families.flux.family import Flux
from lora_rocm.families.sd.family import Sd15
from lora_rocm.families.sdxl.family import Sdxl
from lora_rocm.families.z_image.family import ZImage
from lora_rocm.model_files.recognise_adapter import families_of, foreign_name, kind_of, origin_of
from tests.tiny_models import without_base
from tests.wording import saying, says

NAMES = {
    "transformer.single_transformer_blocks.3.attn.to_q.lora_A.weight": "FLUX.1",
    "lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight": "FLUX.1",
    "lora_unet_single_blocks_0_linear1.lora_down.weight": "FLUX.1",
    "lora_transformer_single_transformer_blocks_3_attn_to_q.lora_down.weight": "FLUX.1",
    "transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj.lora_A.weight": "FLUX.2",
    "transformer.transformer_blocks.0.attn.add_q_proj.lora_A.weight": "FLUX, Stable Diffusion 3 or Qwen-Image",
    "lora_unet_joint_blocks_0_x_block_attn_qkv.lora_down.weight": "Stable Diffusion 3",
    "transformer.transformer_blocks.0.img_mlp.net.2.lora_A.weight": "Qwen-Image",
    "diffusion_model.layers.0.attention.to_q.lora_A.weight": "Z-Image",
    "diffusion_model.blocks.0.self_attn.q.lora_A.weight": "Wan",
    "diffusion_model.blocks.0.self_attn.q_proj.lora_A.weight": "Anima",
    "lora_unet_blocks_3_mlp_layer1.lora_down.weight": "Anima",
    "diffusion_model.blocks.0.attn.wq.lora_A.weight": "Krea 2",
    "transformer.transformer_blocks.0.attn.to_gate.lora_A.weight": "Krea 2",
    "transformer.transformer_blocks.0.audio_attn1.to_q.lora_A.weight": "LTX-2",
    "diffusion_model.distilled_guidance_layer.in_proj.lora_A.weight": "Chroma",
    "transformer.blocks.0.attn1.to_q.lora_A.weight": "Wan",
    "model.layers.0.self_attn.q_proj.lora_A.weight": "a language model",
    "lora_te_text_model_encoder_layers_0_self_attn_q_proj.lora_down.weight": "Stable Diffusion 1 or 2",
}
SDXL = (
    "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q.lora_A.weight",
    "unet.down_blocks.1.attentions.0.transformer_blocks.0.ff.net.2.lora_A.weight",
    "text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora_A.weight",
    "text_encoder_2.text_model.encoder.layers.0.mlp.fc1.lora_A.weight",
    "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q.lora_down.weight",
    "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k.lora_down.weight",
    "lora_te1_text_model_encoder_layers_0_self_attn_q_proj.lora_down.weight",
    "lora_te2_text_model_encoder_layers_0_mlp_fc1.lora_down.weight",
)


def written(folder: Path, *names: str) -> Path:
    save_file({name: torch.zeros(1, 1) for name in names}, folder / "x.safetensors")
    return folder / "x.safetensors"


@pytest.mark.parametrize("name", NAMES)
def test_a_lora_of_another_family_is_named_with_the_remedy(tmp_path: Path, name: str) -> None:
    with pytest.raises(AdapterError) as caught:
        components_of(without_base(Sdxl), written(tmp_path, name))
    error = caught.value
    assert error.code == "lora-of-another-model" and NAMES[name] in error.what and "SDXL" in error.what
    assert name in error.what and "SDXL" in error.fix and "base model" in error.fix


@pytest.mark.parametrize("name", SDXL)
def test_a_lora_of_this_family_is_not(tmp_path: Path, name: str) -> None:
    component = name.split(".")[0]
    expected = {"lora_te1": "text_encoder", "lora_te2": "text_encoder_2"}.get("_".join(name.split("_")[:2]), "unet")
    found = components_of(without_base(Sdxl), written(tmp_path, name))
    assert found == {component if component.startswith("text_encoder") else expected}


def test_files_of_stable_diffusion_1_are_of_that_and_not_of_sdxl(tmp_path: Path) -> None:
    path = written(tmp_path, "lora_te_text_model_encoder_layers_0_mlp_fc1.lora_down.weight")
    assert components_of(without_base(Sd15), path) == {"text_encoder"}
    with pytest.raises(AdapterError, check=saying("model_files/lora-for-sdxl-and-the-base-model")):
        components_of(without_base(Sd15), written(tmp_path, SDXL[4]))


def test_a_file_put_together_from_loras_of_two_families_is_named_as_that(tmp_path: Path) -> None:
    own, other = "diffusion_model.layers.0.attention.to_q.lora_A.weight", "transformer.single_transformer_blocks.3."
    with pytest.raises(AdapterError, match="mixture") as caught:
        components_of(without_base(ZImage), written(tmp_path, own, f"{other}attn.to_q.lora_A.weight"))
    assert (
        f"{own}, of Z-Image" in caught.value.what and f"{other}attn.to_q.lora_A.weight, of FLUX.1" in caught.value.what
    )
    assert says(caught.value.fix, "model_files/put-together-from-two")
    chroma = "transformer.distilled_guidance_layer.in_proj.lora_A.weight"
    sd3 = "lora_unet_joint_blocks_0_x_block_attn_qkv.lora_down.weight"
    for family, names in (  # the controls: what two families share makes no mixture of one family's file
        (ZImage, (f"{other}attn.to_q.lora_A.weight",)),
        (Flux, (chroma, f"{other}attn.to_q.lora_A.weight")),
        (Flux, (f"{other}attn.to_qkv_mlp_proj.lora_A.weight", f"{other}attn.to_out.lora_A.weight")),
        (Sdxl, (sd3, SDXL[-1])),
    ):
        with pytest.raises(AdapterError, check=saying("model_files/this-is-a-lora-for")) as caught:
            components_of(without_base(family), written(tmp_path, *names))


@pytest.mark.parametrize(("names", "families", "found"), [
    (["diffusion_model.layers.0.attention.to_q", "transformer.single_transformer_blocks.3.attn.to_q"], ["z-image"], 1),
    (["diffusion_model.layers.0.attention.to_q", "transformer.single_transformer_blocks.3.attn.to_q"], ["flux"], 0),
    (["lora_te1_text_model_encoder_layers_0_mlp_fc1", "lora_unet_double_blocks_0_img_mlp_0"], ["flux", "chroma"], None),
    (["text_encoder_2.x.layers.0.self_attn.q_proj", "transformer.transformer_blocks.0.attn.to_q"], ["flux"], None),
    (["base.model.layers.0.self_attn.q_proj", "base.visual.blocks.0.mlp.gate_proj"], ["causal-lm"], None),
    (["transformer.a.to_q"], ["z-image"], None),
])  # fmt: skip
def test_a_name_of_another_family_is_found_and_what_families_share_is_not(
    names: list[str], families: list[str], found: int | None
) -> None:
    tensors = [f"{name}.lora_A.weight" for name in names]
    foreign = foreign_name(tensors, families)
    assert (foreign is None) if found is None else (foreign is not None and foreign[0] == tensors[found])


def test_a_file_that_names_nothing_of_the_model_is_no_empty_answer(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, check=saying("model_files/no-part-of-the-base-model", "model_files/a-b-lora-a")):
        components_of(without_base(Sdxl), written(tmp_path, "a.b.lora_A.weight"))


def test_what_several_families_share_names_none() -> None:
    assert origin_of(["transformer.x.to_q.lora_A.weight"]) is None and origin_of([]) is None


@pytest.mark.parametrize(("module", "shape", "family"), [
    ("unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k.lora_A", (4, 768), "sd15"),
    ("lora_unet_mid_block_attentions_0_transformer_blocks_0_attn2_to_k.lora_down", (4, 1024), "sd2"),
    ("unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k.lora_A", (4, 2048), "sdxl"),
    ("lora_unet_double_blocks_0_img_attn_qkv.lora_down", (4, 6144), "flux2"),
    ("lora_unet_single_blocks_0_linear1.lora_up", (27648, 4), "flux2"),
    ("lora_unet_single_blocks_0_linear1.lora_up", (21504, 4), "flux"),
    ("transformer.transformer_blocks.0.attn.add_q_proj.lora_A", (4, 1536), "sd3"),
    ("transformer.transformer_blocks.40.attn.to_q.lora_A", (4, 3072), "qwen-image"),
    ("transformer.transformer_blocks.0.attn1.to_q.lora_A", (4, 2048), "anima"),
    ("transformer.transformer_blocks.0.attn1.to_q.lora_A", (4, 4096), "ltx2"),
])  # fmt: skip
def test_widths_tell_families_with_the_same_names_apart(module: str, shape: tuple[int, ...], family: str) -> None:
    origin = origin_of([f"{module}.weight"], {f"{module}.weight": shape})
    assert origin is not None and origin.families[0] == family


def test_without_widths_the_same_names_are_of_several_families() -> None:
    origin = origin_of([SDXL[0].replace("attn1", "attn2")])
    assert origin is not None and origin.families == ("sd15", "sd2", "sdxl")


@pytest.mark.parametrize(("names", "kind"), [
    (["a.lora_down.weight", "a.lora_up.weight", "a.alpha"], "LoRA"),
    (["a.to_q.lora_A.weight"], "LoRA"),
    (["a.to_q.lora.down.weight"], "LoRA"),
    (["a.lora_A.weight", "a.lora_magnitude_vector"], "LoRA and DoRA"),
    (["a.hada_w1_a", "a.dora_scale"], "LoHa and DoRA"),
    (["a.lora_up.weight", "a.w_norm"], "LoRA and trained norms"),
    (["a.hada_w1_a"], "LoHa"),
    (["a.lokr_w1"], "LoKr"),
    (["a.oft_blocks"], "OFT"),
    (["model.diffusion_model.input_blocks.0.0.weight"], ""),
])  # fmt: skip
def test_kinds(names: list[str], kind: str) -> None:
    assert kind_of(names) == kind


@pytest.mark.parametrize(("metadata", "families"), [
    ({"ss_base_model_version": "sdxl_base_v1-0"}, ("sdxl",)),
    ({"modelspec.architecture": "stable-diffusion-xl-v1-base/lora"}, ("sdxl",)),
    ({"modelspec.architecture": "Qwen-Image"}, ()),
    ({"ss_base_model_version": "x"}, ()),
    ({}, ()),
])  # fmt: skip
def test_metadata_decide_where_names_leave_a_choice(metadata: dict[str, str], families: tuple[str, ...]) -> None:
    shared = {"unet.mid_block.resnets.0.conv1.lora_A.weight": (4, 8, 3, 3)}
    assert families_of(shared, metadata) == (families or ("sd15", "sd2", "sdxl"))
    assert families_of({"txtfusion.projector.lora_A.weight": (4, 12)}, metadata) == ("krea2",)
    assert families_of({}, {"modelspec.architecture": "Qwen-Image"}) == ("qwen-image",)
