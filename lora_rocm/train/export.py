"""Writes an adapter as others read it: a kohya file, a diffusers file, PEFT directories.

Facts about the formats: kohya-ss/sd-scripts ``networks/lora.py``, diffusers ``loaders/lora_base.py``, PEFT's adapter
folders. Magnitudes and alphas stay in float32 whatever the weights are written in: they are few, and rounding a DoRA
magnitude to 8 bits would change the whole base weight.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_rocm.adapters.lora import PEFT_NAME, Adapter, trained_scale
from lora_rocm.adapters.lora_reader import DIFFUSERS_METADATA, PEFT_CONFIG, PEFT_PREFIX, PEFT_WEIGHTS
from lora_rocm.families.base import LoadedModel, ModelFamily
from lora_rocm.host.files import json_bytes, write_atomic
from lora_rocm.recipe.schema import Recipe
from lora_rocm.run.results import FileDigest
from lora_rocm.train.facts import Facts, modelspec, ss_fields
from lora_rocm.train.tensor_file import kohya_hashes, serialise
from lora_rocm.train.verify import Verification, verify

__all__ = ["DTYPES", "LoadedModel", "Verification", "verify", "write"]

MAGNITUDE = ".lora_magnitude_vector"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def write(
    form: str,
    path: Path,
    family: ModelFamily,
    adapter: Adapter,
    recipe: Recipe,
    facts: Facts,
    root: Path | None = None,
) -> tuple[FileDigest, ...]:
    """Write one format, whole or not at all; the same adapter gives the same bytes.

    Args:
        form: kohya, diffusers or peft.
        path: the file, or for peft the folder that gets a sub-folder for each component.
        family: knows the kohya names.
        adapter: its present weights are written (inside ``adapter.using`` the average).
        recipe: gives the number format and most of the metadata.
        facts: what happened in the run.
        root: the run directory, where the files are for one (``host.files.make_folder``).

    Returns:
        What each file was meant to hold, by its path below ``root``.

    Raises:
        StorageError: disk full, no permission, what was written reads back otherwise.
    """
    contents: dict[str, Callable[..., Iterator[tuple[Path, bytes]]]] = {
        "kohya": _kohya,
        "diffusers": _diffusers,
        "peft": _peft,
    }
    written = []
    for file, content in contents[form](path, family, adapter, recipe, facts):
        write_atomic(file, content, root)
        written.append(FileDigest.of(file.relative_to(root or path.parent).as_posix(), content))
    return tuple(written)


def kohya_tensors(family: ModelFamily, adapter: Adapter, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a kohya file; alpha is ``scale * rank``, so alpha / rank is the trained scale (also of rsLoRA)."""
    tensors = {}
    for name, entry in adapter.entries().items():
        component, module, _ = adapter.modules[name]
        key = family.export_key(component, module)
        tensors[f"{key}.lora_down.weight"] = entry.down.to(dtype)
        tensors[f"{key}.lora_up.weight"] = entry.up.to(dtype)
        tensors[f"{key}.alpha"] = torch.tensor(entry.scale * entry.rank, dtype=torch.float32)
        if entry.magnitude is not None:
            tensors[f"{key}.dora_scale"] = entry.magnitude.reshape(-1, *[1] * (entry.down.ndim - 1))
    return tensors


def peft_config(adapter: Adapter, component: str) -> dict[str, Any]:
    """The PEFT config of one component, in the fields that every version of PEFT knows.

    Modules are named without ``text_model``, which PEFT's suffix matching accepts with every version of transformers.
    """
    layers = {n.removeprefix(component + "."): layer for n, (c, _, layer) in adapter.modules.items() if c == component}
    ranks = {name: layer.r[PEFT_NAME] for name, layer in layers.items()}
    alphas = {name: _plain(layer.lora_alpha[PEFT_NAME]) for name, layer in layers.items()}
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    first = next(iter(layers.values()))
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {name: value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
        "target_modules": sorted(layers),
        "use_rslora": bool(first.use_rslora[PEFT_NAME]),
        "use_dora": PEFT_NAME in first.lora_magnitude_vector,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _kohya(
    path: Path, family: ModelFamily, adapter: Adapter, recipe: Recipe, facts: Facts
) -> Iterator[tuple[Path, bytes]]:
    tensors = kohya_tensors(family, adapter, DTYPES[recipe.output.dtype])
    yield path, serialise(tensors, _metadata(tensors, family, adapter, recipe, facts))


def _diffusers(
    path: Path, family: ModelFamily, adapter: Adapter, recipe: Recipe, facts: Facts
) -> Iterator[tuple[Path, bytes]]:
    tensors, configs = {}, {}
    for component in adapter.components:
        level = "text_model." if component in family.text_components else ""  # diffusers drops it where it is no more
        part = _peft_tensors(adapter, component, DTYPES[recipe.output.dtype])
        if level:  # transformers finds a text encoder's magnitudes by their full name only
            part = {name + ".weight" if name.endswith(MAGNITUDE) else name: tensor for name, tensor in part.items()}
        tensors |= {f"{component}.{level}{name}": tensor for name, tensor in part.items()}
        configs |= {f"{component}.{key}": value for key, value in peft_config(adapter, component).items()}
    metadata = _metadata(tensors, family, adapter, recipe, facts)
    metadata |= {"format": "pt", DIFFUSERS_METADATA: json.dumps(configs, indent=2, sort_keys=True)}
    yield path, serialise(tensors, metadata)


def _peft(
    path: Path, family: ModelFamily, adapter: Adapter, recipe: Recipe, facts: Facts
) -> Iterator[tuple[Path, bytes]]:
    base = facts.base_name or recipe.model.name_or_path
    for component in adapter.components:
        level = _text_level(adapter, component)
        part = _peft_tensors(adapter, component, DTYPES[recipe.output.dtype])
        tensors = {f"{PEFT_PREFIX}{level}{name}": tensor for name, tensor in part.items()}
        yield path / component / PEFT_WEIGHTS, serialise(tensors, {"format": "pt"})
        config = {**peft_config(adapter, component), "base_model_name_or_path": base}
        yield path / component / PEFT_CONFIG, json_bytes(config)


def _text_level(adapter: Adapter, component: str) -> str:
    """The level that this version of transformers puts above a component's layers: PEFT wants names as they are."""
    name, path = next((name, path) for name, (owner, path, _) in adapter.modules.items() if owner == component)
    return path.removesuffix(name.removeprefix(component + "."))


def _peft_tensors(adapter: Adapter, component: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of one component in PEFT's form, modules by their version-independent names."""
    tensors = {}
    for name, entry in adapter.entries().items():
        owner, _, layer = adapter.modules[name]
        if owner != component:
            continue
        key = name.removeprefix(component + ".")
        tensors[f"{key}.lora_A.weight"] = entry.down.to(dtype)
        tensors[f"{key}.lora_B.weight"] = entry.up.to(dtype)
        if entry.magnitude is not None:
            shape = layer.lora_magnitude_vector[PEFT_NAME].weight.shape
            tensors[f"{key}{MAGNITUDE}"] = entry.magnitude.reshape(shape)
    return tensors


def _metadata(
    tensors: Mapping[str, Tensor], family: ModelFamily, adapter: Adapter, recipe: Recipe, facts: Facts
) -> dict[str, str]:
    ss = ss_fields(recipe, family, facts, _network(adapter))
    hashes = kohya_hashes(tensors, ss)
    return {**ss, **hashes, **modelspec(recipe, family, facts, hashes["sshs_model_hash"])}


def _network(adapter: Adapter) -> dict[str, str]:
    """The ``ss_network_`` description of the network; the alpha is that of the file (see ``kohya_tensors``)."""
    layers = [layer for _, _, layer in adapter.modules.values()]
    ranks = {layer.r[PEFT_NAME] for layer in layers}
    alphas = {_plain(round(trained_scale(layer) * layer.r[PEFT_NAME], 6)) for layer in layers}
    arguments = {"dora": "True"} if any(PEFT_NAME in layer.lora_magnitude_vector for layer in layers) else {}
    return {
        "ss_network_dim": str(ranks.pop()) if len(ranks) == 1 else "Dynamic",
        "ss_network_alpha": str(alphas.pop()) if len(alphas) == 1 else "Dynamic",
        "ss_network_args": json.dumps(arguments),
    }


def _plain(value: float) -> int | float:
    return int(value) if float(value).is_integer() else float(value)
