"""Checks from configs and headers alone that a base belongs to a family with a transformer and can be trained on."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from lora_rocm.base_models.loading import Source
from lora_rocm.errors import ModelError
from lora_rocm.families.component_check import check_component
from lora_rocm.families.spec import FamilySpec
from lora_rocm.families.wrong_family import wrong_family
from lora_rocm.foundation.terminal_text import printable
from lora_rocm.model_files.adapters import kind_of
from lora_rocm.model_files.config_file import read_config
from lora_rocm.model_files.models import index_of, model_of, pipeline_of

VAE_KEYS = ("latent_channels", "scaling_factor", "shift_factor", "z_dim", "latents_mean", "latents_std")
TEXT_KEYS = ("hidden_size", "d_model", "num_hidden_layers", "num_layers")
"""Keys of a text encoder's config that decide what the transformer gets. Not every writer saves all of them."""


def check(source: Source, spec: FamilySpec) -> tuple[str, ...]:
    """Refuse a model of another family or one that cannot be trained on; return notices about an accepted one.

    Raises:
        ModelError: wrong-family, not-a-model, incomplete-model, or as ``check_component``.
    """
    fix = f"Use a base model of {spec.title}: a diffusers folder, a hub id, or a .safetensors file of its transformer."
    header = source.single_header
    if header is None:
        index = index_of(source.folder)
        if index is None:
            what = "This folder is no diffusers model."
            raise ModelError("not-a-model", what, where=f"model.name_or_path: {source.name}", fix=fix)
        kind = str(read_config(index).get("_class_name", ""))
        pipeline = pipeline_of(kind)
        families = pipeline.families if pipeline is not None else ()
        known = pipeline.title if pipeline is not None else f"a model for {printable(kind)[:80] or 'nothing known'}"
    else:
        model, adapter = model_of(header.shapes), kind_of(header.tensors)
        families = (model.family,) if model is not None and not adapter else ()
        known = f"a {adapter} file" if adapter else model.title if model is not None else "no model that is known here"
    if spec.name not in families:
        raise wrong_family(source, known, spec.title, families, fix)
    for name in source.layout.parts:
        if name in source.own:
            _check_own(source, name, spec)
    return tuple(filter(None, (check_component(source, name, fix) for name in source.layout.parts)))


def names_of(name: str, title: str) -> list[str]:
    """What a base is called, in small letters: the last part of its path or hub id, then folders above it.

    Of the two folders above, those count that name the model too ("FLUX.1-schnell", not "dev"), and none of the path
    of the user's home.

    Args:
        name: path or hub id of the base.
        title: of the model.
    """
    path, home = Path(os.path.expanduser(name)), Path(os.path.expanduser("~"))
    last, *above = reversed((path.relative_to(home) if path.is_relative_to(home) else path).parts or (path.name,))
    named = [part.lower() for part in above[:2] if _letters(title) in _letters(part)]
    return [last.lower(), *named]


def _letters(name: str) -> str:
    return re.sub("[^a-z]", "", name.lower())


def called_otherwise(source: Source, spec: FamilySpec, variant: str, names: Sequence[str]) -> tuple[str, ...]:
    """A notice if the base is called by the name of another variant than ``model.variant``.

    Args:
        source: the base.
        spec: of its family.
        variant: value of ``model.variant``.
        names: names of variants. In the nearest part of the path that has one, the first that is found counts. A letter
            behind it makes it another word.
    """
    called = names_of(source.name, spec.title)
    found = (each for part in called for each in names if re.search(rf"{each}(?![a-z])", part))
    named = next(found, variant)
    if named == variant:
        return ()
    return (f"The base is called {source.name}, and model.variant is {variant}: is {named} meant?",)


def _check_own(source: Source, name: str, spec: FamilySpec) -> None:
    """Refuse a component of another family by its config: its output would have other sizes or another scale."""
    folder = source.folder if (source.folder / name / "config.json").is_file() else source.layout.configs
    own, base = read_config(source.config_path(name)), read_config(folder / name / "config.json")
    keys = (*VAE_KEYS, *(key for key in TEXT_KEYS if key in own and key in base))
    for key in (key for key in keys if own.get(key) != base.get(key)):
        raise ModelError(
            "wrong-family",
            f"This is not a {name} of {spec.title}: its {key} is {own.get(key)}, not {base.get(key)}.",
            where=source.place(name),
            fix=f"Give a {name} of {spec.title}, or leave model.{name} out if name_or_path is a folder.",
        )
