"""Checks whether a base belongs to a transformer family and can be trained on, using only configs and headers."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from lora_rocm.base_models.loading import BaseSource
from lora_rocm.errors import ModelError
from lora_rocm.families.common.component_check import check_component
from lora_rocm.families.common.wrong_family import recognised_file, recognised_folder, wrong_family
from lora_rocm.families.registry import FamilyRegistry
from lora_rocm.families.spec import FamilySpec
from lora_rocm.model_files.config_file import read_config
from lora_rocm.model_files.header import TensorFileHeader
from lora_rocm.model_files.models import index_of

VAE_KEYS = ("latent_channels", "scaling_factor", "shift_factor", "z_dim", "latents_mean", "latents_std")
TEXT_KEYS = ("hidden_size", "d_model", "num_hidden_layers", "num_layers")
"""Keys of a text encoder's config that determine the transformer's inputs. A config may lack some of them."""


def check(source: BaseSource, spec: FamilySpec, registry: FamilyRegistry) -> tuple[str, ...]:
    """Refuse a model of another family or one that cannot be trained on. Returns notices about an accepted model.

    Raises:
        ModelError: wrong-family, not-a-model, incomplete-model, or as in ``check_component``.
    """
    header = source.single_header
    if header is None:
        found = recognised_folder(source.folder)
        if found is not None and spec.name not in found.families:
            raise wrong_family(source.name, found.title, spec.title, found.families, _fix(spec), registry)
        if index_of(source.folder) is None:
            what, where = "This folder is not a diffusers model.", f"model.name_or_path: {source.name}"
            raise ModelError("not-a-model", what, where=where, fix=_fix(spec))
    else:
        check_file(header, source.name, spec, registry)
    for name in source.layout.parts:
        if name in source.own:
            _check_own(source, name, spec)
    return tuple(filter(None, (check_component(source, name, _fix(spec)) for name in source.layout.parts)))


def check_file(header: TensorFileHeader, name: str, spec: FamilySpec, registry: FamilyRegistry) -> None:
    """Refuse a file of another family. Called before the user is asked for components that the file lacks.

    Raises:
        ModelError: wrong-family.
    """
    found = recognised_file(header)
    if spec.name not in found.families:
        raise wrong_family(name, found.title, spec.title, found.families, _fix(spec), registry)


def _fix(spec: FamilySpec) -> str:
    return f"Use a base model of {spec.title}: a diffusers folder, a hub id, or a .safetensors file of its transformer."


def names_of(name: str, title: str) -> list[str]:
    """Return names of a base in lower case: the last part of its path or hub id, then names of the folders above.

    Only the two nearest folders are considered, and only those are returned that also name the model ("FLUX.1-schnell",
    but not "dev"). Folders above the user's home directory are ignored.

    Args:
        name: path or hub id of the base.
        title: name of the model family.
    """
    path, home = Path(os.path.expanduser(name)), Path(os.path.expanduser("~"))
    last, *above = reversed((path.relative_to(home) if path.is_relative_to(home) else path).parts or (path.name,))
    named = [part.lower() for part in above[:2] if _letters(title) in _letters(part)]
    return [last.lower(), *named]


def _letters(name: str) -> str:
    return re.sub("[^a-z]", "", name.lower())


def called_otherwise(source: BaseSource, spec: FamilySpec, variant: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return a notice if the base's name contains a different variant than ``model.variant``.

    Args:
        source: the base.
        spec: the base's family.
        variant: value of ``model.variant``.
        names: names of the variants. The last part of the path is searched first, then the folders above it; the first
            name found counts. A name directly followed by a letter is ignored.
    """
    called = names_of(source.name, spec.title)
    found = (each for part in called for each in names if re.search(rf"{each}(?![a-z])", part))
    named = next(found, variant)
    if named == variant:
        return ()
    return (f"The base is called {source.name}, but model.variant is {variant}. Did you mean {named}?",)


def _check_own(source: BaseSource, name: str, spec: FamilySpec) -> None:
    """Refuse a user-supplied component that does not fit the family, judged by its config.

    The output of such a component would have other sizes or another scale.
    """
    folder = source.folder if (source.folder / name / "config.json").is_file() else source.layout.configs
    own, base = read_config(source.config_path(name)), read_config(folder / name / "config.json")
    keys = (*VAE_KEYS, *(key for key in TEXT_KEYS if key in own and key in base))
    for key in (key for key in keys if own.get(key) != base.get(key)):
        raise ModelError(
            "wrong-family",
            f"This is not a {name} of {spec.title}: its {key} is {own.get(key)}, not {base.get(key)}.",
            where=source.place(name),
            fix=f"Use a {name} of {spec.title}, or remove model.{name} if model.name_or_path is a folder.",
        )
