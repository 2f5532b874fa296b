"""Decides whether a run can start; ``check``, ``inspect`` and ``train`` all use this code.

A base is checked by ``ModelFamily.examine`` and by the steps that a run takes before it loads weights. ``inspect`` has
no recipe, so for adapters it only checks the file (``model_files.adapter_contents``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor, nn

from lora_rocm.adapters import new_tokens, trained_norms
from lora_rocm.adapters.attach import inject_on_meta, start_entries
from lora_rocm.adapters.lora_files.lora_reader import files_of
from lora_rocm.adapters.training_adapter import attach_training_adapter
from lora_rocm.base_models.random_weights import RandomSource
from lora_rocm.base_models.small_tensors import require_finite
from lora_rocm.dataset.captions.caption_length import TokenLimit
from lora_rocm.errors import ModelError, UserError
from lora_rocm.families.base import LoadedModel, ModelFamily, family_for
from lora_rocm.families.common.latent_family import LatentFamily
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.families.spec import FamilySpec
from lora_rocm.processes.jobs import BaseVerdict
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.schema import Recipe
from lora_rocm.train.dry_run import TakesSource, require_computable


@dataclass(frozen=True)
class Base:
    """A base that can be trained.

    files: all its files. skeletons: its components without weights, by name. token_limits: the limits of its text
    encoders.
    """

    files: Sequence[Path]
    skeletons: dict[str, nn.Module]
    token_limits: Sequence[TokenLimit]


def require_usable(family: ModelFamily, recipe: Recipe) -> Base:
    """Check a recipe's base, reading only its configs, headers, tokenizers and small tensors.

    Raises:
        ModelError: the base is missing, damaged, not of the recipe's family, or cannot be trained.
    """
    files = family.examine()
    skeletons, limits = {name: family.skeleton(name) for name in family.all_components}, family.token_limits()
    _ = family.texts  # the tokenizer of a language model
    require_computable(family, recipe)
    if isinstance(family, TakesSource) and not isinstance(family.source, RandomSource):
        require_finite(family.source)
    return Base(files, skeletons, limits)


def trained_components(family: ModelFamily, recipe: Recipe) -> tuple[str, ...]:
    """Return the names of the components that ``family.load`` loads, and the adapter changes."""
    targets = family.lora_targets.values()
    return tuple(dict.fromkeys(name for preset in targets for name in preset if recipe.trains(name)))


def component_bytes(
    family: ModelFamily, recipe: Recipe, skeletons: Mapping[str, nn.Module], dtype: torch.dtype
) -> dict[str, int]:
    """Return the bytes of each loaded component, by name.

    ``dtype``: of the trained components. ``skeletons``: components without weights, by name.
    """
    dtypes = {**family.encoder_dtypes, **dict.fromkeys(trained_components(family, recipe), dtype)}
    return {
        name: family.weight_format(name).num_bytes(skeleton, dtypes.get(name, torch.float32))
        for name, skeleton in skeletons.items()
    }


def judged(path: Path, spec: FamilySpec, registry: FamilyRegistry = FAMILIES) -> BaseVerdict:
    """Check whether a path is a usable base of a family, in any of the family's variants."""
    found = [_of_variant(path, spec, variant, registry) for variant in _variants(spec)]
    return next((each for each in found if not each.refusal), found[0])


def _variants(spec: FamilySpec) -> Iterable[str | None]:
    field = spec.model_section.model_fields.get("variant")
    return get_args(field.annotation) if field is not None else (None,)


def _of_variant(path: Path, spec: FamilySpec, variant: str | None, registry: FamilyRegistry) -> BaseVerdict:
    model = {"family": spec.name, "name_or_path": str(path), **({} if variant is None else {"variant": variant})}
    recipe = recipe_from({"model": model, "data": {"path": "."}, "train": {"max_train_steps": 1}}, registry)
    family = family_for(recipe)
    try:
        require_usable(family, recipe)
    except UserError as error:
        if error.code == "incomplete-model" and isinstance(family, LatentFamily) and path.is_file():
            return _of_part(family_for(recipe))
        return BaseVerdict.refused(error)
    return BaseVerdict("", notices=tuple(family.notices))


def _of_part(family: ModelFamily) -> BaseVerdict:
    """Check a file that contains only some components; the result lists the recipe keys of the missing ones."""
    assert isinstance(family, LatentFamily)
    whole = tuple(family.layout.parts)
    family.partly = True
    try:
        source = family.source
    except ModelError as error:
        return BaseVerdict.refused(error)
    return BaseVerdict("", tuple(f"model.{name}" for name in whole if name not in source.layout.parts))


def require_startable(
    family: ModelFamily,
    recipe: Recipe,
    skeletons: Mapping[str, nn.Module],
    dtype: torch.dtype,
    notify: Callable[[str], None] = lambda text: None,
) -> list[Path]:
    """Attach the recipe's adapters to the model on the meta device. Returns the files that were read for them.

    Args:
        family: the base's family.
        recipe: the recipe, which names targets and files.
        skeletons: components of the base without weights; they are modified.
        dtype: the model's compute dtype.
        notify: receives notices.

    Raises:
        AdapterError: targets match nothing, or a file is damaged or does not fit the base.
    """
    adapted = next(iter(family.lora_targets.values()))  # the components of every preset; a VAE is in none
    trained = {name: skeletons[name] for name in adapted if recipe.trains(name)}
    model = LoadedModel(trained, dtype, torch.device("meta"))
    adapter = inject_on_meta(family, model, recipe.lora)
    if text := recipe.lora.unstarted_text(adapter.unstarted(recipe.lora)):
        notify(text)
    if text := adapter.reader_notice():
        notify(text)
    new_tokens.start(family, model, recipe.lora.new_tokens)
    if recipe.lora.init_from is not None:
        norms = dict[str, Tensor]()
        start_entries(family, model, recipe.lora, adapter, notify, norms)
        if recipe.lora.train_norms:
            trained_norms.fill(family, model, norms, Path(recipe.lora.init_from))
    attach_training_adapter(family, model, recipe.model.training_adapter, notify)
    named = [path for path in (recipe.lora.init_from, recipe.model.training_adapter) if path is not None]
    embeddings = [Path(token.init_from).expanduser() for token in recipe.lora.new_tokens if token.init_from is not None]
    return [*(file for path in named for file in files_of(Path(path).expanduser())), *embeddings]
