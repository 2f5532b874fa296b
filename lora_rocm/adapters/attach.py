"""Attaches adapters to models: new ones from a recipe, and existing ones from files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_rocm.adapters import new_tokens, trained_norms
from lora_rocm.adapters.adapter_kind import PEFT_NAME
from lora_rocm.adapters.base import Adapter
from lora_rocm.adapters.entry import Entry, Notify
from lora_rocm.adapters.lora_files.key_table import canonical
from lora_rocm.adapters.lora_files.lora_reader import read_adapter, read_for_model
from lora_rocm.adapters.lora_files.start_file import check_start
from lora_rocm.adapters.registry import kind_for, kind_of_file
from lora_rocm.adapters.targets import either, sections_of, targets
from lora_rocm.base_models.meta_components import WithoutValues
from lora_rocm.families.base import LoadedModel, ModelFamily
from lora_rocm.kernels.weight_format import dense_shape
from lora_rocm.recipe.adapter_sections import AdapterSection, LoraSection


def inject(
    family: ModelFamily,
    model: LoadedModel,
    lora: AdapterSection,
    seed: int,
    notify: Notify = lambda text: None,
    *,
    resumed: bool = False,
) -> Adapter:
    """Attach new adapter layers to a loaded model. With ``lora.init_from`` they start with that file's effect.

    The initial weights depend only on ``seed``: they are drawn in float32 on the CPU, regardless of the base model's
    dtype. Without ``lora.init_from`` they leave the model's output unchanged. If a module has a lower rank in the file
    than ``lora.rank``, it keeps the file's effect, and its extra ranks are initialised as in a new layer.

    ``notify`` receives notices about skipped parts of the file and about padded ranks. ``resumed``: whether the caller
    will load the weights from a checkpoint or file. If so, the files that ``lora`` names as initial values are not
    read.

    Returns:
        The new adapter.

    Raises:
        AdapterError: the targets match nothing, or the file does not fit.
    """
    adapter = _with_layers(family, model, lora)
    lora = _without_start(lora) if resumed else lora
    adapter.initialise(lora, seed)
    new_tokens.start(family, model, lora.new_tokens)
    if lora.init_from is not None:
        norms = dict[str, Tensor]()
        entries = start_entries(family, model, lora, adapter, notify, norms)
        adapter.start_from(entries)
        if lora.train_norms:
            trained_norms.fill(family, model, norms, Path(lora.init_from))
        ranks = [(entry.rank, adapter.modules[name][2].r[PEFT_NAME]) for name, entry in entries.items()]
        lower = sorted({rank for rank, ours in ranks if rank is not None and rank < ours})
        if lower:
            named, name = " and ".join(map(str, lower)), Path(lora.init_from).name
            notify(
                f"{name} has modules of rank {named}; they are padded to lora.rank, which does not change their effect."
            )
    return adapter


def _without_start(lora: AdapterSection) -> AdapterSection:
    tokens = tuple(token.model_copy(update={"init": None, "init_from": None}) for token in lora.new_tokens)
    start = {"init": "default"} if isinstance(lora, LoraSection) else {}
    return lora.model_copy(update={"init_from": None, "new_tokens": tokens, **start})


def start_entries(
    family: ModelFamily,
    model: LoadedModel,
    lora: AdapterSection,
    adapter: Adapter,
    notify: Notify = lambda text: None,
    norms: dict[str, Tensor] | None = None,
) -> dict[str, Entry]:
    """Read the file ``lora.init_from``, and check that the adapter can start from it. The model may be on meta.

    ``norms`` receives the file's trained norms. If the recipe trains no norms, a file with trained norms is refused.

    Returns:
        The file's entries, keyed by module name.

    Raises:
        AdapterError: the file is not a LoRA, is for another model, or does not fit the recipe.
    """
    assert lora.init_from is not None, "the recipe has no lora.init_from"
    path = Path(lora.init_from).expanduser()
    found = (norms if norms is not None else {}) if lora.train_norms else None
    files, entries = read_for_model(family, model, path, notify, found)
    check_start(family, lora, adapter, files, entries, path)
    return entries


def inject_on_meta(family: ModelFamily, model: LoadedModel, lora: AdapterSection) -> Adapter:
    """Attach the recipe's adapter layers on the meta device: they have shapes but no values, and take no memory.

    Raises:
        AdapterError: the targets match nothing.
    """
    with torch.device("meta"), WithoutValues():
        return _with_layers(family, model, lora)


def attach_file(
    family: ModelFamily, model: LoadedModel, path: Path, strength: float = 1.0, notify: Notify = lambda text: None
) -> Adapter | None:
    """Attach the adapter stored in a file to a loaded model, with the file's own kind, modules and ranks.

    The model must have every component that the file adapts (``lora_reader.components_of``).

    Args:
        family: family of the model.
        model: the loaded model.
        path: path of the file.
        strength: factor of the update (1: as trained, 0: base model only). DoRA magnitudes are not scaled.
        notify: receives notices about skipped parts of the file.

    Returns:
        The adapter, or None if ``strength`` is 0.

    Raises:
        AdapterError: the file is missing, damaged, not an adapter, or for another model.
    """
    norms = dict[str, Tensor]()
    files, entries = read_adapter(family, model.components, path, notify, norms)
    if strength == 0.0:
        return None
    trained_norms.attach(family, model, {name: tensor * strength for name, tensor in norms.items()}, path)
    scaled = {name: entry.scaled(strength) for name, entry in entries.items()}
    return kind_of_file(files).attach(family, model, scaled)


def _with_layers(family: ModelFamily, model: LoadedModel, lora: AdapterSection) -> Adapter:
    kind = kind_for(lora)
    chosen, shapes = targets(family, model, lora), dict[str, tuple[int, ...]]()
    for component, paths in chosen.items():
        layers = model.components[component]
        shapes |= {canonical(component, path): dense_shape(layers.get_submodule(path)) for path in paths}
    sections = sections_of(lora, shapes)
    for component, paths in chosen.items():
        config: Any = kind.config(lora, either(paths))
        for path in paths:
            section, pattern = sections[canonical(component, path)], f"^{re.escape(path)}"
            if section.rank != lora.rank:
                config.rank_pattern[pattern] = section.rank
            if section.effective_alpha != lora.effective_alpha:
                config.alpha_pattern[pattern] = section.effective_alpha
        kind.insert(model.components[component], config)
    if lora.train_norms:
        trained_norms.insert_norms(family, model)
    new_tokens.insert(family, model, lora.new_tokens)  # after PEFT, which freezes everything except its own layers
    return kind(family, model)
