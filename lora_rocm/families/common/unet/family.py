"""Base class of families with a UNet, a VAE and CLIP text encoders.

Dimensions: B batch, C channels, H W latent height and width, S tokens, D width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lora_rocm.base_models.loading import BaseSource
from lora_rocm.dataset.captions.caption_length import TokenLimit
from lora_rocm.families.base import Encoder, LoadedModel, PreviewRequest, Tensors
from lora_rocm.families.common import clip
from lora_rocm.families.common.latent_family import LatentFamily
from lora_rocm.families.common.recompute import Recomputing
from lora_rocm.families.common.unet import detect, fused_unet, inpainting, lora_file_names
from lora_rocm.families.common.unet.sampling import sample_images
from lora_rocm.families.common.vae import VaeEncoder
from lora_rocm.families.lora_file_names import LoraFileNames, Rows
from lora_rocm.families.objectives import schedulers
from lora_rocm.families.objectives.base import SEEN_LATENTS, Prediction
from lora_rocm.families.objectives.ddpm import DdpmObjective, DdpmSettings, check_weighting
from lora_rocm.families.spec import CheckpointSection
from lora_rocm.kernels.backend import implementation_for

if TYPE_CHECKING:
    from PIL import Image


PACKED_LAYERS = r"\.transformer_blocks\."
"""Regular expression of layers that ``model.quantization`` quantises. Layers of the time step and of the ResNets are
small and stay dense.
"""


class LdmFamily(LatentFamily):
    """Implements the part of ``ModelFamily`` that families with a UNet share.

    Attributes:
        expected: properties by which the family's models are recognised.
        pipeline: diffusers class that loads LoRA files and samples previews.
        prefixes: see ``LoraFileNames``.
        token_names: names in the batch of the token ids, one for each text encoder.
    """

    component = "unet"
    packed_layers = PACKED_LAYERS
    expected: detect.Expected
    pipeline: type[Any]
    prefixes: Mapping[str, str]
    token_names: tuple[str, ...]

    @abstractmethod
    def conditioning(self, model: LoadedModel, batch: Tensors) -> dict[str, Any]:
        """Return the UNet's arguments except latents and timesteps, in the model's dtype."""

    @abstractmethod
    def prompt_arguments(self, model: LoadedModel, batch: Tensors) -> dict[str, Tensor]:
        """Return the pipeline's prompt arguments ("prompt_embeds", ...) from cached tensors on the model's device."""

    @abstractmethod
    def make_pipeline(self, unet: nn.Module, scheduler: Any) -> Any:
        """Return a pipeline that consists of only the UNet and the scheduler."""

    @abstractmethod
    def text_encoders(self) -> Sequence[Encoder]:
        """Return the encoders of captions for the cache, for runs in which no step runs the text encoders."""

    def encoders(self) -> Sequence[Encoder]:
        lora = self.recipe.lora
        if not lora.tokenises:
            return [VaeEncoder(self.source), *self.text_encoders()]
        tokens = clip.TokenEncoder(self.source, self.token_names, self.max_tokens, lora.new_tokens)
        return [VaeEncoder(self.source), tokens]

    @property
    def lora_targets(self) -> Mapping[str, Mapping[str, str]]:
        text = dict.fromkeys(self.text_components, lora_file_names.TEXT)
        return {preset: {"unet": pattern, **text} for preset, pattern in lora_file_names.UNET_TARGETS.items()}

    @abstractmethod
    def kohya_key(self, component: str, module: str) -> str:
        """Return a module's name in kohya's format (see ``LoraFileNames.key``)."""

    @cached_property
    def lora_file_names(self) -> LoraFileNames:
        def original(component: str, module: str, rows: int) -> Rows:
            if component != self.component:
                return ()
            return ((lora_file_names.sgm_name(module, self.source.config(component)), 0, rows),)

        def scripts(component: str, module: str, rows: int) -> Rows:
            return ((self.kohya_key(component, module), 0, rows),)  # kohya's scripts read kohya's names

        return LoraFileNames(self.prefixes, "kohya", self.kohya_key, self._load_in_diffusers, original, scripts)

    def check(self, source: BaseSource) -> tuple[str, ...]:
        notices, config = detect.check(source, self.expected, self.recipe.registry), self._scheduler_config(source)
        unet = source.config("unet")
        unet.whole("layers_per_block", 2), unet.texts("up_block_types")  # for the names in the file
        inpainting.require_masks_read(source.config("unet").whole("in_channels", 4), self.recipe.sample)
        chosen = self._settings.decides(self.marks(source))
        notices += schedulers.ddpm_notices(source, self.published_scheduler(source), chosen)
        asked = self.recipe.sample
        samplers = {asked.sampler, *(each[2].sampler or asked.sampler for each in asked.numbered())}
        detect.check_scheduler(source, config, samplers)
        check_weighting(self._settings.section, config)
        return notices

    @property
    def inpaints(self) -> bool:
        return self.source.config("unet").whole("in_channels", 4) == inpainting.CHANNELS

    @property
    def max_tokens(self) -> int:
        """Maximum number of a caption's tokens that are read."""
        section = self.recipe.model
        assert isinstance(section, CheckpointSection), "the spec of a family with a UNet has this section"
        return section.max_token_length

    @property
    def prediction_type(self) -> str:
        return str(self.scheduler_config["prediction_type"])

    @cached_property
    def objective(self) -> DdpmObjective:
        return DdpmObjective(self.scheduler_config, self.latents, self._settings.section)

    @cached_property
    def scheduler_config(self) -> dict[str, Any]:
        """The base's scheduler config, with the choices of the recipe and of a one-file checkpoint's marks applied."""
        return self._scheduler_config(self.source)

    def _scheduler_config(self, source: BaseSource) -> dict[str, Any]:
        published = schedulers.completed(source, self.published_scheduler(source))
        return self._settings.decided(published, self.marks(source))

    @property
    def _settings(self) -> DdpmSettings:
        return DdpmSettings.from_recipe(self.recipe)

    def published_scheduler(self, source: BaseSource) -> dict[str, Any]:
        """Return the base's own scheduler config."""
        return dict(source.config("scheduler").values)

    def marks(self, source: BaseSource) -> set[str]:
        """Return tensor names of a one-file checkpoint, which may describe its noise schedule.

        ``DdpmSettings.decided`` interprets them.
        """
        return set() if source.single_header is None else set(source.single_header.tensors)

    def token_limits(self) -> Sequence[TokenLimit]:
        """Return the tokenizer and the token limit of each text encoder."""
        new = self.recipe.lora.new_tokens
        tokenizers = [clip.tokenizer_of(self.source, name, new) for name in self.layout.tokenizers]
        return [clip.token_limit(tokenizer, self.max_tokens + 2) for tokenizer in tokenizers]

    def blocks(self, model: LoadedModel) -> list[nn.Module]:
        """Return the UNet's ResNets and transformer blocks that diffusers can recompute (see ``blocks_of``)."""
        return blocks_of(model.components["unet"])

    def recompute_activations(self, model: LoadedModel, run: Callable[..., Any] | None = None) -> None:
        """Recompute the UNet's activations. The text encoders' activations are small and are kept."""
        unet: Any = model.components["unet"]
        unet.enable_gradient_checkpointing(run or Recomputing(model, together=True))

    def fuse(self, model: LoadedModel, triton: bool = True) -> None:
        unet: Any = model.components["unet"]
        implementation = implementation_for(model.device, triton)
        fused_unet.fuse(unet, implementation, channels_last=implementation == "triton")

    def predict(self, model: LoadedModel, batch: Tensors, draws: Tensors) -> Prediction:
        noisy_BCHW, target_BCHW = self.objective.noised(batch, draws)
        if self.inpaints:
            noisy_BCHW = inpainting.joined(noisy_BCHW, batch, self.latents.normalised(batch[SEEN_LATENTS], draws))
        prediction_BCHW = model.components["unet"](
            noisy_BCHW.to(model.dtype), draws["timesteps"], **self.conditioning(model, batch), return_dict=False
        )[0]
        return self.objective.prediction(prediction_BCHW, target_BCHW, draws)

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

    def _load_in_diffusers(self, path: Path, components: Sequence[str]) -> dict[str, nn.Module]:
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


def blocks_of(unet: Any) -> list[nn.Module]:
    """Return a UNet's blocks that diffusers can recompute, in forward order.

    These are all ResNets and transformer blocks except the first ResNet of the middle block.
    """
    found: list[nn.Module] = []
    none: list[nn.Module] = []
    for part in [*unet.down_blocks, unet.mid_block, *unet.up_blocks]:
        attentions = [list(attention.transformer_blocks) for attention in getattr(part, "attentions", ())]
        resnets = [[resnet] for resnet in part.resnets]
        pairs = (attentions, resnets[1:]) if part is unet.mid_block else (resnets, attentions)
        for first, second in zip_longest(*pairs, fillvalue=none):
            found += [*first, *second]
    return found
