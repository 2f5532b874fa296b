"""Base class of families that denoise a VAE's latents, with components of diffusers' classes.

Dimensions: B batch, C channels, H W latent height and width.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from lora_rocm.base_models.loading import BaseSource, ModelLayout, resolve
from lora_rocm.base_models.random_weights import PREFIX, random_source
from lora_rocm.base_models.safetensors_file import legacy_model_hash
from lora_rocm.cache_store.hash_memory import WEIGHTS_MEMORY, HashMemory
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.errors import ModelError
from lora_rocm.families.base import Encoder, LoadedModel, Tensors
from lora_rocm.families.lora_file_names import LoraFileNames
from lora_rocm.families.objectives.base import CONTROL_LATENTS, HIDDEN_MASK, MEAN, SEEN_LATENTS, STD, LatentSpace
from lora_rocm.kernels.quantised import quantised
from lora_rocm.kernels.weight_format import DENSE, WeightFormat
from lora_rocm.model_files.config_file import DOWNLOAD_AGAIN
from lora_rocm.model_files.header import TensorFileHeader, read_header

if TYPE_CHECKING:
    from lora_rocm.recipe.schema import Recipe


class LatentFamily(ABC):
    """Implements the shared part of ``ModelFamily``. A family sets the attributes and defines the abstract methods.

    Attributes:
        layout: the components of the family's models.
        component: name of the component that is always trained.
        packed_layers: regular expression of layers that ``model.quantization`` quantises, as in ``quantised``.
    """

    name: str
    layout: ModelLayout
    component: str
    packed_layers: str
    text_components: tuple[str, ...] = ()
    texts = None
    partly = False
    """Whether a single file may lack components that a run needs. Set for checks that do not start a run."""

    @property
    def inpaints(self) -> bool:
        """Whether the model's inputs include a mask and the visible part of the image."""
        return False

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    @abstractmethod
    def encoders(self) -> Sequence[Encoder]: ...

    @abstractmethod
    def check(self, source: BaseSource) -> tuple[str, ...]:
        """Check a base from its configs and headers alone, and return notices about it.

        Raises:
            ModelError: the base is of another family, or cannot be trained on.
        """

    def check_file(self, header: TensorFileHeader) -> None:  # noqa: B027 (a family whose files are whole needs none)
        """Refuse the file in ``model.name_or_path`` if it is of another family.

        Called before other components are searched for.

        Raises:
            ModelError: wrong-family.
        """

    @abstractmethod
    def text_example(self, rows: int) -> Tensors:
        """Return the text tensors of ``example``: zeros for ``rows`` samples.

        There are only as many CLIP tokens as in a usual caption.
        """

    @property
    @abstractmethod
    def lora_file_names(self) -> LoraFileNames: ...

    @property
    def prediction_type(self) -> str:
        """Value of ``prediction_type`` in the metadata, or an empty string to omit it."""
        return ""

    @property
    def embedding_keys(self) -> Mapping[str, str]:
        return self.recipe.spec.embedding_keys

    @property
    def all_components(self) -> tuple[str, ...]:
        return tuple(self.layout.parts)

    @property
    def encoder_dtypes(self) -> Mapping[str, torch.dtype]:
        return {}

    @property
    def source(self) -> BaseSource:
        """The recipe's base model, located and checked but not loaded.

        Raises:
            ModelError: the base is missing, damaged or of another family, or cannot be trained on.
        """
        return self._recognised[0]

    @property
    def notices(self) -> Sequence[str]:
        return self._recognised[1]

    def take(self, source: BaseSource) -> None:
        """Use a base that was located and checked before."""
        self._recognised = source, ()

    @cached_property
    def _recognised(self) -> tuple[BaseSource, tuple[str, ...]]:
        model = self.recipe.model
        if model.name_or_path.startswith(PREFIX):
            return random_source(model.name_or_path, self.layout), ()
        file, layout = Path(os.path.expanduser(model.name_or_path)), self.layout
        if file.suffix.lower() == ".safetensors" and os.path.isfile(file):
            header = read_header(file)
            self.check_file(header)
            if self.partly and layout.alone:
                names = layout.parts
                there = [n for n in names if n in layout.alone or names[n].prefix_in(header.tensors) is not None]
                layout = replace(layout, parts={name: names[name] for name in there})
        source = resolve(model, layout, HashMemory(Path(self.recipe.cache.dir), WEIGHTS_MEMORY))
        return source, self.check(source)

    def examine(self) -> Sequence[Path]:
        assert self.latents is not None, "the VAE's config has the normalisation of its latents"
        return self.source.files()

    def load(self, dtype: torch.dtype, device: torch.device) -> LoadedModel:
        components = {name: self.source.load(name, dtype, device, self.weight_format(name)) for name in self._trained}
        return LoadedModel(components, dtype, device)

    def weight_format(self, component: str) -> WeightFormat:
        model = self.recipe.model
        if component != self.component:
            return DENSE
        return quantised(model.quantization, self.packed_layers, model.compute)

    def sample_meta(
        self, original_hw: tuple[int, int], crop_top_left: tuple[int, int], target_hw: tuple[int, int]
    ) -> Tensors:
        """Return an empty mapping. Families that are conditioned on sizes override this."""
        return {}

    def example(self, shape: SampleShape, rows: int) -> Tensors:
        height, width = shape["h"], shape["w"]
        side_px, channels = pixels_per_latent(self.source), len(self.latents.shift_C)
        latents = torch.zeros(rows, channels, height // side_px, width // side_px)
        meta = self.sample_meta((height, width), (0, 0), (height, width))
        repeated = {name: tensor.expand(rows, *tensor.shape).contiguous() for name, tensor in meta.items()}
        more = {CONTROL_LATENTS: self.recipe.data.has_controls, SEEN_LATENTS: self.inpaints}
        names = (MEAN, STD, *(name for name, is_there in more.items() if is_there))
        hidden = {HIDDEN_MASK: latents[:, :1].clone()} if self.inpaints else {}
        return {**{name: latents.clone() for name in names}, **hidden, **repeated, **self.text_example(rows)}

    @cached_property
    def latents(self) -> LatentSpace:
        """The normalisation ``(latents - shift) * scale``, the inverse of the decoding in diffusers' pipelines."""
        config = self.source.config("vae")
        is_wan = "z_dim" in config.values  # the VAE of Wan and Qwen-Image
        factor = config.number("scaling_factor", 1.0 if is_wan else 0.18215, above=0)
        channels = config.whole("z_dim") if is_wan else config.whole("latent_channels", 4)
        means, spreads = config.numbers("latents_mean", channels), config.numbers("latents_std", channels, above=0)
        if means is not None and spreads is not None:
            return LatentSpace(torch.tensor(means), factor / torch.tensor(spreads))
        if is_wan:
            missing = "latents_mean" if means is None else "latents_std"
            raise ModelError(
                "config-unreadable",
                f"The VAE's config lacks {missing}, which is needed to normalise latents.",
                where=f"{config.path}: {missing}",
                fix=DOWNLOAD_AGAIN,
            )
        shift = config.number("shift_factor", 0.0, or_null=True)
        return LatentSpace(torch.full((channels,), shift), torch.full((channels,), factor))

    def base_facts(self) -> Mapping[str, str]:
        file = self.source.single_file
        return {
            "hash": "" if file is None else legacy_model_hash(file),
            "prediction_type": self.prediction_type,
            "identity": self._identity,
        }

    @cached_property
    def encoders_identity(self) -> str:
        """Implements ``EncodesWithComponents.encoders_identity``."""
        parts = [self.source.fingerprint(name) for name in self.all_components if name not in self._trained]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @cached_property
    def _identity(self) -> str:
        """Identity of the trained components and the noise schedule. Cache keys contain the encoders' identities."""
        parts = [*(self.source.fingerprint(name) for name in self._trained), self.source.settings("scheduler")]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def _trained(self) -> tuple[str, ...]:
        return (self.component, *(self.text_components if self.recipe.lora.tokenises else ()))

    @property
    def structure(self) -> str:
        return json.dumps([self.source.settings(name) for name in self._trained])

    def skeleton(self, component: str) -> nn.Module:
        return self.source.skeleton(component)


def pixels_per_latent(source: BaseSource) -> int:
    """Return the number of pixels per latent along a side (8 in SDXL and in Stable Diffusion 1.x and 2.x)."""
    config = source.config("vae")
    levels = "dim_mult" if config.values.keys() & {"dim_mult", "z_dim"} else "block_out_channels"
    return int(2 ** (config.length(levels) - 1))
