"""Random tiny SDXL models, built from config objects: width 32, SDXL's blocks with half of their layers.

``write_tiny_sdxl`` makes a diffusers folder; ``write_single_file`` writes the same weights as the one-file checkpoint
that the original SDXL release uses.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from PIL import Image
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from lora_rocm.base_models.loading import builtin_folder
from lora_rocm.dataset.entry_spec import CAPTION
from lora_rocm.encoded_cache.encode_session import plain_placement
from lora_rocm.families.base import ModelFamily, PreviewRequest, Tensors

WORDS = ("photo", "red", "blue", "cat", "dog", "circle", "square", "zibu", "small", "large")
BEGIN, END = "<|startoftext|>", "<|endoftext|>"
FEW_TARGETS = (
    r"(mid_block|up_blocks\.0)\..*\.(proj_in|proj_out|to_q|to_k|net\.0\.proj)"  # PEFT's injection takes its time
)
MIDDLE_TARGETS = r"mid_block\..*\.(proj_in|proj_out|to_q|to_k|net\.0\.proj)"
"""A layer of each shape, for tests that do not depend on the layers' places."""
RUN_TARGETS = (
    r"(down_blocks\.1\.attentions\.0|mid_block|up_blocks\.0\.attentions\.0)\..*\.(to_q|to_out\.0|proj_in|net\.0\.proj)"
)
"""For whole runs: a layer of each kind in each part; the time of a tiny run goes by the number of its LoRA layers."""
SHALLOW: dict[str, dict[str, Any]] = {
    "unet": {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": (8, 8),
        "layers_per_block": 1,
        "transformer_layers_per_block": (1, 1),
        "attention_head_dim": (2, 2),
        "norm_num_groups": 4,
    },
    "vae": {"block_out_channels": (4, 4, 4, 4), "norm_num_groups": 2},
}
"""For whole runs: a run with this model takes half the time that one with SDXL's number of blocks takes."""
SHALLOW_RISING = {**SHALLOW, "unet": {**SHALLOW["unet"], "block_out_channels": (8, 16)}}
"""The same where layers that change the width are needed."""
FEWER_LEVELS = {
    "unet": {
        "layers_per_block": 1,
        "transformer_layers_per_block": [1, 1],
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
        "block_out_channels": [48, 80],
        "attention_head_dim": [3, 5],
    },
}
"""Changes of ``hollow_builtin``, for tests that take their time for each operation of a pass."""
SHALLOW_WIDER = {**SHALLOW, "unet": {**SHALLOW["unet"], "block_out_channels": (16, 32)}}
"""The same with the widths 16 and 32 of the deep model."""
TEXT_1_WIDTH, TEXT_2_WIDTH, PROJECTION, TIME_WIDTH = 32, 48, 24, 8
WRITTEN: dict[str, dict[Path, bytes]] = {}
"""The files of each model that ``write_tiny_sdxl`` has made."""


def vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A byte-level BPE of a few dozen merges, in CLIP's format (words end in ``</w>``)."""
    alphabet = sorted(ByteLevel.alphabet())
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        pieces = [*word[:-1], word[-1] + "</w>"]
        while len(pieces) > 1:
            pair = (pieces[0], pieces[1])
            if pair not in merges:
                merges.append(pair)
            pieces = ["".join(pair), *pieces[2:]]
    tokens = [*alphabet, *(letter + "</w>" for letter in alphabet), *("".join(pair) for pair in merges), BEGIN, END]
    return {token: number for number, token in enumerate(dict.fromkeys(tokens))}, merges


def unet_config(**changes: Any) -> dict[str, Any]:
    """SDXL's block topology with small widths; ``transformer_layers_per_block`` differs by block as in SDXL."""
    config: dict[str, Any] = {
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": (16, 32, 32),
        "layers_per_block": 1,  # SDXL has 2; a third of the suite's time goes by the number of layers
        "norm_num_groups": 8,
        "cross_attention_dim": TEXT_1_WIDTH + TEXT_2_WIDTH,
        "transformer_layers_per_block": (1, 1, 2),
        "attention_head_dim": (2, 2, 4),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": TIME_WIDTH,
        "projection_class_embeddings_input_dim": 6 * TIME_WIDTH + PROJECTION,
    }
    return config | changes


def scheduler_config(**changes: Any) -> dict[str, Any]:
    """SDXL's published noise schedule."""
    config = {
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "num_train_timesteps": 1000,
        "prediction_type": "epsilon",
        "timestep_spacing": "leading",
        "steps_offset": 1,
    }
    return config | changes


def text_config(width: int, vocab: dict[str, int], pad: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(vocab),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
        projection_dim=PROJECTION,
        bos_token_id=vocab[BEGIN],
        eos_token_id=vocab[END],
        pad_token_id=pad,
    )


def tiny_vae(**changes: Any) -> AutoencoderKL:
    config: dict[str, Any] = {
        "block_out_channels": (8, 8, 16, 16),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "latent_channels": 4,
        "sample_size": 64,
        "scaling_factor": 0.13025,
    }
    return AutoencoderKL(**(config | changes))


def tiny_pipeline(
    seed: int = 0,
    unet: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
    vae: dict[str, Any] | None = None,
) -> StableDiffusionXLPipeline:
    """A random tiny SDXL; the same seed gives the same weights."""
    vocab, merges = vocabulary()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return StableDiffusionXLPipeline(
            vae=tiny_vae(**(vae or {})),
            text_encoder=CLIPTextModel(text_config(TEXT_1_WIDTH, vocab, vocab[END])),
            text_encoder_2=CLIPTextModelWithProjection(text_config(TEXT_2_WIDTH, vocab, 0)),
            tokenizer=CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=77),
            tokenizer_2=CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=77, pad_token="!"),
            unet=UNet2DConditionModel(**unet_config(**(unet or {}))),
            scheduler=EulerDiscreteScheduler(**scheduler_config(**(scheduler or {}))),
            force_zeros_for_empty_prompt=True,
            add_watermarker=False,
        )


def write_tiny_sdxl(
    folder: Path,
    seed: int = 0,
    unet: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
    vae: dict[str, Any] | None = None,
    variant: str | None = None,
) -> Path:
    """Write a random tiny SDXL as a new diffusers folder and return the folder; a process makes each model once."""

    def write() -> None:
        tiny_pipeline(seed, unet, scheduler, vae).save_pretrained(folder, safe_serialization=True, variant=variant)

    return written_once(folder, repr((seed, unet, scheduler, vae, variant)), write)


def hollow_builtin(folder: Path, changes: dict[str, dict[str, Any]]) -> Path:
    """A new folder with the model that ships with the package, with changed configs and without weights."""
    shutil.copytree(builtin_folder("builtin:tiny-sdxl"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for component, changed in changes.items():
        config = folder / component / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text(encoding="utf-8")) | changed), encoding="utf-8")
    return folder


def written_once(folder: Path, how: str, write: Callable[[], object]) -> Path:
    """Write a new folder and return it; a second request for the same content copies it."""
    if how not in WRITTEN:
        write()
        WRITTEN[how] = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        return folder
    for name, content in WRITTEN[how].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def without_base(kind: type[Any]) -> Any:
    """A family of this class without a base, for tests that do not read it."""
    return kind(tiny_recipe("nowhere", model={"family": kind.name}))


def tiny_recipe(folder: Path | str, **sections: dict[str, Any]) -> Any:
    """A recipe for a tiny model: 64 pixels, two steps; keyword arguments replace or extend whole sections."""
    from lora_rocm.families.registry import FAMILIES
    from lora_rocm.recipe.kinds import recipe_from

    base: dict[str, dict[str, Any]] = {
        "model": {"family": "sdxl", "name_or_path": str(folder)},
        "data": {"path": str(Path(folder) / "images"), "resolution": 64},
        "train": {"max_train_steps": 2, "mixed_precision": "no"},
        "cache": {"dir": str(Path(folder).parent / "cache")},
    }
    for name, section in sections.items():
        base[name] = base.get(name, {}) | section
    side = FAMILIES[base["model"]["family"]].axes.multiple_px
    base["data"].setdefault("bucket_step", max(8, side))
    return recipe_from(base)


def write_single_file(pipeline: StableDiffusionXLPipeline, path: Path, extra: dict[str, Tensor] | None = None) -> Path:
    """Write a pipeline in the layout of the original SDXL release (sgm names, fused OpenCLIP attention)."""
    parts = (pipeline.unet, pipeline.vae, pipeline.text_encoder, pipeline.text_encoder_2)
    tensors = _original_names(*(part.state_dict() for part in parts))
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({k: v.detach().clone().contiguous() for k, v in (tensors | (extra or {})).items()}, path)
    return path


def write_hollow_sdxl(path: Path, drop: str = "", extra: dict[str, Tensor] | None = None) -> Path:
    """A one-file checkpoint of SDXL's full size according to its header: its 6.9 GB are a hole that no disk holds.

    Args:
        path: of the file.
        drop: start of the names of tensors that are omitted.
        extra: more tensors; only their shape and format count.
    """
    from lora_rocm.base_models.loading import BaseSource
    from lora_rocm.families.sdxl.family import LAYOUT

    source = BaseSource("hollow", LAYOUT, LAYOUT.configs, None)
    state = {name: source.skeleton(name).to("meta").state_dict() for name in LAYOUT.parts}
    tensors = _original_names(*(state[name] for name in ("unet", "vae", "text_encoder", "text_encoder_2")))
    kept = {k: v for k, v in (tensors | (extra or {})).items() if not (drop and k.startswith(drop))}
    fields, at = {}, 0
    for name, tensor in kept.items():
        half = name not in (extra or {})
        size = 2 * tensor.numel() if half else tensor.numel() * tensor.element_size()
        dtype = "F16" if half else {torch.float32: "F32", torch.int8: "I8"}[tensor.dtype]
        fields[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    header = json.dumps(fields).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + at)
    return path


def write_config_folder(pipeline: StableDiffusionXLPipeline, folder: Path) -> Path:
    """The configs and tokenizers alone, as ``model.config`` expects them for a one-file checkpoint."""
    for name in ("unet", "vae"):
        getattr(pipeline, name).save_config(folder / name)
    pipeline.scheduler.save_config(folder / "scheduler")
    for name in ("text_encoder", "text_encoder_2"):
        getattr(pipeline, name).config.save_pretrained(folder / name)
    for name in ("tokenizer", "tokenizer_2"):
        getattr(pipeline, name).save_pretrained(folder / name)
    pipeline.save_config(folder)
    return folder


def _original_names(
    unet: dict[str, Tensor], vae: dict[str, Tensor], text: dict[str, Tensor], text_2: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Tensors of all components as the original release names them."""
    tensors = {f"model.diffusion_model.{k}": v for k, v in _sgm_unet(unet).items()}
    tensors |= {f"first_stage_model.{k}": v for k, v in _ldm_vae(vae).items()}
    clip_l = "conditioner.embedders.0.transformer.text_model."
    tensors |= {f"{clip_l}{k.removeprefix('text_model.')}": v for k, v in text.items()}
    return tensors | {f"conditioner.embedders.1.model.{k}": v for k, v in _open_clip(text_2).items()}


def _sgm_unet(state: dict[str, Tensor]) -> dict[str, Tensor]:
    layers = 1 + max(int(key.split(".")[3]) for key in state if key.startswith("down_blocks.0.resnets."))
    each = layers + 1  # of the original's numbers to one block
    simple = {
        "time_embedding.linear_1": "time_embed.0",
        "time_embedding.linear_2": "time_embed.2",
        "add_embedding.linear_1": "label_emb.0.0",
        "add_embedding.linear_2": "label_emb.0.2",
        "conv_in": "input_blocks.0.0",
        "conv_norm_out": "out.0",
        "conv_out": "out.2",
        "mid_block.resnets.0": "middle_block.0",
        "mid_block.attentions.0": "middle_block.1",
        "mid_block.resnets.1": "middle_block.2",
        "down_blocks.0.downsamplers.0.conv": f"input_blocks.{each}.0.op",
        "down_blocks.1.downsamplers.0.conv": f"input_blocks.{2 * each}.0.op",
        "up_blocks.0.upsamplers.0.conv": f"output_blocks.{each - 1}.2.conv",
        "up_blocks.1.upsamplers.0.conv": f"output_blocks.{2 * each - 1}.2.conv",
    }
    for block in range(3):
        for layer in range(layers):
            simple[f"down_blocks.{block}.resnets.{layer}"] = f"input_blocks.{each * block + layer + 1}.0"
            simple[f"down_blocks.{block}.attentions.{layer}"] = f"input_blocks.{each * block + layer + 1}.1"
        for layer in range(layers + 1):
            simple[f"up_blocks.{block}.resnets.{layer}"] = f"output_blocks.{each * block + layer}.0"
            simple[f"up_blocks.{block}.attentions.{layer}"] = f"output_blocks.{each * block + layer}.1"
    resnet = {
        "norm1": "in_layers.0",
        "conv1": "in_layers.2",
        "time_emb_proj": "emb_layers.1",
        "norm2": "out_layers.0",
        "conv2": "out_layers.3",
        "conv_shortcut": "skip_connection",
    }
    renamed = {}
    for key, value in state.items():
        prefix = max((p for p in simple if key.startswith(p + ".")), key=len)
        rest = key.removeprefix(prefix)
        if ".resnets." in prefix:
            part, _, leaf = rest.removeprefix(".").partition(".")
            rest = f".{resnet[part]}.{leaf}"
        renamed[simple[prefix] + rest] = value
    return renamed


def _ldm_vae(state: dict[str, Tensor]) -> dict[str, Tensor]:
    last = max(int(key.split(".")[2]) for key in state if key.startswith("encoder.down_blocks."))
    renamed = {}
    for key, value in state.items():
        parts = key.split(".")
        if parts[1] in ("down_blocks", "up_blocks"):
            kind, block = ("down", int(parts[2])) if parts[1] == "down_blocks" else ("up", last - int(parts[2]))
            tail = {"resnets": ["block", parts[4]], "downsamplers": ["downsample"], "upsamplers": ["upsample"]}[
                parts[3]
            ]
            parts = [parts[0], kind, str(block), *tail, *parts[5:]]
        elif parts[1] == "mid_block" and parts[2] == "resnets":
            parts = [parts[0], "mid", f"block_{int(parts[3]) + 1}", *parts[4:]]
        elif parts[1] == "mid_block":
            names = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out": "proj_out"}
            projected = parts[4] != "group_norm"
            value = value[:, :, None, None] if projected and value.ndim == 2 else value
            parts = [parts[0], "mid", "attn_1", names[parts[4]], parts[-1]]
        elif parts[1] == "conv_norm_out":
            parts[1] = "norm_out"
        renamed[".".join(parts).replace("conv_shortcut", "nin_shortcut")] = value
    return renamed


def _open_clip(state: dict[str, Tensor]) -> dict[str, Tensor]:
    state = {key.removeprefix("text_model."): value for key, value in state.items()}
    fixed = {
        "embeddings.token_embedding.weight": "token_embedding.weight",
        "embeddings.position_embedding.weight": "positional_embedding",
        "final_layer_norm.weight": "ln_final.weight",
        "final_layer_norm.bias": "ln_final.bias",
    }
    renamed = {"text_projection": state["text_projection.weight"].T}
    renamed |= {new: state[old] for old, new in fixed.items()}
    layers = 1 + max(int(key.split(".")[2]) for key in state if key.startswith("encoder.layers."))
    for number in range(layers):
        old, new = f"encoder.layers.{number}", f"transformer.resblocks.{number}"
        for kind in ("weight", "bias"):
            fused = torch.cat([state[f"{old}.self_attn.{part}_proj.{kind}"] for part in "qkv"])
            renamed[f"{new}.attn.in_proj_{kind}"] = fused
            names = {"self_attn.out_proj": "attn.out_proj", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}
            names |= {"layer_norm1": "ln_1", "layer_norm2": "ln_2"}
            renamed |= {f"{new}.{there}.{kind}": state[f"{old}.{here}.{kind}"] for here, there in names.items()}
    return renamed


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def trained(folder: Path | str, dtype: torch.dtype = torch.float32, **sections: dict[str, Any]) -> tuple[Any, Any, Any]:
    """(family, model, adapter) of a tiny recipe, the adapter's weights moved as if it had been trained."""
    from lora_rocm.adapters.attach import inject
    from lora_rocm.families.base import family_for

    recipe = tiny_recipe(folder, **{"lora": {"rank": 4, "alpha": 2.0}, **sections})
    family = family_for(recipe)
    model = family.load(dtype, torch.device("cpu"))
    adapter = inject(family, model, recipe.lora, seed=3)
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapter.parameters.values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=rng))
    return family, model, adapter


def unet_output(unet: torch.nn.Module, prompt_BSD: Tensor | None = None, pooled_BD: Tensor | None = None) -> Tensor:
    """The output of a tiny UNet for fixed inputs (and for a prompt, if given), float32."""
    rng = torch.Generator().manual_seed(2)
    latents = torch.randn(2, 4, 8, 8, generator=rng)
    prompt = torch.randn(2, 77, TEXT_1_WIDTH + TEXT_2_WIDTH, generator=rng) if prompt_BSD is None else prompt_BSD
    pooled = torch.randn(2, PROJECTION, generator=rng) if pooled_BD is None else pooled_BD
    conditioning = {"text_embeds": pooled, "time_ids": torch.tensor([[64, 64, 0, 0, 64, 64]] * 2)}
    with torch.no_grad():
        output: Tensor = unet(latents, torch.tensor([10, 700]), prompt, added_cond_kwargs=conditioning).sample
    return output


def caption_encoder(family: ModelFamily) -> Callable[[str], Tensors]:
    """The joint output of all encoders for one caption, on the CPU."""
    loaded = [
        each.load(plain_placement(torch.device("cpu"))) for each in family.encoders() if each.entry.inputs == (CAPTION,)
    ]
    return lambda caption: {name: t for encode in loaded for name, t in encode({CAPTION: caption}).items()}


def drawn_by(pipeline: Any, request: PreviewRequest) -> Image.Image:
    """The image that a pipeline of diffusers makes for a request."""
    pipeline.set_progress_bar_config(disable=True)
    image: Image.Image = pipeline(
        request.prompt,
        negative_prompt=request.negative_prompt,
        height=request.height,
        width=request.width,
        num_inference_steps=request.steps,
        guidance_scale=request.guidance_scale,
        generator=torch.Generator().manual_seed(request.seed),
    ).images[0]
    return image
