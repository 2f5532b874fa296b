"""The SDXL family (arXiv 2307.01952) and its fine-tunes.

Dimensions: B batch, C channels, H W latent height and width, S tokens, D width.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers import AutoencoderKL, StableDiffusionXLPipeline, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from lora_rocm.data.cache import HashMemory
from lora_rocm.data.caption_length import TokenLimit
from lora_rocm.families import conversion, diffusion, sdxl_check, sdxl_fused, sdxl_keys, text
from lora_rocm.families.base import Draws, Encoder, LoadedModel, LossTerms, PreviewRequest, Tensors, TensorSpec
from lora_rocm.families.loading import WEIGHTS_MEMORY, Layout, Part, Source, resolve
from lora_rocm.families.random_weights import PREFIX, random_source
from lora_rocm.families.recompute import TOGETHER, Recomputing
from lora_rocm.families.sdxl_encoders import TextEncoder, TokenEncoder, VaeEncoder
from lora_rocm.families.sdxl_preview import draw_pictures
from lora_rocm.families.weightfiles import legacy_model_hash

if TYPE_CHECKING:
    from PIL import Image

    from lora_rocm.recipe.schema import Recipe

LAYOUT = Layout(
    parts={
        "unet": Part(UNet2DConditionModel, "model.diffusion_model.", conversion.unet_of_ldm),
        "vae": Part(AutoencoderKL, "first_stage_model.", conversion.vae_of_ldm, other_prefixes=("vae.",)),
        "text_encoder": Part(CLIPTextModel, "conditioner.embedders.0.", conversion.clip_of_ldm),
        "text_encoder_2": Part(
            CLIPTextModelWithProjection,
            "conditioner.embedders.1.",
            conversion.open_clip_of_ldm("conditioner.embedders.1.model."),
        ),
    },
    tokenizers=("tokenizer", "tokenizer_2"),
    configs=Path(__file__).parents[1] / "sdxl_config",
    tokenizers_repo="stabilityai/stable-diffusion-xl-base-1.0",
)
TEXT_COMPONENTS = ("text_encoder", "text_encoder_2")


class Sdxl:
    """Implements ``ModelFamily`` for SDXL."""

    name = "sdxl"
    text_components = TEXT_COMPONENTS
    all_components = tuple(LAYOUT.parts)
    lora_targets: Mapping[str, Mapping[str, str]] = {
        preset: {"unet": pattern, **dict.fromkeys(TEXT_COMPONENTS, sdxl_keys.TEXT)}
        for preset, pattern in sdxl_keys.UNET_TARGETS.items()
    }

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    @property
    def source(self) -> Source:
        """The base model that the recipe names, found and recognised, with nothing loaded.

        Raises:
            ModelError: it is missing, damaged, or not an SDXL that can be trained on.
        """
        return self._recognised[0]

    @property
    def notices(self) -> Sequence[str]:
        return self._recognised[1]

    @cached_property
    def _recognised(self) -> tuple[Source, tuple[str, ...]]:
        model = self.recipe.model
        if model.name_or_path.startswith(PREFIX):
            return random_source(model.name_or_path, LAYOUT), ()
        source = resolve(model, LAYOUT, HashMemory(Path(self.recipe.cache.dir), WEIGHTS_MEMORY))
        notices = sdxl_check.check(source)
        sdxl_check.check_scheduler(source, self._scheduler_config(source))
        return source, notices

    @cached_property
    def schedule(self) -> diffusion.NoiseSchedule:
        """The noise schedule to train on."""
        return diffusion.noise_schedule(self.scheduler_config, self.scheduler_config["prediction_type"], self._zero_snr)

    @cached_property
    def scheduler_config(self) -> dict[str, Any]:
        """The model's scheduler config, with the recipe's choices and a one-file checkpoint's own marks filled in."""
        return self._scheduler_config(self.source)

    def _scheduler_config(self, source: Source) -> dict[str, Any]:
        config = source.config("scheduler")
        # the convention that ComfyUI reads: a v-prediction checkpoint has a tensor v_pred, and ztsnr where its schedule
        # ends in pure noise
        marks = set() if source.single_header is None else set(source.single_header.tensors)
        prediction: str = self.recipe.model.prediction_type
        if prediction == "auto":
            prediction = "v_prediction" if "v_pred" in marks else config.get("prediction_type", "epsilon")
        zero_snr = (
            self.recipe.objective.zero_terminal_snr or "ztsnr" in marks or bool(config.get("rescale_betas_zero_snr"))
        )
        return config | {"prediction_type": prediction, "rescale_betas_zero_snr": zero_snr}

    @property
    def _zero_snr(self) -> bool:
        return bool(self.scheduler_config["rescale_betas_zero_snr"])

    @property
    def cache_spec(self) -> Mapping[str, TensorSpec]:
        return {name: spec for encoder in self.encoders() for name, spec in encoder.outputs.items()}

    def encoders(self) -> Sequence[Encoder]:
        words = TokenEncoder if self.recipe.lora.train_text_encoder else TextEncoder
        return [VaeEncoder(self.source), words(self.source)]

    def sample_meta(
        self, original_hw: tuple[int, int], crop_top_left: tuple[int, int], target_hw: tuple[int, int]
    ) -> Tensors:
        """SDXL's size and crop conditioning (section 2.2), in the order of ``_get_add_time_ids``: int64 [6]."""
        return {"time_ids": torch.tensor([*original_hw, *crop_top_left, *target_hw], dtype=torch.int64)}

    def token_limits(self) -> Sequence[TokenLimit]:
        """The tokenizer of each text encoder, and how many tokens it reads."""
        paths = [self.source.tokenizer_path(name) for name in LAYOUT.tokenizers]
        return [text.token_limit(text.load_tokenizer(path)) for path in paths]

    def examine(self) -> Sequence[Path]:
        return self.source.files()

    def load(self, dtype: torch.dtype, device: torch.device) -> LoadedModel:
        components = {name: self.source.load(name, dtype, device) for name in self._trained}
        return LoadedModel(components, dtype, device)

    def blocks(self, model: LoadedModel) -> list[nn.Module]:
        """ResNets and transformer blocks of the UNet that diffusers can compute again: all but the middle's first."""
        unet: Any = model.components["unet"]
        found: list[nn.Module] = []
        for part in [*unet.down_blocks, unet.mid_block, *unet.up_blocks]:
            attentions = [list(attention.transformer_blocks) for attention in getattr(part, "attentions", ())]
            resnets = [[resnet] for resnet in part.resnets]
            pairs = (attentions, resnets[1:]) if part is unet.mid_block else (resnets, attentions)
            for first, second in zip_longest(*pairs, fillvalue=[]):
                found += [*first, *second]
        return found

    def recompute_activations(self, model: LoadedModel, run: Callable[..., Any] | None = None) -> None:
        """Of the UNet: the text encoders' activations are small."""
        unet: Any = model.components["unet"]
        unet.enable_gradient_checkpointing(run or Recomputing(model, together=TOGETHER))

    def example(self, height: int, width: int, rows: int) -> Tensors:
        vae, unet = self.source.config("vae"), self.source.config("unet")
        side_px = 2 ** (len(vae["block_out_channels"]) - 1)
        latents = torch.zeros(rows, int(vae["latent_channels"]), height // side_px, width // side_px)
        size = torch.tensor([[height, width, 0, 0, height, width]], dtype=torch.int64).expand(rows, -1).contiguous()
        pooled = int(unet["projection_class_embeddings_input_dim"]) - 6 * int(unet["addition_time_embed_dim"])
        batch = {"latent_mean": latents, "latent_std": latents.clone(), "time_ids": size}
        if self.recipe.lora.train_text_encoder:
            ids = torch.zeros(rows, text.CLIP_TOKENS, dtype=torch.int64)
            return batch | {"input_ids_1": ids, "input_ids_2": ids.clone()}
        prompt = torch.zeros(rows, text.CLIP_TOKENS, int(unet["cross_attention_dim"]))
        return batch | {"prompt_embeds": prompt, "pooled_embeds": torch.zeros(rows, pooled)}

    def fuse(self, model: LoadedModel, triton: bool = True) -> None:
        unet: Any = model.components["unet"]
        sdxl_fused.fuse(unet, sdxl_fused.fusion_for(model.device, triton))

    def draw(self, batch: Tensors, seeds: Sequence[int]) -> Draws:
        rngs = diffusion.generators(seeds)
        return self._draws(batch, rngs, diffusion.uniform_timesteps(rngs, len(self.schedule)))

    def fixed_draw(self, batch: Tensors, seeds: Sequence[int], position: float) -> Draws:
        timestep = round(position * (len(self.schedule) - 1))
        return self._draws(batch, diffusion.generators(seeds), torch.full((len(seeds),), timestep, dtype=torch.int64))

    def _draws(self, batch: Tensors, rngs: list[torch.Generator], timesteps_B: Tensor) -> Draws:
        """All that the loss needs besides the batch, also what is looked up on the host: so ``loss`` moves nothing."""
        shape = batch["latent_mean"].shape[1:]
        posterior_BCHW = diffusion.normal(rngs, shape)
        noise_BCHW = diffusion.offset_noise(diffusion.normal(rngs, shape), rngs, self.recipe.objective.noise_offset)
        signal_B, noise_level_B = self.schedule.levels(timesteps_B)
        weight_B = diffusion.min_snr_weight(
            signal_B, noise_level_B, self.recipe.objective.min_snr_gamma, self.schedule.prediction_type
        )
        shift_C, scale_C = self.latent_normalisation
        return Draws(
            {
                "timesteps": timesteps_B,
                "posterior": posterior_BCHW,
                "noise": noise_BCHW,
                "signal": signal_B,
                "noise_level": noise_level_B,
                "snr_weight": weight_B,
                "latent_shift": shift_C.expand(len(rngs), -1).contiguous(),
                "latent_scale": scale_C.expand(len(rngs), -1).contiguous(),
            }
        )

    @cached_property
    def latent_normalisation(self) -> tuple[Tensor, Tensor]:
        """(shift_C, scale_C), float32: the model sees ``(latents - shift) * scale``, as the pipeline decodes."""
        config = self.source.config("vae")
        channels, factor = int(config["latent_channels"]), float(config.get("scaling_factor", 0.18215))
        if config.get("latents_mean") is not None and config.get("latents_std") is not None:
            std_C = torch.tensor(config["latents_std"], dtype=torch.float32)
            return torch.tensor(config["latents_mean"], dtype=torch.float32), factor / std_C
        return torch.zeros(channels), torch.full((channels,), factor)

    def loss(self, model: LoadedModel, batch: Tensors, draws: Tensors) -> LossTerms:
        """Mean squared error of the prediction, weighted by min-SNR: float32 [B]."""
        latents_BCHW = diffusion.sample_posterior(batch["latent_mean"], batch["latent_std"], draws["posterior"])
        shift, scale = (draws[name][:, :, None, None] for name in ("latent_shift", "latent_scale"))
        latents_BCHW = (latents_BCHW - shift) * scale
        levels = (draws["signal"], draws["noise_level"])
        noisy_BCHW = diffusion.add_noise(latents_BCHW, draws["noise"], *levels)
        target_BCHW = draws["noise"]
        if self.schedule.prediction_type == "v_prediction":
            target_BCHW = diffusion.velocity(latents_BCHW, draws["noise"], *levels)
        prompt_BSD, pooled_BD = self._text(model, batch)
        prediction_BCHW = model.components["unet"](
            noisy_BCHW.to(model.dtype),
            draws["timesteps"],
            encoder_hidden_states=prompt_BSD.to(model.dtype),
            added_cond_kwargs={"text_embeds": pooled_BD.to(model.dtype), "time_ids": batch["time_ids"]},
            return_dict=False,
        )[0]
        squared_B = (prediction_BCHW.float() - target_BCHW).square().mean(dim=(1, 2, 3))
        return LossTerms(squared_B * draws["snr_weight"])

    def _text(self, model: LoadedModel, batch: Tensors) -> tuple[Tensor, Tensor]:
        if "prompt_embeds" in batch:
            return batch["prompt_embeds"], batch["pooled_embeds"]
        encoders = [model.components[name] for name in self.text_components]
        return text.embed(encoders, [batch["input_ids_1"], batch["input_ids_2"]])

    def preview(
        self,
        model: LoadedModel,
        requests: Sequence[PreviewRequest],
        text: Callable[[str], Tensors],
        in_tiles: bool = False,
    ) -> list[Image.Image]:
        def embeddings(prompt: str) -> tuple[Tensor, Tensor]:
            tensors = {name: tensor[None].to(model.device) for name, tensor in text(prompt).items()}
            return self._text(model, tensors)

        how = (embeddings, self.latent_normalisation, in_tiles)
        return draw_pictures(self.source, self.scheduler_config, model, requests, *how)

    def base_facts(self) -> Mapping[str, str]:
        file = self.source.single_file
        return {
            "hash": "" if file is None else legacy_model_hash(file),
            "prediction_type": self.scheduler_config["prediction_type"],
            "identity": self._identity,
        }

    @cached_property
    def _identity(self) -> str:
        """Of what is trained on, and of what it is trained towards. The encoders' are in the cache keys."""
        parts = [*(self.source.fingerprint(name) for name in self._trained), self.source.settings("scheduler")]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def _trained(self) -> tuple[str, ...]:
        return ("unet", *(self.text_components if self.recipe.lora.train_text_encoder else ()))

    @property
    def structure(self) -> str:
        return json.dumps([self.source.settings(name) for name in self._trained])

    def skeleton(self, component: str) -> nn.Module:
        return self.source.skeleton(component)

    def load_in_diffusers(self, path: Path, components: Sequence[str]) -> dict[str, nn.Module]:
        loaded = {name: self.skeleton(name) for name in components}
        loader, unet = StableDiffusionXLPipeline, loaded.get("unet") or self.skeleton("unet")
        state, alphas, metadata = loader.lora_state_dict(str(path), unet_config=unet.config, return_lora_metadata=True)
        how = {"network_alphas": alphas, "metadata": metadata, "adapter_name": "default", "low_cpu_mem_usage": True}
        for name, module in loaded.items():
            if name == "unet":
                loader.load_lora_into_unet(state, unet=module, **how)
            else:
                loader.load_lora_into_text_encoder(state, text_encoder=module, prefix=name, **how)
        return loaded

    def export_key(self, component: str, module: str) -> str:
        return sdxl_keys.kohya_key(component, module, self.source.config("unet"))
