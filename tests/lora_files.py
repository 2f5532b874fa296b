"""LoRA files with random weights, for tests that need the file of another training."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lora_rocm.adapters.base import Adapter
from lora_rocm.adapters.lora_files.key_table import adaptable
from lora_rocm.export import writers
from lora_rocm.export.metadata import RunFacts
from lora_rocm.families.base import ModelFamily
from lora_rocm.model_files.readers import PROGRAMS, is_read
from lora_rocm.recipe.schema import Recipe
from tests.judging import inspect


def write_random_lora(path: Path, component: str, root: nn.Module, pattern: str, rank: int = 3) -> Path:
    """A file in the names of diffusers for the modules of a component that match; ``root`` may have no weights."""
    scale = 0.3
    rng = torch.Generator().manual_seed(11)
    tensors: dict[str, Tensor] = {}
    for name, layer in adaptable(root):
        if re.fullmatch(pattern, name):
            (rows, *inputs), kernel = layer.weight.shape, (1,) * (layer.weight.ndim - 2)  # type: ignore[union-attr,operator]
            tensors[f"{component}.{name}.lora_A.weight"] = scale * torch.randn(rank, *inputs, generator=rng)
            tensors[f"{component}.{name}.lora_B.weight"] = scale * torch.randn(rows, rank, *kernel, generator=rng)
    assert tensors, "the pattern matches no module"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    return path


def write_as_forecast(
    form: str, path: Path, family: ModelFamily, adapter: Adapter, recipe: Recipe, facts: RunFacts
) -> None:
    """Write a format with a size that was forecast to the byte."""
    forecast_bytes = writers.size_bytes(form, family, adapter, recipe, facts)
    written = writers.write(form, path, family, adapter, recipe, facts)
    assert forecast_bytes == sum(file.num_bytes for file in written)


def without_share(cannot_read: Iterable[str]) -> set[str]:
    """The report of an export, without the measured share that differs, which ``inspect`` does not know."""
    return {re.sub(r"; [0-9.]+% of the change differs", "", text) for text in cannot_read}


def cannot_read_by_inspect(path: Path) -> list[set[str]]:
    """For each component's adapter in a file or folder, the programs that cannot read it according to ``inspect``."""
    found = inspect(path)
    adapters = found["adapters"].values() if "adapters" in found else [found["adapter"]]
    return [
        {f"{PROGRAMS[name]} ({text})" for name, text in each["readers"].items() if not is_read(text)}
        for each in adapters
    ]
