"""Writes an adapter in the formats of other programs: kohya's file for many, files for a single program, PEFT folders.

Sources of the formats: kohya-ss/sd-scripts ``networks/lora.py``, diffusers ``loaders/lora_base.py``, PEFT's adapter
folders. Keys have the names of ``families.lora_file_names``. Magnitudes and alphas are always float32. They are few,
and a DoRA magnitude rounded to 8 bits would change the whole base weight.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_rocm.adapters.base import Adapter
from lora_rocm.adapters.entry import Entry, Form
from lora_rocm.adapters.kinds.lora_entry import LoraEntry, with_one_alpha
from lora_rocm.adapters.lora_files.key_table import COMFYUI, SD_SCRIPTS, TEXT_LEVEL
from lora_rocm.adapters.lora_files.lora_reader import DIFFUSERS_METADATA, DORA_NORM, PEFT_PREFIX
from lora_rocm.adapters.new_tokens import NAME, TOKEN_FIELD
from lora_rocm.base_models.hub import resembles_id
from lora_rocm.device.precision import FLOATS
from lora_rocm.errors import AdapterError
from lora_rocm.export.metadata import RunFacts, modelspec, ss_fields
from lora_rocm.export.safetensors_writer import TensorFile, kohya_hashes
from lora_rocm.export.verify import Verification, verify
from lora_rocm.families.base import LoadedModel, ModelFamily
from lora_rocm.foundation.files import json_bytes, write_atomic
from lora_rocm.model_files.peft_folder import PEFT_CONFIG, PEFT_WEIGHTS
from lora_rocm.recipe.adapter_sections import FORMS_WITH_NORMS
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.layout import embeddings_of
from lora_rocm.rundir.results import FileDigest

__all__ = ["LoadedModel", "Verification", "verify", "write"]

CAUSAL_LM = "CAUSAL_LM"
"""PEFT's task type for models that predict the next token of a text. The components of image models have no task type.
"""
Content = TensorFile | bytes


def write(
    file_format: str,
    path: Path,
    family: ModelFamily,
    adapter: Adapter,
    recipe: Recipe,
    facts: RunFacts,
    root: Path | None = None,
) -> tuple[FileDigest, ...]:
    """Write one format and its embedding files; each file is written completely or not at all.

    The same adapter always gives the same bytes.

    Args:
        file_format: a value of ``output.formats``.
        path: the file, or for "peft" the folder that will contain a folder for each component.
        family: family of the base model; it defines the kohya names.
        adapter: adapter to write, with its current weights (inside ``adapter.using`` the averaged ones).
        recipe: recipe of the run; it defines the dtype and most of the metadata.
        facts: further facts about the run, for the metadata.
        root: the run directory if the files are inside one (``foundation.files.make_folder``), else None.

    Returns:
        The digest of each file's intended content, with its path relative to ``root`` or the parent folder of ``path``.

    Raises:
        AdapterError: ``export-form``: the format does not support this adapter, or some of its modules.
        StorageError: the disk is full, permission is missing, or the file reads back differently.
    """
    written = []
    for file, content in _contents(file_format, path, family, adapter, recipe, facts):
        raw = content if isinstance(content, bytes) else content.to_bytes()
        write_atomic(file, raw, root)
        written.append(FileDigest.of(file.relative_to(root or path.parent).as_posix(), raw))
    return tuple(written)


def size_bytes(file_format: str, family: ModelFamily, adapter: Adapter, recipe: Recipe, facts: RunFacts) -> int:
    """Return the size in bytes of all files that ``write`` would write, computed from names and shapes alone.

    Embedding files are included. For factors that a file stores in parts, all ranks are counted, although ranks without
    effect on a part are not written.

    Raises:
        AdapterError: as in ``write``.
    """
    with adapter.shapes_only():
        contents = [content for _, content in _contents(file_format, Path(file_format), family, adapter, recipe, facts)]
    return sum(len(content) if isinstance(content, bytes) else content.size_bytes for content in contents)


def _contents(
    file_format: str, path: Path, family: ModelFamily, adapter: Adapter, recipe: Recipe, facts: RunFacts
) -> Iterator[tuple[Path, Content]]:
    """Yield path and content of each file of a format, including its embedding files."""
    if file_format not in adapter.readers or (adapter.norms and file_format not in FORMS_WITH_NORMS):
        raise AdapterError(
            "export-form",
            f"This {adapter.files.name} cannot be written in the {file_format} format: no program would read it.",
            where=str(path),
            fix=f"Use one of these formats: {', '.join(adapter.readers)}.",
        )
    makers: dict[str, Callable[..., Iterator[tuple[Path, Content]]]] = {
        "kohya": _kohya,
        SD_SCRIPTS: partial(_kohya, file_format=SD_SCRIPTS),
        COMFYUI: partial(_kohya, file_format=COMFYUI),
        "diffusers": _diffusers,
        "peft": _peft,
    }
    yield from makers[file_format](path, family, adapter, recipe, facts)
    yield from embedding_files(path, adapter, recipe)


def kohya_tensors(
    family: ModelFamily, adapter: Adapter, dtype: torch.dtype, file_format: Form = "kohya"
) -> dict[str, Tensor]:
    """Return the tensors of a file in kohya's format, or in its variants for sd-scripts and ComfyUI.

    Raises:
        AdapterError: ``export-form``: several modules are one weight in the file and cannot be merged.
    """
    try:
        entries = adapter.key_table(file_format).of_keys(adapter.entries_in(file_format))
    except ValueError as error:
        raise AdapterError(
            "export-form",
            f"Some modules cannot be written in the {file_format} format: {error}.",
            fix="Set lora.targets so that it includes every layer stored in the same weight (for example query, key "
            "and value), or remove the format from output.formats.",
        ) from error
    how = "kohya" if file_format == SD_SCRIPTS else family.lora_file_names.form
    one_alpha = file_format == "kohya" or (
        file_format == SD_SCRIPTS and family.lora_file_names.form == "kohya"
    )  # then these are one file
    norms = {name: tensor.to(dtype) for name, tensor in adapter.norm_tensors().items()}
    return norms | {
        f"{key}.{ending}": tensor
        for key, entry in (with_one_alpha(entries) if one_alpha else entries).items()
        for ending, tensor in entry.tensors(how, dtype).items()
    }


def _kohya(
    path: Path, family: ModelFamily, adapter: Adapter, recipe: Recipe, facts: RunFacts, file_format: Form = "kohya"
) -> Iterator[tuple[Path, Content]]:
    tensors = kohya_tensors(family, adapter, FLOATS[recipe.output.dtype], file_format)
    metadata = _metadata(tensors, family, adapter, recipe, facts)
    if file_format == COMFYUI and any(name.endswith(".dora_scale") for name in tensors):
        metadata[DORA_NORM] = "base"
    yield path, TensorFile(tensors, metadata)


def _diffusers(
    path: Path, family: ModelFamily, adapter: Adapter, recipe: Recipe, facts: RunFacts
) -> Iterator[tuple[Path, Content]]:
    tensors: dict[str, Tensor] = {}
    configs: dict[str, Any] = {}
    for component in adapter.components:
        level = TEXT_LEVEL if component in family.text_components else ""  # diffusers drops the level if it is obsolete
        endings = adapter.files.text_endings if level else {}
        part = _diffusers_tensors(adapter, component, FLOATS[recipe.output.dtype], endings)
        tensors |= {f"{component}.{level}{name}": tensor for name, tensor in part.items()}
        configs |= {f"{component}.{key}": value for key, value in adapter.peft_config(component).items()}
    metadata = _metadata(tensors, family, adapter, recipe, facts)
    metadata["format"] = "pt"
    if family.lora_file_names.form != "folded":  # else a config would have the scale a second time
        metadata[DIFFUSERS_METADATA] = json.dumps(configs, indent=2, sort_keys=True)
    yield path, TensorFile(tensors, metadata)


def _peft(
    path: Path, family: ModelFamily, adapter: Adapter, recipe: Recipe, facts: RunFacts
) -> Iterator[tuple[Path, Content]]:
    name = recipe.model.name_or_path
    is_id = resembles_id(name) and not Path(name).expanduser().exists()
    base = name if is_id else facts.base_name or name
    task = {"task_type": CAUSAL_LM} if recipe.spec.trains_on_texts else {}  # PEFT's AutoPeftModelForCausalLM wants it
    for component in adapter.components:
        level, config = _text_level(adapter, component), adapter.peft_config(component)
        entries = {n: entry for n, entry in adapter.entries().items() if adapter.modules[n][0] == component}
        if family.lora_file_names.form == "folded":
            config, entries = _without_patterns(config, entries)
        tensors = {
            f"{PEFT_PREFIX}{level}{name.removeprefix(component + '.')}.{ending}": tensor
            for name, entry in entries.items()
            for ending, tensor in entry.tensors("peft", FLOATS[recipe.output.dtype]).items()
        }
        yield path / component / PEFT_WEIGHTS, TensorFile(tensors, {"format": "pt"})
        yield path / component / PEFT_CONFIG, json_bytes({**config, **task, "base_model_name_or_path": base})


def _without_patterns(config: dict[str, Any], entries: dict[str, Entry]) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Return config and entries of an equivalent LoRA with a single rank, an alpha equal to it, and without rsLoRA.

    Readers that ignore the fields for these options would otherwise apply the LoRA at a wrong strength.
    """
    patterns = config["rank_pattern"] or config["alpha_pattern"] or config.get("use_rslora")
    found = {name: entry for name, entry in entries.items() if isinstance(entry, LoraEntry)}
    if not patterns or len(found) < len(entries):
        return config, entries
    rank = max(entry.rank for entry in found.values())
    config |= {"r": rank, "lora_alpha": rank, "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False}
    return config, {name: entry.of_rank(rank) for name, entry in found.items()}


def _text_level(adapter: Adapter, component: str) -> str:
    """Return the prefix that this version of transformers adds to a component's module names, because PEFT needs it."""
    name, path = next((name, path) for name, (owner, path, _) in adapter.modules.items() if owner == component)
    return path.removesuffix(name.removeprefix(component + "."))


def _diffusers_tensors(
    adapter: Adapter, component: str, dtype: torch.dtype, endings: Mapping[str, str]
) -> dict[str, Tensor]:
    """Return the tensors of one component with PEFT's tensor names and version-independent module names.

    ``endings``: replacements for the endings of tensor names.
    """
    folds = adapter.family.lora_file_names.form == "folded"
    return {
        f"{name.removeprefix(component + '.')}.{endings.get(ending, ending)}": tensor
        for name, entry in adapter.entries().items()
        if adapter.modules[name][0] == component
        for ending, tensor in (entry.folded() if folds else entry).tensors("diffusers", dtype).items()
    }


def _metadata(
    tensors: Mapping[str, Tensor], family: ModelFamily, adapter: Adapter, recipe: Recipe, facts: RunFacts
) -> dict[str, str]:
    ss = ss_fields(recipe, family, facts, adapter.network())
    hashes = kohya_hashes(tensors, ss)
    return {**ss, **hashes, **modelspec(recipe, family, facts, hashes["sshs_model_hash"])}


def embedding_files(lora: Path, adapter: Adapter, recipe: Recipe) -> Iterator[tuple[Path, TensorFile]]:
    """Yield path and content of each new token's embedding file, in float32, in the format that A1111 and ComfyUI read.

    The vectors are not also written to the LoRA file ("bundle_emb."). A1111 and OneTrainer would read them there, but
    diffusers refuses a file with keys that it does not know.

    Args:
        lora: path of the LoRA file, or folder of PEFT folders; determines where the embedding files are written.
        adapter: adapter with the vectors.
        recipe: recipe with the names of the tokens.
    """
    tokens = recipe.lora.new_tokens
    if not tokens:
        return
    sizes, state = [token.vectors for token in tokens], adapter.state()
    of_key = {key: state[f"{NAME}.{name}"].float().split(sizes) for name, key in recipe.spec.embedding_keys.items()}
    for number, token in enumerate(tokens):
        metadata = {
            "format": "pt",
            "modelspec.architecture": recipe.spec.metadata.architecture.replace("/lora", "/textual-inversion"),
            "modelspec.title": token.file_stem,
            TOKEN_FIELD: token.token,
        }
        tensors = {key: vectors[number].contiguous() for key, vectors in of_key.items()}
        yield embeddings_of(lora) / f"{token.file_stem}.safetensors", TensorFile(tensors, metadata)
