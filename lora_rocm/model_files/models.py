"""Recognises base models, text encoders and VAEs by the names and shapes of their tensors (``models.toml``)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from lora_rocm.foundation.tables import read_table

Shapes = Mapping[str, tuple[int, ...]]
OTHER = "other"
"""Family of models that are recognised but not supported: ``model.family`` has no value for them."""
PARTS = ("whole", "unet", "transformer", "language model")
"""Parts from which the model's family is known. Text encoders and VAEs are shared by families."""
BASES = ("whole", "transformer")
"""Parts that a file in ``model.name_or_path`` may contain. UNets only come in whole files, language models in folders.
"""
CLASSES = {"unet": "UNet", "transformer": "Transformer", "vae": "Autoencoder"}
"""Word in the names of each part's diffusers classes. Class names of other parts contain none of these words."""
INDEXES = ("model_index.json", "modular_model_index.json")
"""Names of the index file in a diffusers folder, which names the pipeline. The second is for modular pipelines."""
BASE_JUDGED_BY = (
    "judged by configs, headers and small tensors: a run checks the numbers of large tensors when it loads them"
)
"""Remark with which ``check`` and ``inspect`` accept a base model."""


@dataclass(frozen=True)
class TensorCondition:
    """A condition on a tensor's shape: the size of one axis, or the number of dimensions.

    A missing tensor does not meet it.
    """

    name: str
    axis: int = 0
    sizes: tuple[int, ...] = ()
    dimensions: int = 0


@dataclass(frozen=True)
class Variant:
    """One of several models that share a row of the table.

    family: the variant's family; empty if it is the row's family. keys: see ``Model``.
    """

    title: str
    family: str = ""
    has: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    shapes: tuple[TensorCondition, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Model:
    """A row of the table: a model or component.

    family: value of ``model.family``, or ``OTHER``, or the kind of a component that several families share.
    title: name with its article.
    part: one of ``PARTS``, or "text encoder", "text conditioner", "vae", "embedding".
    has: beginnings of tensor names (after a prefix) that all occur in the file.
    without: beginnings of tensor names that do not occur in the file.
    keys: key of a recipe's ``model`` section that may be set to this component, for each value of ``model.family``.
    """

    family: str
    title: str
    part: str
    has: tuple[str, ...]
    without: tuple[str, ...] = ()
    shapes: tuple[TensorCondition, ...] = ()
    variants: tuple[Variant, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Pipeline:
    """A diffusers pipeline, recognised by the beginning of its class name."""

    start: str
    families: tuple[str, ...]
    title: str


@dataclass(frozen=True)
class ModelTable:
    """The table ``models.toml``.

    prefixes: prefixes of tensor names in files with several components, or in files of some programs.
    """

    prefixes: tuple[str, ...]
    pipelines: tuple[Pipeline, ...]
    models: tuple[Model, ...]


@dataclass(frozen=True)
class RecognisedModel:
    """A model or component that was recognised in a file.

    title, keys: values of the row's variant that fits, or else of the row itself.
    """

    family: str
    title: str
    part: str
    prefix: str
    keys: Mapping[str, str] = field(default_factory=dict)


@cache
def _table() -> ModelTable:
    return read_table(Path(__file__).with_name("models.toml"), ModelTable)


def models_in(shapes: Shapes) -> tuple[RecognisedModel, ...]:
    """Return all models and components that are recognised by these tensor shapes, in the order of the table."""
    return tuple(_found(sorted(shapes), shapes))


def model_of(shapes: Shapes) -> RecognisedModel | None:
    """Return the model in a file, or its first component if it has no model, or None if nothing is recognised."""
    found = models_in(shapes)
    return next((each for each in found if each.part in PARTS), found[0] if found else None)


def is_of_class(found: RecognisedModel, class_name: str) -> bool:
    """Return whether a class name fits the recognised model or component."""
    return {part for part, mark in CLASSES.items() if mark in class_name} == {found.part} & CLASSES.keys()


def pipeline_of(class_name: str) -> Pipeline | None:
    """Return the pipeline for the ``_class_name`` of a diffusers folder; None if it is unknown."""
    return next((row for row in _table().pipelines if class_name.startswith(row.start)), None)


def index_of(folder: Path) -> Path | None:
    """Return the path of the index file of a diffusers folder; None if it has none."""
    return next((folder / name for name in INDEXES if (folder / name).is_file()), None)


def _found(names: list[str], shapes: Shapes) -> Iterator[RecognisedModel]:
    for row in _table().models:
        for prefix in _table().prefixes:
            if _fits(row, names, shapes, prefix):
                fitting = (each for each in row.variants if _fits(each, names, shapes, prefix))
                variant = next(fitting, row)
                yield RecognisedModel(variant.family or row.family, variant.title, row.part, prefix, variant.keys)


def _fits(row: Model | Variant, names: list[str], shapes: Shapes, prefix: str) -> bool:
    return (
        all(_starts(names, prefix + start) for start in row.has)
        and not any(_starts(names, prefix + start) for start in row.without)
        and all(_holds(condition, shapes.get(prefix + condition.name)) for condition in row.shapes)
    )


def _starts(names: list[str], start: str) -> bool:
    """Whether one of the names begins with ``start``. ``names`` is sorted."""
    place = bisect_left(names, start)
    return place < len(names) and names[place].startswith(start)


def _holds(condition: TensorCondition, shape: tuple[int, ...] | None) -> bool:
    if shape is None or condition.dimensions not in (0, len(shape)):
        return False
    return not condition.sizes or (condition.axis < len(shape) and shape[condition.axis] in condition.sizes)
