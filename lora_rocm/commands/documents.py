"""The JSON document of ``inspect``, as typed dictionaries."""

from __future__ import annotations

from typing import Any, TypedDict


class AlphaDocument(TypedDict):
    """The alphas of an adapter.

    Attributes:
        min: smallest alpha, or null if there is none.
        max: largest alpha, or null if there is none.
        missing: number of modules that have a rank but no alpha.
    """

    min: float | None
    max: float | None
    missing: int


class AdapterDocument(TypedDict):
    """Contents of an adapter file.

    Attributes:
        kind: kind of adapter, such as LoRA, DoRA or LoKr.
        spelling: naming scheme of the tensors.
        modules: number of modules by component and kind of module.
        ranks: number of modules by rank.
        alpha: the alphas of its modules.
        readers: how each program supports the file, or null if unknown.
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
        title: description in a few words.
        usable: whether a recipe can use it.
        families: possible values of `model.family`.
        trainable: families that can be trained with it.
        needed: keys of `model` that a recipe with this base has to set too.
        unusable: why it cannot be trained with any family.
        problem: the error with which `check` and `train` refuse the base.
        notices: notices of `check` and `train` about an accepted base.
        keys: recipe key for which a component can be used, by family.
        part: for a component, its role in a model.
        components: title of each component.
        parts: description of each component, with all keys of this document.
        adapter: contents of an adapter file.
        adapters: contents of each component's adapter.
        tensors: number of tensors.
        bytes: size of the tensors.
        dtypes: size in bytes by number format.
        quantised: quantisation format, or null if there is none.
        metadata: the file's metadata about its origin.
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
