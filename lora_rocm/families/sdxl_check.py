"""Is this an SDXL base model? Answered from configs and headers alone, before gigabytes are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_rocm.errors import ModelError
from lora_rocm.families.loading import PICKLE_SUFFIXES, Source, read_config
from lora_rocm.families.weightfiles import Header

UNET_PREFIX = "model.diffusion_model."
FIX = "Use an SDXL base model or one of its fine-tunes: a diffusers folder, a .safetensors checkpoint or a hub id."

PIPELINES = {
    "StableDiffusionPipeline": "a Stable Diffusion 1.x or 2.x model",
    "StableDiffusion3Pipeline": "a Stable Diffusion 3 model",
    "FluxPipeline": "a FLUX model",
    "StableDiffusionXLInpaintPipeline": "an SDXL inpainting model",
}

# (text in a tensor name, what the file is); the first that is found anywhere in the file decides
MARKERS = (
    ("lora_down.weight", "a LoRA file, not a base model"),
    ("lora_A.weight", "a LoRA file, not a base model"),
    ("lora.down.weight", "a LoRA file, not a base model"),
    ("hada_w1_a", "a LyCORIS file, not a base model"),
    ("lokr_w", "a LyCORIS file, not a base model"),
    ("double_blocks.0.img_attn", "a FLUX model"),
    ("joint_blocks.0.", "a Stable Diffusion 3 model"),
    ("cond_stage_model.", "a Stable Diffusion 1.x or 2.x model"),
    ("edm_mean", "a Playground v2.5 model, whose EDM training is another one"),
    ("control_model.", "a ControlNet"),
)


def check(source: Source) -> None:
    """Refuse what is not an SDXL base model.

    Raises:
        ModelError: wrong-family, not-a-model, incomplete-model, or what reading a config or header raises.
    """
    if source.single_header is not None:
        _check_single(source, source.single_header)
    else:
        _check_folder(source)
    _check_unet(source, source.config("unet"))
    if source.vae is not None:
        _check_vae(source)


def _check_folder(source: Source) -> None:
    index_path = source.folder / "model_index.json"
    if not index_path.is_file():
        raise _not_a_model(source)
    index = read_config(index_path)
    kind = str(index.get("_class_name", ""))
    if "transformer" in index or kind in PIPELINES:
        raise _wrong(source, PIPELINES.get(kind, f"a model for {kind}"))
    if not _is_listed(index, "text_encoder") and _is_listed(index, "text_encoder_2"):
        raise _wrong(source, "an SDXL refiner, which makes no pictures of its own")
    missing = [name for name in source.layout.parts if not (source.folder / name).is_dir()]
    if missing and not kind.startswith("StableDiffusionXL"):
        raise _wrong(source, f"a model for {kind}" if kind else "no pipeline that is known here")
    if missing:
        raise ModelError(
            "incomplete-model",
            f"The model folder lacks {', '.join(missing)}.",
            where=f"model.name_or_path: {source.name}",
            fix="Download the whole model.",
        )
    for name in source.layout.parts:
        source.weights(name)  # refuses pickles, notices damage


def _is_listed(index: Mapping[str, Any], name: str) -> bool:
    """Whether a pipeline has a part: [library, class], and [null, null] where it has none."""
    entry = index.get(name)
    return isinstance(entry, list) and bool(entry) and entry[0] is not None


def _check_single(source: Source, header: Header) -> None:
    for marker, what in MARKERS:
        if any(marker in name for name in header.tensors):
            raise _wrong(source, what)
    if not any(name.startswith("conditioner.embedders.1.") for name in header.tensors):
        if any(name.startswith("conditioner.embedders.0.model.") for name in header.tensors):
            raise _wrong(source, "an SDXL refiner, which makes no pictures of its own")
        if any(name.startswith(UNET_PREFIX) for name in header.tensors):
            raise _incomplete(source, "text encoders")
        raise _wrong(source, "no checkpoint that is known here")
    channels = header.shape(f"{UNET_PREFIX}input_blocks.0.0.weight")
    if channels is None:
        raise _incomplete(source, "UNet")
    _check_channels(source, channels[1])
    if source.vae is None and not any(name.startswith(source.layout.parts["vae"].prefix) for name in header.tensors):
        raise _incomplete(source, "VAE (or set model.vae)")


def _check_unet(source: Source, config: Mapping[str, Any]) -> None:
    if config.get("addition_embed_type") != "text_time":
        raise _wrong(source, "a UNet without SDXL's text and time conditioning (Stable Diffusion 1.x or 2.x has none)")
    _check_channels(source, config.get("in_channels"))


def _check_channels(source: Source, channels: object) -> None:
    if channels == 9:
        raise _wrong(source, "an inpainting model (its UNet takes 9 channels)")
    if channels != 4:
        raise _wrong(source, f"a UNet that takes {channels} channels, where SDXL takes 4")


def _check_vae(source: Source) -> None:
    (headers, _), config = source.weights("vae"), source.config("vae")
    latents = [
        shape[1] for h in headers for n in h.tensors if n.endswith("decoder.conv_in.weight") and (shape := h.shape(n))
    ]
    scale = read_config(source.folder / "vae" / "config.json").get("scaling_factor", 0.18215)
    if latents != [4] or config.get("scaling_factor", 0.18215) != scale:
        raise ModelError(
            "wrong-family",
            "This is not a VAE of SDXL.",
            where=f"model.vae: {source.vae}",
            fix="Leave model.vae out, or give an SDXL VAE.",
        )


def _not_a_model(source: Source) -> ModelError:
    files = sorted(path.name for path in source.folder.glob("*.safetensors"))
    if files:
        fix = f"Give the file itself: model.name_or_path: {source.folder / files[0]}"
    else:
        pickles = [path.name for suffix in PICKLE_SUFFIXES for path in source.folder.glob(f"*{suffix}")]
        if pickles:
            return ModelError(
                "pickle-refused",
                f"This folder holds only pickle files ({pickles[0]}), which can run any program when read.",
                where=f"model.name_or_path: {source.name}",
                fix="Use the .safetensors edition of the model.",
            )
        fix = "Give the folder that holds model_index.json."
    return ModelError(
        "not-a-model", "This folder is no diffusers model.", where=f"model.name_or_path: {source.name}", fix=fix
    )


def _wrong(source: Source, what: str) -> ModelError:
    return ModelError(
        "wrong-family",
        f"This is {what}; the recipe asks for SDXL.",
        where=f"model.name_or_path: {source.name}",
        fix=FIX,
    )


def _incomplete(source: Source, what: str) -> ModelError:
    return ModelError(
        "incomplete-model",
        f"This checkpoint has no {what}.",
        where=f"model.name_or_path: {source.name}",
        fix="Use the full checkpoint.",
    )
