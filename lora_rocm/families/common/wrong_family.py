"""Recognises the family of a file or folder, and creates the error for a base of an unexpected family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.errors import ModelError
from lora_rocm.families.registry import FamilyRegistry
from lora_rocm.foundation.terminal_text import printable
from lora_rocm.model_files.component_folder import COMPONENT_CONFIG, weight_files
from lora_rocm.model_files.config_file import read_config
from lora_rocm.model_files.header import TensorFileHeader, read_header
from lora_rocm.model_files.models import index_of, model_of, pipeline_of
from lora_rocm.model_files.recognise_adapter import kind_of


@dataclass(frozen=True)
class Recognised:
    """A recognised model, or another kind of file.

    title: name with its article. families: possible values of ``model.family``, empty if unknown or not a base model.
    """

    title: str
    families: tuple[str, ...] = ()


def recognised_file(header: TensorFileHeader) -> Recognised:
    """Recognise a file of weights by its header."""
    model, adapter = model_of(header.shapes), kind_of(header.tensors)
    if adapter:
        return Recognised(f"a {adapter} file")
    return Recognised("an unknown model") if model is None else Recognised(model.title, (model.family,))


def recognised_folder(folder: Path) -> Recognised | None:
    """Recognise a folder of diffusers or transformers. Returns None if it is neither.

    Raises:
        ModelError: an index or a header cannot be read.
    """
    index = index_of(folder)
    if index is not None:
        kind = str(read_config(index).get("_class_name", ""))
        pipeline = pipeline_of(kind)
        if pipeline is None:
            return Recognised(f"a model for {printable(kind)[:80] or 'an unknown task'}")
        return Recognised(pipeline.title, pipeline.families)
    if not (folder / COMPONENT_CONFIG).is_file():
        return None
    shapes = {name: shape for file in weight_files(folder) for name, shape in read_header(file).shapes.items()}
    model = model_of(shapes)
    return None if model is None else Recognised(model.title, (model.family,))


def wrong_family(
    name: str, what: str, wanted: str, families: Sequence[str], fix: str, registry: FamilyRegistry
) -> ModelError:
    """Return the error "wrong-family".

    Args:
        name: the base, as written in the recipe.
        what: the recognised kind of model, with its article.
        wanted: title of the recipe's family.
        families: values of ``model.family`` that the base may belong to.
        fix: advice if the base cannot be trained with any available family.
        registry: the available families. The error names no others.
    """
    names = " or ".join(f"model.family: {name}" for name in families if name in registry)
    return ModelError(
        "wrong-family",
        f"This is {what}, but the recipe needs {wanted}.",
        where=f"model.name_or_path: {name}",
        fix=f"To train on it, set {names}. Otherwise: {fix[0].lower()}{fix[1:]}" if names else fix,
    )
