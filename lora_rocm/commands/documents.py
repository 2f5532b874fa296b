"""The JSON document of ``inspect``, whose values are dictionaries."""

from __future__ import annotations

from typing import Any, TypedDict


class AlphaDocument(TypedDict):
    """The alphas of an adapter.

    Attributes:
        min: the smallest; null: there is none.
        max: the largest.
        missing: number of modules with a rank and without alpha.
    """

    min: float | None
    max: float | None
    missing: int


class AdapterDocument(TypedDict):
    """What is in an adapter file.

    Attributes:
        kind: LoRA, DoRA, LoKr and others.
        spelling: whose names its tensors have.
        modules: number of modules by component and kind of module.
        ranks: number of modules by rank.
        alpha: its alphas.
        readers: what each program does with it; null: not known.
    """

    kind: str
    spelling: str | None
    modules: dict[str, dict[str, int]]
    ranks: dict[str, int]
    alpha: AlphaDocument
    readers: dict[str, str] | None


class InspectDocument(TypedDict, total=False):
    """What a file or folder is.

    Attributes:
        path: the file or folder.
        title: what it is.
        usable: whether a recipe can name it.
        families: possible values of `model.family`.
        trainable: those that can be trained here.
        needed: keys of `model` that a base needs, too.
        unusable: why none of the families can be.
        problem: the error by which `check` and `train` refuse a base.
        notices: what these say about one that they take.
        keys: key of the recipe that can name a component, by family.
        part: which part of a model a component is.
        components: what each component is.
        parts: the same with all keys of this document.
        adapter: what is in an adapter file.
        adapters: the same by component.
        tensors: their number.
        bytes: their size.
        dtypes: bytes by number format.
        quantised: the format; null: it is not quantised.
        metadata: how the file was made, as far as it says.
    """

    path: str
    title: str
    usable: bool
    families: list[str]
    trainable: list[str]
    needed: list[str]
    unusable: str
    problem: dict[str, Any]
    notices: list[str]
    keys: dict[str, str]
    part: str
    components: dict[str, str]
    parts: dict[str, InspectDocument]
    adapter: AdapterDocument
    adapters: dict[str, AdapterDocument]
    tensors: int
    bytes: int
    dtypes: dict[str, int]
    quantised: str | None
    metadata: dict[str, Any]
