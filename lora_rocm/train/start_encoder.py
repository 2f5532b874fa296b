"""Encodes the model's initial output for each sample, for objectives that compare the trained model with it.

The base is loaded an additional time, with the adapters' initial weights, before training. The outputs are cached like
other entries: if all samples are in the cache, the base is not loaded.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch

from lora_rocm.adapters.attach import inject
from lora_rocm.adapters.lora_files.lora_reader import files_of
from lora_rocm.adapters.training_adapter import attach_training_adapter
from lora_rocm.dataset.entry_spec import EntrySpec
from lora_rocm.device.placement.base import Placement
from lora_rocm.families.base import ComparesWithStart, Encode, Encoder, LoadedModel, ModelFamily
from lora_rocm.recipe.schema import Recipe

ENCODING_VERSION = 1  # increase it if the same model would give other tensors


def start_encoders(recipe: Recipe, family: ModelFamily, dtype: torch.dtype) -> tuple[Encoder, ...]:
    """A tuple with the encoder of the model's initial outputs; empty if the recipe's objective does not need it.

    Args:
        recipe: the recipe, which names the base and the adapters' initial weights.
        family: the recipe's family.
        dtype: the base model's dtype in training.
    """
    entry = family.start_entry if isinstance(family, ComparesWithStart) else None
    return () if entry is None else (StartEncoder(recipe, family, entry, dtype),)


@dataclass(frozen=True)
class StartEncoder:
    """Implements ``Encoder`` for the model's initial outputs. For the fields see ``start_encoders``."""

    recipe: Recipe
    family: ModelFamily
    entry: EntrySpec
    dtype: torch.dtype

    @cached_property
    def fingerprint(self) -> str:
        """Identity of everything that the outputs depend on: base, adapters, precision and encoders.

        Raises:
            AdapterError: a file with an adapter's initial weights is missing.
        """
        parts = [self.family.base_facts()["identity"], self.recipe.model.quantization, str(self.dtype)]
        parts += [encoder.fingerprint for encoder in self.family.encoders()]
        lora = self.recipe.lora
        for path in (lora.init_from, self.recipe.model.training_adapter):
            files = [] if path is None else files_of(Path(path).expanduser())
            parts.append(" ".join(hashlib.sha256(file.read_bytes()).hexdigest() for file in files))
        if lora.init_from is not None:
            parts.append(json.dumps(lora.model_dump(mode="json", exclude={"init_from"}), sort_keys=True))
        digest = hashlib.sha256("\n".join(parts).encode("utf-8")).hexdigest()
        return f"{self.entry.name}{ENCODING_VERSION}-{digest}"

    def in_tiles(self) -> None:
        return None

    def load(self, placement: Placement) -> Encode:
        family, model = self.family, cache(lambda: self._loaded(placement))
        assert isinstance(family, ComparesWithStart), "as start_encoders found"
        return lambda inputs: family.at_start(model, inputs, placement)

    def _loaded(self, placement: Placement) -> LoadedModel:
        """Load the model in the state in which training starts, on the placement's device."""
        recipe, model = self.recipe, self.family.load(self.dtype, torch.device("cpu"))
        if recipe.lora.init_from is not None or recipe.model.training_adapter is not None:
            inject(self.family, model, recipe.lora, recipe.train.seed)
            attach_training_adapter(self.family, model, recipe.model.training_adapter)
        self.family.fuse(model, triton=False)  # rounds as in training, but for the kernels
        model.place(placement)
        for component in model.components.values():
            component.eval()
        return model
