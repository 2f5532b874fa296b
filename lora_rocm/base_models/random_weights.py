"""Base models with the structure of a real model and random weights. Benchmarks use them to avoid a download."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import torch
from torch import Tensor, nn

from lora_rocm.base_models.loading import BaseSource, ModelLayout, builtin_folder
from lora_rocm.foundation.names import BUILTIN
from lora_rocm.kernels.weight_format import DENSE, WeightFormat

PREFIX = "random:"
POOL = (1 << 24) + 43  # random numbers reused for all weights; drawing each one would take minutes on a CPU
TINY = f"{BUILTIN}tiny-sdxl"


CODE = 120


class RandomSource(BaseSource):
    """A base model with random weights, which are the same at each load.

    Weights have a normal distribution with the spread of a newly initialised layer. Weights of norms are 1.
    """

    def fingerprint(self, name: str) -> str:
        """Return the identity of a component. It depends only on the config."""
        return f"random-{json.dumps(self.config(name).values, sort_keys=True)}"

    def load(self, name: str, dtype: torch.dtype, device: torch.device, weights: WeightFormat = DENSE) -> nn.Module:
        """Build a component with random weights, frozen and in eval mode."""
        pool_N = torch.empty(POOL).normal_(generator=torch.Generator().manual_seed(0)).to(device, dtype)
        module, at = self.skeleton(name), 0
        packed = weights.chosen(module)
        for path, owner in list(module.named_modules()):
            for key, hollow in list(owner.named_parameters(recurse=False)):
                weight = _weight(hollow.shape, key, pool_N, at)
                if not hollow.is_floating_point():  # codes of quantised weights, or exponents of their scales
                    weight = weight.sign().add_(CODE).to(hollow.dtype)
                owner.register_parameter(key, nn.Parameter(weight, requires_grad=False))
                at = (at + weight.numel()) % POOL
            if path in packed:
                module.set_submodule(path, weights.packed(packed[path]))
        return module.to(device).eval()

    def read_ahead(self, name: str, dtype: torch.dtype, weights: WeightFormat = DENSE) -> None:
        """Do nothing: there is no file to read."""

    def is_digested(self, name: str) -> bool:
        """True: the identity of a component needs no weights."""
        return True

    def files(self) -> list[Path]:
        """Return the paths of the config files."""
        return [self.config_path(name) for name in (*self.layout.parts, "scheduler")]

    def tokenizer_path(self, name: str) -> Path:
        """Return the tokenizer folder of the packaged tiny model. Any tokenizer is good enough for random weights."""
        return builtin_folder(TINY) / name


def random_source(name: str, layout: ModelLayout) -> RandomSource:
    """Return a random base model.

    Its structure is taken from a packaged model or a local folder, or else from the published configs.

    Args:
        name: PREFIX, followed by a name as in ``model.name_or_path``.
        layout: the layout of the family, with its published configs.
    """
    model = name.removeprefix(PREFIX)
    path, folder = Path(os.path.expanduser(model)), layout.configs
    if model.startswith(BUILTIN):
        folder = builtin_folder(model)
    elif all(os.path.isfile(path / part / "config.json") for part in layout.parts):
        folder = path
    return RandomSource(name, layout, folder, None)


def _weight(shape: torch.Size, key: str, pool_N: Tensor, at: int) -> Tensor:
    """Return a tensor filled from the pool, starting at index ``at``.

    It has the spread of a newly initialised layer.
    """
    if len(shape) < 2:
        return pool_N.new_full(shape, float(key == "weight"))
    spread, flat_N = 1.0 / math.sqrt(math.prod(shape[1:])), pool_N.new_empty(math.prod(shape))
    done = 0
    while done < len(flat_N):
        count = min(len(flat_N) - done, len(pool_N) - at)
        torch.mul(pool_N[at : at + count], spread, out=flat_N[done : done + count])
        done, at = done + count, 0
    return flat_N.view(shape)
