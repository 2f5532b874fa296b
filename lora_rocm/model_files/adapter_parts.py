"""Sorts the tensors of an adapter file into accepted, ignored and refused ones (``adapter_parts.toml``).

No tensor is skipped silently, because the result would differ from the author's. Each is either accepted, or named
in a notice because it changes no weight of the model, or the file is refused.

Sources of the part names: kohya-ss/sd-scripts ``networks``, LyCORIS ``lycoris/modules`` (``weight_list`` of each
kind), ComfyUI ``comfy/lora.py`` and ``comfy/weight_adapter``, diffusers ``utils/state_dict_utils.py``, PEFT
``utils/save_and_load.py``, OneTrainer ``modelSaver`` (bundled embeddings).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from lora_rocm.errors import AdapterError
from lora_rocm.foundation.tables import read_table
from lora_rocm.foundation.units import count_text

Notify = Callable[[str], None]
Stored = TypeVar("Stored")
"""A tensor, or the entry of a tensor in a file's header."""


@dataclass(frozen=True)
class KindParts:
    """The tensors that one kind of adapter has in a file. Comments in ``adapter_parts.toml`` explain the other fields.

    name: display name ("LoRA").
    peft_type: value of ``peft_type`` in PEFT configs.
    roles: the roles, keyed by the ending of a tensor name.
    """

    name: str
    peft_type: str
    factors: tuple[str, ...]
    needed: tuple[tuple[tuple[str, ...], ...], ...]
    roles: Mapping[str, str]
    alpha_of: tuple[str, ...] = ()
    config_alpha: str = "lora_alpha"
    config_decides_rank: bool = False
    base_changing: tuple[str, ...] = ()
    config_fields: tuple[str, ...] = ()
    not_peft: tuple[str, ...] = ()

    def role_of(self, tensor: str) -> tuple[str, str] | None:
        """Return (module, role) for a tensor name, or None if this kind of adapter has no such tensor."""
        ending = next((ending for ending in self.roles if tensor.endswith("." + ending)), None)
        return None if ending is None else (tensor.removesuffix("." + ending), self.roles[ending])

    def lacking(self, roles: Collection[str]) -> list[str]:
        """Return the required roles that are missing from a module's ``roles``."""
        missing: list[str] = []
        for ways in self.needed:
            begun = [way for way in ways if any(role in roles for role in way)]
            missing += [role for role in (begun or ways)[-1 if begun else 0] if role not in roles]
        return missing


@dataclass(frozen=True)
class Other:
    """Tensors that are not part of a supported adapter.

    pattern: regular expression searched in tensor names.
    what: description of such tensors, for messages.
    instead: advice on what to use instead of the file.
    """

    pattern: str
    what: str
    instead: str = "Use a plain LoRA or LoCon."


@dataclass(frozen=True)
class OtherTable:
    """The table ``adapter_parts.toml``. ``noticed``: tensors that change no weight, so they only cause a notice."""

    kinds: tuple[KindParts, ...]
    refused: tuple[Other, ...]
    noticed: tuple[Other, ...]


@cache
def others() -> OtherTable:
    """Return the table ``adapter_parts.toml``. Errors are raised as in ``read_table``."""
    return read_table(Path(__file__).with_name("adapter_parts.toml"), OtherTable)


def kind_named(name: str) -> KindParts:
    """Return the kind of adapter with this display name."""
    return next(kind for kind in others().kinds if kind.name == name)


def kind_with(names: Iterable[str]) -> KindParts:
    """Return the first kind of adapter that has factors among these tensor names.

    If there is none, return the first kind in the table: its checks then report that the file has no adapter.
    """
    names = list(names)
    for kind in others().kinds:
        if any((known := kind.role_of(name)) is not None and known[1] in kind.factors for name in names):
            return kind
    return others().kinds[0]


def grouped(tensors: Mapping[str, Stored], path: Path, kind: KindParts, notify: Notify) -> dict[str, dict[str, Stored]]:
    """Return all tensors of a file, keyed by the module's name in the file and then by role.

    ``notify`` is called with notices.

    Raises:
        AdapterError: lora-kind, lora-empty, lora-parts, lora-incomplete.
    """
    modules: dict[str, dict[str, Stored]] = {}
    rest = []
    for name, tensor in tensors.items():
        known = kind.role_of(name)
        if known is None:
            rest.append(name)
            continue
        module, role = known
        parts = modules.setdefault(module, {})
        if role in parts:
            raise _error("lora-parts", f"This file has the same part of a module twice: {name} is the second.", path)
        parts[role] = tensor
    whole = {module: parts for module, parts in modules.items() if not kind.lacking(parts)}
    _refuse_others(rest, bool(whole), path, kind, notify)
    _refuse_halves({module: parts for module, parts in modules.items() if module not in whole}, path, kind, notify)
    return whole


def _refuse_others(names: Iterable[str], has_any: bool, path: Path, adapter: KindParts, notify: Notify) -> None:
    found: dict[Other | None, list[str]] = {}
    for name in names:
        kinds = (kind for kind in (*others().noticed, *others().refused) if re.search(kind.pattern, name))
        found.setdefault(next(kinds, None), []).append(name)
    for kind in others().noticed:
        if kind in found:
            notify(f"Ignored in {path.name}: {kind.what} ({_some(found.pop(kind))}).")
    unknown = found.pop(None, [])
    refused = next((kind for kind in others().refused if kind in found), None)
    if unknown and not has_any and len(unknown) >= sum(map(len, found.values())):
        raise _error(
            "lora-empty", "This file contains no LoRA.", path, "Use a LoRA file; a base model belongs in model."
        )
    if not has_any and refused is not None:
        what = f"This file contains {refused.what}, not a {adapter.name}: {_some(found[refused])}."
        raise _error("lora-kind", what, path, refused.instead)
    if refused is not None:
        what = f"This file contains {refused.what} in addition to a {adapter.name}: {_some(found[refused])}."
        raise _error("lora-parts", f"{what} Without them the adapter would have another effect.", path, refused.instead)
    if unknown:
        what = f"This file contains unknown tensors in addition to a {adapter.name}: {_some(unknown)}."
        raise _error("lora-parts", f"{what} Without them the adapter would have another effect.", path)


def _refuse_halves(halves: Mapping[str, Mapping[str, Stored]], path: Path, kind: KindParts, notify: Notify) -> None:
    """Refuse modules that lack a factor.

    Modules with only an alpha cause a notice, because no program uses a lone alpha.
    """
    broken = {module: parts for module, parts in halves.items() if parts.keys() != {"alpha"}}
    if broken:
        module, parts = next(iter(sorted(broken.items())))
        lacking = " and ".join(kind.lacking(parts))
        raise _error(
            "lora-incomplete",
            f"A factor is missing in {count_text(len(broken), 'module')} of this file, such as {module} "
            f"(without {lacking}).",
            path,
            "Download or save the file again.",
        )
    if halves:
        notify(f"Ignored in {path.name}: alphas of modules without weights ({_some(halves)}).")


def check_config(config: Mapping[str, Any], path: Path, kind: KindParts) -> None:
    """Refuse a PEFT config that declares more than a plain adapter of this kind, or another kind.

    Raises:
        AdapterError: lora-kind.
    """
    peft_type = config.get("peft_type")
    if peft_type is not None and str(peft_type).rpartition(".")[2] != kind.peft_type:
        raise _error("lora-kind", f"This is a PEFT adapter of the type {peft_type!s:.40}, not a {kind.name}.", path)
    if kind.not_peft and config:
        raise _error("lora-kind", kind.not_peft[0], path, kind.not_peft[1])
    start = config.get("init_lora_weights")
    if isinstance(start, str) and kind.base_changing and start.lower().startswith(kind.base_changing):
        raise _error(
            "lora-kind",
            f"This LoRA was initialised with init_lora_weights: {start:.40}, which also changes the base model.",
            path,
            "Convert it to a plain LoRA: save it with path_initial_model_for_weight_conversion (PEFT's "
            "save_pretrained).",
        )
    more = [name for name in kind.config_fields if config.get(name) and (name, config[name]) != ("bias", "none")]
    if more:
        what = f"This adapter is not a plain {kind.name}: its config sets {', '.join(more)}."
        raise _error("lora-kind", what, path, f"Use a plain {kind.name}.")


def _some(names: Iterable[str]) -> str:
    """Return a phrase with the number of names and one example, or the name itself if it is the only one."""
    found = sorted(names)
    return found[0] if len(found) == 1 else f"{len(found)} tensors such as {found[0]}"


def _error(code: str, what: str, path: Path, fix: str = "") -> AdapterError:
    return AdapterError(code, what, where=str(path), fix=fix or "Use a plain LoRA or LoCon.")
