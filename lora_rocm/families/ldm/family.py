"""The shared implementation of families with a UNet, a VAE and CLIP text encoders.

Dimensions: B batch, C channels, H W latent height and width, S tokens, D width.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lora_rocm.base_models.loading import WEIGHTS_MEMORY, Layout, Source, resolve
from lora_rocm.base_models.random_weights import PREFIX, random_source
from lora_rocm.base_models.safetensors_file import legacy_model_hash
from lora_rocm.cache_files.hash_memory import HashMemory
from lora_rocm.dataset.caption_length import TokenLimit
from lora_rocm.dataset.entry_spec import TensorSpec
from lora_rocm.dataset.shape import Shape
from lora_rocm.families import clip
from lora_rocm.families.base import Encoder, LoadedModel, PreviewRequest, Tensors
from lora_rocm.families.ldm import detect, fused_unet, kohya_keys
from lora_rocm.families.ldm.blocks import blocks_of
from lora_rocm.families.ldm.fusion_options import fusion_for
from lora_rocm.families.ldm.sampling import sample_images
from lora_rocm.families.objectives.base import LatentSpace, Prediction
from lora_rocm.families.objectives.ddpm import DdpmObjective, DdpmSettings
from lora_rocm.families.recompute import TOGETHER, Recomputing
from lora_rocm.families.spec import CheckpointSection
from lora_rocm.kernels.quantised import quantised
from lora_rocm.kernels.weight_format import DENSE, WeightFormat

if TYPE_CHECKING:
    from PIL import Image

    from lora_rocm.recipe.schema import Recipe

PACKED_LAYERS = r"\.transformer_blocks\."
"""Layers that ``model.quantization`` packs. Those of the time step and of the ResNets are small and stay dense."""


class LdmFamily(ABC):
    """Implements the shared part of ``ModelFamily``. A family sets the attributes and defines the abstract methods.

    Attributes:
        layout: the components of its models.
        expected: marks by which its models are recognised.
        pipeline: diffusers' class, which loads LoRA files and samples previews.
    """

    name: str
    layout: Layout
    expected: detect.Expected
    pipeline: type[Any]
    text_components: tuple[str, ...]
    kohya_prefixes: Mapping[str, str]

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    @abstractmethod
    def encoders(self) -> Sequence[Encoder]: ...

    @abstractmethod
    def sample_meta(
        self, original_hw: tuple[int, int], crop_top_left: tuple[int, int], target_hw: tuple[int, int]
    ) -> Tensors: ...

    @abstractmethod
    def text_example(self, rows: int) -> Tensors:
        """The text tensors of ``example``: zeros with ``rows`` samples."""

    @abstractmethod
    def conditioning(self, model: LoadedModel, batch: Tensors) -> dict[str, Any]:
        """The UNet's arguments besides latents and timesteps, in the model's dtype."""

    @abstractmethod
    def prompt_arguments(self, model: LoadedModel, batch: Tensors) -> dict[str, Tensor]:
        """The pipeline's prompt arguments ("prompt_embeds", ...) from cached tensors on the model's device."""

    @abstractmethod
    def make_pipeline(self, unet: nn.Module, scheduler: Any) -> Any:
        """A pipeline that consists of the UNet and the scheduler alone."""

    @abstractmethod
    def export_key(self, component: str, module: str) -> str: ...

    def export_rows(self, component: str, module: str, rows: int) -> Sequence[tuple[str, int, int]]:
        return ((self.export_key(component, module), 0, rows),)

    @property
    def all_components(self) -> tuple[str, ...]:
        return tuple(self.layout.parts)

    @property
    def lora_targets(self) -> Mapping[str, Mapping[str, str]]:
        text = dict.fromkeys(self.text_components, kohya_keys.TEXT)
        return {preset: {"unet": pattern, **text} for preset, pattern in kohya_keys.UNET_TARGETS.items()}

    @property
    def source(self) -> Source:
        """The recipe's base model, found and checked but not loaded.

        Raises:
            ModelError: it is missing, damaged, of another family, or cannot be trained on.
        """
        return self._recognised[0]

    @property
    def notices(self) -> Sequence[str]:
        return self._recognised[1]

    @cached_property
    def _recognised(self) -> tuple[Source, tuple[str, ...]]:
        model = self.recipe.model
        assert isinstance(model, CheckpointSection)
        if model.name_or_path.startswith(PREFIX):
            return random_source(model.name_or_path, self.layout), ()
        source = resolve(model, self.layout, HashMemory(Path(self.recipe.cache.dir), WEIGHTS_MEMORY))
        notices = detect.check(source, self.expected)
        detect.check_scheduler(source, self._scheduler_config(source))
        return source, notices

    @cached_property
    def objective(self) -> DdpmObjective:
        return DdpmObjective(self.scheduler_config, self.latents, DdpmSettings.from_recipe(self.recipe))

    @cached_property
    def scheduler_config(self) -> dict[str, Any]:
        """The model's scheduler config, with the recipe's choices and a one-file checkpoint's marks applied."""
        return self._scheduler_config(self.source)

    def _scheduler_config(self, source: Source) -> dict[str, Any]:
        return DdpmSettings.from_recipe(self.recipe).decided(self.published_scheduler(source), self.marks(source))

    def published_scheduler(self, source: Source) -> dict[str, Any]:
        """The scheduler config of the base."""
        return source.config("scheduler")

    def marks(self, source: Source) -> set[str]:
        """Tensor names of a one-file checkpoint, which may mark its noise schedule (see ``DdpmSettings.decided``)."""
        return set() if source.single_header is None else set(source.single_header.tensors)

    @property
    def cache_spec(self) -> Mapping[str, TensorSpec]:
        return {name: spec for encoder in self.encoders() for name, spec in encoder.entry.tensors.items()}

    def token_limits(self) -> Sequence[TokenLimit]:
        """The tokenizer and the token limit of each text encoder."""
        paths = [self.source.tokenizer_path(name) for name in self.layout.tokenizers]
        return [clip.token_limit(clip.load_tokenizer(path)) for path in paths]

    def examine(self) -> Sequence[Path]:
        return self.source.files()

    def load(self, dtype: torch.dtype, device: torch.device) -> LoadedModel:
        components = {name: self.source.load(name, dtype, device, self.weight_format(name)) for name in self._trained}
        return LoadedModel(components, dtype, device)

    def weight_format(self, component: str) -> WeightFormat:
        return quantised(self.recipe.model.quantization, PACKED_LAYERS) if component == "unet" else DENSE

    def blocks(self, model: LoadedModel) -> list[nn.Module]:
        """ResNets and transformer blocks of the UNet that diffusers can recompute (see ``blocks_of``)."""
        return blocks_of(model.components["unet"])

    def recompute_activations(self, model: LoadedModel, run: Callable[..., Any] | None = None) -> None:
        """Recompute the UNet's activations. Those of the text encoders are small and are kept."""
        unet: Any = model.components["unet"]
        unet.enable_gradient_checkpointing(run or Recomputing(model, together=TOGETHER))

    def example(self, shape: Shape, rows: int) -> Tensors:
        height, width = shape["h"], shape["w"]
        vae = self.source.config("vae")
        side_px = 2 ** (len(vae["block_out_channels"]) - 1)
        latents = torch.zeros(rows, int(vae["latent_channels"]), height // side_px, width // side_px)
        meta = self.sample_meta((height, width), (0, 0), (height, width))
        repeated = {name: tensor.expand(rows, *tensor.shape).contiguous() for name, tensor in meta.items()}
        return {"latent_mean": latents, "latent_std": latents.clone(), **repeated, **self.text_example(rows)}

    def fuse(self, model: LoadedModel, triton: bool = True) -> None:
        unet: Any = model.components["unet"]
        fused_unet.fuse(unet, fusion_for(model.device, triton))

    @cached_property
    def latents(self) -> LatentSpace:
        """The normalisation ``(latents - shift) * scale``, as diffusers' pipelines decode."""
        config = self.source.config("vae")
        channels, factor = int(config["latent_channels"]), float(config.get("scaling_factor", 0.18215))
        if config.get("latents_mean") is not None and config.get("latents_std") is not None:
            std_C = torch.tensor(config["latents_std"], dtype=torch.float32)
            return LatentSpace(torch.tensor(config["latents_mean"], dtype=torch.float32), factor / std_C)
        return LatentSpace(torch.zeros(channels), torch.full((channels,), factor))

    def predict(self, model: LoadedModel, batch: Tensors, draws: Tensors) -> Prediction:
        noisy_BCHW, target_BCHW = self.objective.noised(batch, draws)
        prediction_BCHW = model.components["unet"](
            noisy_BCHW.to(model.dtype), draws["timesteps"], **self.conditioning(model, batch), return_dict=False
        )[0]
        return Prediction(prediction_BCHW, target_BCHW, draws["snr_weight"])

    def preview(
        self,
        model: LoadedModel,
        requests: Sequence[PreviewRequest],
        text: Callable[[str], Tensors],
        in_tiles: bool = False,
    ) -> list[Image.Image]:
        def embeddings(prompt: str) -> dict[str, Tensor]:
            tensors = {name: tensor[None].to(model.device) for name, tensor in text(prompt).items()}
            return self.prompt_arguments(model, tensors)

        return sample_images(
            self.source,
            self.scheduler_config,
            model,
            requests,
            self.make_pipeline,
            embeddings,
            self.latents,
            in_tiles,
        )

    def base_facts(self) -> Mapping[str, str]:
        file = self.source.single_file
        return {
            "hash": "" if file is None else legacy_model_hash(file),
            "prediction_type": self.scheduler_config["prediction_type"],
            "identity": self._identity,
        }

    @cached_property
    def _identity(self) -> str:
        """Identity of the trained components and of the noise schedule. The encoders' are in the cache keys."""
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
        loader, unet = self.pipeline, loaded.get("unet") or self.skeleton("unet")
        state, alphas, metadata = loader.lora_state_dict(str(path), unet_config=unet.config, return_lora_metadata=True)
        how = {"network_alphas": alphas, "metadata": metadata, "adapter_name": "default", "low_cpu_mem_usage": True}
        for name, module in loaded.items():
            if name == "unet":
                loader.load_lora_into_unet(state, unet=module, **how)
            else:
                loader.load_lora_into_text_encoder(state, text_encoder=module, prefix=name, **how)
        return loaded
