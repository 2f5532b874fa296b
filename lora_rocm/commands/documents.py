"""The JSON document of ``inspect``: nested dictionaries."""

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
    """Contents of an adapter file.

    Attributes:
        kind: LoRA, DoRA, LoKr and others.
        spelling: naming scheme of its tensors.
        modules: number of modules by component and kind of module.
        ranks: number of modules by rank.
        alpha: its alphas.
        readers: support by each program; null: unknown.
    """

    kind: str
    spelling: str | None
    modules: dict[str, dict[str, int]]
    ranks: dict[str, int]
    alpha: AlphaDocument
    readers: dict[str, str] | None


class InspectDocument(TypedDict, total=False):
    """Description of a file or folder.

    Attributes:
        path: the file or folder.
        title: its description.
        usable: whether a recipe can use it.
        families: possible values of `model.family`.
        trainable: the families that can be trained here.
        needed: keys of `model` that a base also needs.
        unusable: the reason why no family can be trained.
        problem: the error by which `check` and `train` refuse a base.
        notices: notices of `check` and `train` about an accepted base.
        keys: the recipe key that can name a component, by family.
        part: the part of a model that a component is.
        components: title of each component.
        parts: each component, with all keys of this document.
        adapter: the contents of an adapter file.
        adapters: the same by component.
        tensors: number of tensors.
        bytes: size of the tensors.
        dtypes: bytes by number format.
        quantised: the format; null: it is not quantised.
        metadata: the file's origin, according to its metadata.
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
