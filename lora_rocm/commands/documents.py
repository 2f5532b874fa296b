"""The JSON documents of ``status`` and ``inspect``, which are dictionaries."""

from __future__ import annotations

from typing import Any, TypedDict


class RunError(TypedDict):
    """The error that ended a run.

    Attributes:
        code: its stable name.
        what: what happened.
        where: file, line and key with the value, or another place.
        fix: the remedy.
    """

    code: str
    what: str
    where: str
    fix: str


class StatusDocument(TypedDict):
    """State and figures of a run.

    Attributes:
        path: the run directory.
        state: running, finished, stopped (on request), failed (with an error, or ended because it hung), died (without
            an error), or prepared.
        updates: the current step.
        max_train_steps: total number of steps; null: not known yet.
        loss: smoothed.
        rate_per_s: steps per second; null unless it is running.
        eta_s: seconds left; null unless it is running.
        last_event_s_ago: seconds since the last event.
        incidents: number of faults that the loop handled.
        restarts: number of restarts of the worker.
        changes: the mitigations applied after failures, one entry per application.
        last_checkpoint: the newest intact checkpoint.
        telemetry: the last readings of each GPU, with the fields of the event and a text.
        alarms: warnings from telemetry, the newest last.
        error: the error that ended it; null: none.
        files: intact result files.
        readers: the programs that read a LoRA file, by its path.
        remarks: about damaged, missing and older files.
    """

    path: str
    state: str
    updates: int
    max_train_steps: int | None
    loss: float | None
    rate_per_s: float | None
    eta_s: float | None
    last_event_s_ago: float | None
    incidents: int
    restarts: int
    changes: list[str]
    last_checkpoint: str | None
    telemetry: list[dict[str, Any]]
    alarms: list[str]
    error: RunError | None
    files: list[str]
    readers: dict[str, str]
    remarks: list[str]


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
