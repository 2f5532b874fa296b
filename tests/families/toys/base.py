"""Shared parts of the toy families: a base of random weights from a seed, encoders of a few lines, a flow objective.

Dimensions: B batch, C channels, F frames, H W latent height and width, S tokens, D width.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from lora_rocm.dataset.captions.caption_length import TokenLimit
from lora_rocm.dataset.entry_spec import EntrySpec
from lora_rocm.families.base import Drawn, Encode, Encoder, Inputs, LoadedModel, PreviewRequest, Tensors
from lora_rocm.families.common.recompute import Recomputing
from lora_rocm.families.lora_file_names import LoraFileNames
from lora_rocm.families.objectives.base import Draws, Prediction, generators, normal
from lora_rocm.kernels.weight_format import DENSE, WeightFormat
from lora_rocm.recipe.schema import Recipe

WORD_WIDTH = 16


@dataclass(frozen=True)
class ToyEncoder:
    """An encoder without weights: its output is a function of one sample's inputs."""

    entry: EntrySpec
    tensors_of: Callable[[Inputs], Tensors]

    @property
    def fingerprint(self) -> str:
        return f"toy-{self.entry.name}-1"

    def load(self, door: Any) -> Encode:
        return self.tensors_of

    def in_tiles(self) -> Encoder | None:
        return None


def word_states(caption: str) -> Tensor:
    """A state a word, the first for the beginning: float32 [S, D]."""
    words = ("", *caption.split())
    digests = [hashlib.sha256(word.encode()).digest()[:WORD_WIDTH] for word in words]
    return torch.tensor([list(digest) for digest in digests], dtype=torch.float32) / 128 - 1


def kohya_key(component: str, module: str) -> str:
    return f"lora_unet_{module.replace('.', '_')}"


class ToyFamily(ABC):
    """Implements ``ModelFamily`` except for a family's own parts."""

    name: str
    component: str
    targets: str
    text_components: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    texts = None
    inpaints = False

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.all_components = (self.component,)
        self.encoder_dtypes: Mapping[str, torch.dtype] = {}
        self.lora_file_names = LoraFileNames({self.component: "lora_unet_"}, "kohya", kohya_key, self.load_in_diffusers)
        self.lora_targets = {"attention-mlp": {self.component: self.targets}}

    @abstractmethod
    def build(self) -> nn.Module:
        """The base, its weights drawn from the global generator."""

    @abstractmethod
    def encoders(self) -> Sequence[Encoder]: ...

    @cached_property
    def _base(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return self.build().requires_grad_(False).eval()

    @property
    def structure(self) -> str:
        return json.dumps({name: tuple(tensor.shape) for name, tensor in self._base.state_dict().items()})

    def examine(self) -> Sequence[Path]:
        return ()

    def token_limits(self) -> Sequence[TokenLimit]:
        return ()

    def sample_meta(
        self, original_hw: tuple[int, int], crop_top_left: tuple[int, int], target_hw: tuple[int, int]
    ) -> Tensors:
        return {}

    def load(self, dtype: torch.dtype, device: torch.device) -> LoadedModel:
        module = self.skeleton(self.component)
        for name, parameter in module.named_parameters():
            parameter.data = self._base.get_parameter(name).detach().to(device, dtype, copy=True)
        return LoadedModel({self.component: module.to(device)}, dtype, device)

    def weight_format(self, component: str) -> WeightFormat:
        return DENSE

    def skeleton(self, component: str) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            module = self.build().requires_grad_(False).eval()
        for parameter in module.parameters():
            parameter.data = torch.zeros(()).expand(parameter.shape)
        return module

    def fuse(self, model: LoadedModel, triton: bool = True) -> None:
        assert self.component in model.components, "nothing is exchanged"

    def base_facts(self) -> Mapping[str, str]:
        digest = hashlib.sha256()
        for tensor in self._base.state_dict().values():
            digest.update(tensor.numpy().tobytes())
        return {"hash": "", "prediction_type": "", "identity": digest.hexdigest()}

    def load_in_diffusers(self, path: Path, components: Sequence[str]) -> dict[str, nn.Module]:
        raise NotImplementedError(f"{self.name} is not for diffusers")


class ToyTransformer(ToyFamily):
    """A family with one of diffusers' transformers and a flow as its objective."""

    component = "transformer"
    pipeline: type[Any]
    reader_options: Mapping[str, Any] = MappingProxyType({})

    def recompute_activations(self, model: LoadedModel, run: Callable[..., Any] | None = None) -> None:
        transformer: Any = model.components["transformer"]
        transformer.enable_gradient_checkpointing(run or Recomputing(model))

    latents = "latents"
    """Name of the cached latents."""

    @cached_property
    def objective(self) -> FlowObjective:
        return FlowObjective(self.recipe.objective.model_dump()["shift"], self.latents)

    def load_in_diffusers(self, path: Path, components: Sequence[str]) -> dict[str, nn.Module]:
        loaded = self.skeleton("transformer")
        state, metadata = self.pipeline.lora_state_dict(str(path), return_lora_metadata=True)
        how = {"transformer": loaded, "adapter_name": "default", "metadata": metadata, "low_cpu_mem_usage": True}
        self.pipeline.load_lora_into_transformer(state, **how, **self.reader_options)
        return {"transformer": loaded}

    @abstractmethod
    def noise_like(self, request: PreviewRequest) -> Tensor:
        """The noise that a preview starts from."""

    @abstractmethod
    def velocity(self, model: LoadedModel, x: Tensor, sigma_B: Tensor, batch: Tensors) -> Tensor:
        """The model's output for noisy latents."""

    def predict(self, model: LoadedModel, batch: Tensors, draws: Tensors) -> Prediction:
        latents, noise, sigma_B = batch[self.latents], draws["noise"], draws["sigma"]
        share = sigma_B.reshape(-1, *(1,) * (latents.ndim - 1))
        noisy = (1 - share) * latents + share * noise
        predicted = self.velocity(model, noisy, sigma_B, batch)
        return Prediction(predicted, noise - latents, torch.ones_like(sigma_B))

    @torch.no_grad()
    def preview(
        self,
        model: LoadedModel,
        requests: Sequence[PreviewRequest],
        text: Callable[[str], Tensors],
        in_tiles: bool = False,
    ) -> list[Drawn]:
        """Euler's steps without guidance."""
        drawn = []
        for request in requests:
            found = {**text(request.prompt), **self.given(request)}
            batch = {name: tensor[None].to(model.device) for name, tensor in found.items()}
            x = self.noise_like(request).to(model.device)
            for step in range(request.steps):
                sigma_B = torch.full((1,), 1 - step / request.steps, device=model.device)
                x = x - self.velocity(model, x, sigma_B, batch) / request.steps
            drawn.append(self.decoded(x[0], request))
        return drawn

    def given(self, request: PreviewRequest) -> Tensors:
        """The model's inputs other than the prompt, without a batch dimension."""
        return {}

    def decoded(self, latents: Tensor, request: PreviewRequest) -> Drawn:
        """The preview; the first three channels of the latents are its colours."""
        return painted(latents[:3], request)


def painted(colours_CHW: Tensor, request: PreviewRequest) -> Image.Image:
    """An image of three channels of latents."""
    colours_HWC = ((colours_CHW.permute(1, 2, 0).cpu() + 1) * 127.5).clamp(0, 255).to(torch.uint8)
    image = Image.fromarray(colours_HWC.numpy())
    return image.resize((request.width, request.height), Image.Resampling.NEAREST)


@dataclass(frozen=True)
class FlowObjective:
    """Predict ``noise - latents`` of ``(1 - sigma) * latents + sigma * noise``; sigma is a float, one a sample."""

    shift: float
    latents: str

    def draw(self, batch: Mapping[str, Tensor], seeds: Sequence[int]) -> Draws:
        rngs = generators(seeds)
        even_B = torch.cat([torch.rand(1, generator=rng) for rng in rngs])
        sigma_B = self.shift * even_B / (1 + (self.shift - 1) * even_B)
        return Draws({"sigma": sigma_B, "noise": normal(rngs, batch[self.latents].shape[1:])})

    def fixed_draw(self, batch: Mapping[str, Tensor], seeds: Sequence[int], position: float) -> Draws:
        drawn = self.draw(batch, seeds).tensors
        return Draws({**drawn, "sigma": torch.full_like(drawn["sigma"], position)})
