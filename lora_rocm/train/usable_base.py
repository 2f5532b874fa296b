"""Whether a file or folder is a base that can be trained on: one judgement for ``check``, ``inspect`` and ``train``.

It is ``ModelFamily.examine`` with what a run makes of the base before it loads weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from torch import nn

from lora_rocm.base_models.random_weights import RandomSource
from lora_rocm.base_models.small_tensors import require_finite
from lora_rocm.dataset.captions.caption_length import TokenLimit
from lora_rocm.errors import ModelError, UserError
from lora_rocm.families.base import ModelFamily, family_for
from lora_rocm.families.common.latent_family import LatentFamily
from lora_rocm.families.registry import PRODUCT, Registry
from lora_rocm.families.spec import FamilySpec
from lora_rocm.processes.jobs import Judged
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.schema import Recipe
from lora_rocm.train.dry_run import TakesSource, require_computable


@dataclass(frozen=True)
class Base:
    """A base that can be trained on.

    files: all that it consists of. skeletons: its components without weights. token_limits: of its text encoders.
    """

    files: Sequence[Path]
    skeletons: dict[str, nn.Module]
    token_limits: Sequence[TokenLimit]


def require_usable(family: ModelFamily, recipe: Recipe) -> Base:
    """Examine the base of a recipe, from configs, headers, tokenizers and small tensors alone.

    Raises:
        ModelError: it is missing, damaged, of another family, or cannot be trained on.
    """
    files = family.examine()
    skeletons, limits = {name: family.skeleton(name) for name in family.all_components}, family.token_limits()
    _ = family.texts  # the tokenizer of a language model
    require_computable(family, recipe)
    if isinstance(family, TakesSource) and not isinstance(family.source, RandomSource):
        require_finite(family.source)
    return Base(files, skeletons, limits)


def judged(path: Path, spec: FamilySpec, registry: Registry = PRODUCT) -> Judged:
    """Judge a path for a family, in any of its variants."""
    found = [_of_variant(path, spec, variant, registry) for variant in _variants(spec)]
    return next((each for each in found if not each.refusal), found[0])


def _variants(spec: FamilySpec) -> Iterable[str | None]:
    field = spec.model_section.model_fields.get("variant")
    return get_args(field.annotation) if field is not None else (None,)


def _of_variant(path: Path, spec: FamilySpec, variant: str | None, registry: Registry) -> Judged:
    model = {"family": spec.name, "name_or_path": str(path), **({} if variant is None else {"variant": variant})}
    recipe = recipe_from({"model": model, "data": {"path": "."}, "train": {"max_train_steps": 1}}, registry)
    family = family_for(recipe)
    try:
        require_usable(family, recipe)
    except UserError as error:
        if error.code == "incomplete-model" and isinstance(family, LatentFamily) and path.is_file():
            return _of_part(family_for(recipe))
        return Judged.refused(error)
    return Judged("", notices=tuple(family.notices))


def _of_part(family: ModelFamily) -> Judged:
    """Judge what a file holds; the components that it lacks are asked for."""
    assert isinstance(family, LatentFamily)
    whole = tuple(family.layout.parts)
    family.partly = True
    try:
        source = family.source
    except ModelError as error:
        return Judged.refused(error)
    return Judged("", tuple(f"model.{name}" for name in whole if name not in source.layout.parts))
