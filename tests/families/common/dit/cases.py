"""The families with a transformer for the tests that they share: tiny bases, and each family's own calls in diffusers.

Dimensions: B batch, C channels, H W latent height and width, S tokens, D width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from diffusers import FluxPipeline, ZImagePipeline
from diffusers.models.transformers import transformer_cosmos
from diffusers.modular_pipelines import AnimaModularPipeline, SequentialPipelineBlocks
from diffusers.modular_pipelines.anima import before_denoise, denoise
from torch import Tensor, nn

from lora_rocm.adapters.attach import inject
from lora_rocm.base_models.loading import BaseSource, ModelLayout
from lora_rocm.families.anima import family as anima
from lora_rocm.families.base import LoadedModel, PreviewRequest, Tensors
from lora_rocm.families.common.caption_lm import OWN, REAL, STATES, filled
from lora_rocm.families.common.dit.packing import unpacked
from lora_rocm.families.flux import family as flux
from lora_rocm.families.flux.encoders import POOLED
from lora_rocm.families.z_image import family as z_image
from tests.families.common.dit.original_names import (
    module_of_anima,
    module_of_flux,
    module_of_z_image,
    of_anima,
    of_flux,
    of_wan_vae,
    of_z_image,
)
from tests.tiny_anima import MEAN, STD, write_tiny_anima
from tests.tiny_flux import CLIP_WIDTH, T5_WIDTH, write_tiny_flux
from tests.tiny_models import _ldm_vae, tiny_recipe
from tests.tiny_z_image import WIDTH, write_tiny_z_image

CPU = torch.device("cpu")
CHANNELS = 4
TEXTS = ("a cat", "blue")


def adapted(family: Any) -> tuple[LoadedModel, Any]:
    """The model with an adapter that has moved from its start."""
    model = family.load(torch.float32, CPU)
    adapter = inject(family, model, family.recipe.lora, 0)
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for leaf in adapter.leaves.values():
            leaf.add_(0.1 * torch.randn(leaf.shape, generator=rng))
    return model, adapter


def padded(tensor: Tensor, length: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(length - len(tensor), *tensor.shape[1:])])


def with_configs(layout: ModelLayout, folder: Path) -> ModelLayout:
    """A layout for files of the size of a tiny base."""
    return replace(layout, configs=folder)


class Case(ABC):
    """A family, and the references of its tests.

    name, cls: of the family. layout: the published one. model: further keys of ``model``.
    layers: preset -> number of layers of the published model. parameters: component -> their number in it.
    prefixes: before the names in some files of the transformer. file_prefix: before names in a LoRA file for others.
    native: whether that file has the original names. by_width: whether only the width of the published model
        distinguishes diffusers' names from other families' names.
    tokenizers: their folders. shift, scale: of latents. changed: how many of the original's weights all-linear changes.
    original_module: diffusers' module -> (the original's, place among its rows).
    """

    name: str
    cls: type[Any]
    layout: ModelLayout
    layers: Mapping[str, int]
    parameters: Mapping[str, int]
    model: Mapping[str, Any] = {}
    prefixes: tuple[str, ...] = ("model.diffusion_model.",)
    file_prefix = "diffusion_model."
    native = False
    tokenizers: tuple[str, ...] = ("tokenizer",)
    shift: float | list[float] = 0.1159
    scale: float | list[float] = 0.3611
    changed: int
    by_width = False
    original_module: Callable[[str], tuple[str, int]]

    def __init__(self, folder: Path) -> None:
        self.folder = self.written(folder)

    @cached_property
    def pipeline(self) -> Any:
        return self.read()

    @cached_property
    def adapted(self) -> tuple[Any, LoadedModel, Any]:
        """(family, model, adapter), for all tests that change none of them."""
        family = self.family(lora={"rank": 2, "alpha": 1, "targets": "all-linear"})
        return (family, *adapted(family))

    @cached_property
    def published(self) -> BaseSource:
        return BaseSource("published", self.layout, self.layout.configs, None)

    @cached_property
    def full(self) -> nn.Module:
        return self.published.skeleton("transformer")

    def family(self, model: Mapping[str, Any] | None = None, folder: Path | None = None, **sections: Any) -> Any:
        keys = {"family": self.name, **self.model, **(model or {})}
        data = {"bucket_step": 16, **sections.pop("data", {})}
        return self.cls(tiny_recipe(folder or self.folder, model=keys, data=data, **sections))

    @abstractmethod
    def written(self, folder: Path) -> Path: ...

    @abstractmethod
    def read(self) -> Any:
        """The base as diffusers' pipeline."""

    @abstractmethod
    def text(self, rows: int) -> Tensors:
        """Random text tensors of a batch."""

    def sample(self, text: Tensors, row: int) -> Tensors:
        """One sample's, without the batch."""
        return {name: tensor[row] for name, tensor in text.items()}

    @abstractmethod
    def velocity(self, transformer: Any, noisy_BCHW: Tensor, sigma_B: Tensor, text: Tensors) -> Tensor:
        """As the pipeline calls its transformer."""

    @abstractmethod
    def sampled(self, request: PreviewRequest, noise_CHW: Tensor, texts: Mapping[str, Tensors]) -> Tensor:
        """The latents [C, H, W] that the pipeline ends at."""

    def posterior(self, pixels_BCHW: Tensor) -> Any:
        return self.pipeline.vae.encode(pixels_BCHW).latent_dist

    def decoded(self, latents_BCHW: Tensor) -> Tensor:
        """The pixels of latents that are not normalised."""
        pixels: Tensor = self.pipeline.vae.decode(latents_BCHW).sample
        return pixels

    def normalised(self, latents_BCHW: Tensor) -> Tensor:
        shift, scale = (torch.tensor(each).reshape(-1, 1, 1) for each in (self.shift, self.scale))
        return (latents_BCHW - shift) * scale

    @abstractmethod
    def original(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The transformer's tensors as the original release names and fuses them."""

    def original_vae(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return _ldm_vae(state)

    def original_modules(self, modules: Iterable[str]) -> dict[str, list[str]]:
        """The original's module -> diffusers' modules, in the order of its rows."""
        found: dict[str, list[str]] = {}
        for module in sorted(modules, key=self.original_module):
            found.setdefault(self.original_module(module)[0], []).append(module)
        return found

    def files(self) -> dict[str, dict[str, Tensor]]:
        """Key of ``model`` -> the tensors of its file, without the transformer's prefix."""
        pipeline = self.pipeline
        text = {f"model.{name}": tensor for name, tensor in pipeline.text_encoder.state_dict().items()}
        transformer = self.original(pipeline.transformer.state_dict())
        return {"name_or_path": transformer, "vae": self.original_vae(pipeline.vae.state_dict()), "text_encoder": text}


class ZImage(Case):
    name, cls, layout = "z-image", z_image.ZImage, z_image.LAYOUT
    layers = {"attention": 120, "attention-mlp": 210, "all-linear": 270}
    parameters = {"transformer": 6_154_908_736, "text_encoder": 4_022_468_096, "vae": 83_819_683}
    changed = 4 * 6 - 1
    original_module = staticmethod(module_of_z_image)

    def written(self, folder: Path) -> Path:
        return write_tiny_z_image(folder)

    def read(self) -> Any:
        return ZImagePipeline.from_pretrained(self.folder, local_files_only=True)

    def text(self, rows: int) -> Tensors:
        """The lengths differ, and masks carry them to the model."""
        rng = torch.Generator().manual_seed(5)
        found = [filled(torch.randn(20 + 25 * row, WIDTH, generator=rng), 32) for row in range(rows)]
        length = max(len(each[STATES]) for each in found)
        return {name: torch.stack([padded(each[name], length) for each in found]) for name in (STATES, REAL, OWN)}

    def sample(self, text: Tensors, row: int) -> Tensors:
        return filled(text[STATES][row][text[REAL][row]], 32)

    def velocity(self, transformer: Any, noisy_BCHW: Tensor, sigma_B: Tensor, text: Tensors) -> Tensor:
        states = [rows[real] for rows, real in zip(text[STATES], text[REAL], strict=True)]
        time_B = (1000 - 1000 * sigma_B) / 1000
        return -torch.stack(transformer(list(noisy_BCHW[:, :, None]), time_B, states, return_dict=False)[0])[:, :, 0]

    def sampled(self, request: PreviewRequest, noise_CHW: Tensor, texts: Mapping[str, Tensors]) -> Tensor:
        """Its guidance scale is one less than in other programs."""
        real = {prompt: [text[STATES][text[REAL]]] for prompt, text in texts.items()}
        latents: Tensor = self.pipeline(
            prompt_embeds=real[request.prompt],
            negative_prompt_embeds=real[request.negative_prompt],
            height=request.height,
            width=request.width,
            num_inference_steps=request.steps,
            guidance_scale=request.guidance_scale - 1,
            latents=noise_CHW[None],
            output_type="latent",
        ).images[0]
        return latents

    def original(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return of_z_image(state)


class Flux(Case):
    name, cls, layout = "flux", flux.Flux, flux.LAYOUT
    layers = {"attention": 266, "attention-mlp": 418, "all-linear": 494}
    parameters = {
        "transformer": 11_901_408_320,
        "text_encoder": 123_060_480,
        "text_encoder_2": 4_762_310_656,
        "vae": 83_819_683,
    }
    model = {"guidance": 3.5}
    guidance: float | None = 3.5
    file_prefix = "transformer."
    tokenizers = ("tokenizer", "tokenizer_2")
    changed = 2 * 5 + 3
    original_module = staticmethod(module_of_flux)

    def written(self, folder: Path) -> Path:
        return write_tiny_flux(folder, schnell=self.guidance is None)

    def read(self) -> Any:
        pipeline = FluxPipeline.from_pretrained(self.folder, local_files_only=True)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def text(self, rows: int) -> Tensors:
        rng = torch.Generator().manual_seed(5)
        states = torch.randn(rows, 12, T5_WIDTH, generator=rng)
        return {STATES: states, POOLED: torch.randn(rows, CLIP_WIDTH, generator=rng)}

    def velocity(self, transformer: Any, noisy_BCHW: Tensor, sigma_B: Tensor, text: Tensors) -> Tensor:
        rows, channels, height, width = noisy_BCHW.shape
        out = transformer(
            hidden_states=FluxPipeline._pack_latents(noisy_BCHW, rows, channels, height, width),
            timestep=(sigma_B * 1000) / 1000,
            guidance=None if self.guidance is None else torch.full([rows], self.guidance),
            pooled_projections=text[POOLED],
            encoder_hidden_states=text[STATES],
            txt_ids=torch.zeros(text[STATES].shape[1], 3),
            img_ids=FluxPipeline._prepare_latent_image_ids(rows, height // 2, width // 2, CPU, torch.float32),
            return_dict=False,
        )[0]
        velocity: Tensor = FluxPipeline._unpack_latents(out, 8 * height, 8 * width, 8)
        return velocity

    def sampled(self, request: PreviewRequest, noise_CHW: Tensor, texts: Mapping[str, Tensors]) -> Tensor:
        text, (channels, height, width) = texts[request.prompt], noise_CHW.shape
        out = self.pipeline(
            prompt_embeds=text[STATES][None],
            pooled_prompt_embeds=text[POOLED][None],
            height=request.height,
            width=request.width,
            num_inference_steps=request.steps,
            guidance_scale=request.guidance_scale,
            latents=FluxPipeline._pack_latents(noise_CHW[None], 1, channels, height, width),
            output_type="latent",
        ).images
        return unpacked(out, height, width)[0]

    def original(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return of_flux(state)

    def files(self) -> dict[str, dict[str, Tensor]]:
        pipeline = self.pipeline
        clip = {f"text_model.{name}": tensor for name, tensor in pipeline.text_encoder.state_dict().items()}
        clip["text_projection.weight"] = torch.zeros(2, 2)  # in some files, and nothing reads it
        t5 = {name: tensor for name, tensor in pipeline.text_encoder_2.state_dict().items() if name != "shared.weight"}
        return {**super().files(), "text_encoder": clip, "text_encoder_2": t5}


class Schnell(Flux):
    model, guidance = {"variant": "schnell"}, None


class Resize:
    """The part of torchvision that ``CosmosTransformer3DModel`` uses; torchvision may be absent."""

    class InterpolationMode:
        NEAREST = "nearest"

    class functional:
        @staticmethod
        def resize(mask: Tensor, size: list[int], interpolation: str) -> Tensor:
            return nn.functional.interpolate(mask, size, mode=interpolation)


class Anima(Case):
    name, cls, layout = "anima", anima.Anima, anima.LAYOUT
    layers = {"attention": 224, "attention-mlp": 280, "all-linear": 448}
    parameters = {
        "transformer": 1_956_405_248,
        "text_conditioner": 134_663_680,
        "text_encoder": 596_049_920,
        "vae": 126_892_531,
    }
    prefixes = ("net.", "diffusion_model.")
    native = True
    tokenizers = ("tokenizer", "t5_tokenizer")
    shift, scale = MEAN, [1 / each for each in STD]
    changed = 2 * (2 * 4 + 2 + 2 * 3)
    by_width = True
    original_module = staticmethod(module_of_anima)

    def written(self, folder: Path) -> Path:
        return write_tiny_anima(folder)

    def read(self) -> Any:
        pipeline = AnimaModularPipeline.from_pretrained(str(self.folder), local_files_only=True)
        pipeline.load_components()
        return pipeline

    def text(self, rows: int) -> Tensors:
        """Most of it zeros, as of a short caption."""
        states = torch.zeros(rows, 512, WIDTH)
        states[:, :9] = torch.randn(rows, 9, WIDTH, generator=torch.Generator().manual_seed(5))
        return {STATES: states}

    def velocity(self, transformer: Any, noisy_BCHW: Tensor, sigma_B: Tensor, text: Tensors) -> Tensor:
        (height, width), as_made = noisy_BCHW.shape[-2:], transformer.config.concat_padding_mask
        transformer.register_to_config(concat_padding_mask=True)
        with patch.object(transformer_cosmos, "transforms", Resize, create=True):
            velocity_BCFHW: Tensor = transformer(
                hidden_states=noisy_BCHW[:, :, None],
                timestep=sigma_B * 1000 / 1000,
                encoder_hidden_states=text[STATES],
                padding_mask=torch.zeros(1, 1, 8 * height, 8 * width),
                return_dict=False,
            )[0]
        transformer.register_to_config(concat_padding_mask=as_made)
        return velocity_BCFHW[:, :, 0]

    def sampled(self, request: PreviewRequest, noise_CHW: Tensor, texts: Mapping[str, Tensors]) -> Tensor:
        """Of the steps behind the text conditioner."""
        steps = {
            "input": before_denoise.AnimaTextInputStep(),
            "latents": before_denoise.AnimaPrepareLatentsStep(),
            "timesteps": before_denoise.AnimaSetTimestepsStep(),
            "denoise": denoise.AnimaDenoiseStep(),
        }
        pipeline = SequentialPipelineBlocks.from_blocks_dict(steps).init_pipeline()
        pipeline.update_components(transformer=self.pipeline.transformer, scheduler=self.pipeline.scheduler)
        assert pipeline.guider.guidance_scale == request.guidance_scale
        with patch.object(transformer_cosmos, "transforms", Resize, create=True):
            latents: Tensor = pipeline(
                prompt_embeds=texts[request.prompt][STATES][None],
                negative_prompt_embeds=texts[request.negative_prompt][STATES][None],
                height=request.height,
                width=request.width,
                num_inference_steps=request.steps,
                num_images_per_prompt=1,
                latents=noise_CHW[None, :, None],
                output="latents",
            )
        return latents[0, :, 0]

    def posterior(self, pixels_BCHW: Tensor) -> Any:
        found = super().posterior(pixels_BCHW[:, :, None])
        found.mean, found.std = found.mean[:, :, 0], found.std[:, :, 0]
        return found

    def decoded(self, latents_BCHW: Tensor) -> Tensor:
        return super().decoded(latents_BCHW[:, :, None])[:, :, 0]

    def original(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return of_anima(state)

    def original_vae(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return of_wan_vae(state)

    def files(self) -> dict[str, dict[str, Tensor]]:
        pipeline, found = self.pipeline, super().files()
        conditioner = pipeline.text_conditioner.state_dict().items()
        found["name_or_path"] |= {f"llm_adapter.{name}": tensor for name, tensor in conditioner}
        found["name_or_path"]["pos_embedder.seq"] = torch.zeros(2)  # in some files, and nothing reads it
        return found
