"""What an adapter file holds for a family, by its names and configs: the modules, and whether their strength is known.

The strength of an update is alpha / rank, and is not in the factors. A file that has lost it is refused: read at
another strength, it would be another adapter. A file without any alpha is read at strength 1, as every program does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from lora_rocm.errors import AdapterError
from lora_rocm.foundation.json_text import parse_json
from lora_rocm.foundation.units import count_text
from lora_rocm.model_files.adapter_parts import KindParts, Say, check_config, grouped, kind_with
from lora_rocm.model_files.adapter_spellings import PEFT_PREFIX, Place, components, place_of, standard_names
from lora_rocm.model_files.peft_folder import PEFT_CONFIG

DIFFUSERS_METADATA = "lora_adapter_metadata"
DORA_NORM = "dora_norm"
"""Metadata of our files in the comfyui form: "base" if DoRA's magnitudes are for the norm of the base weight."""
NORM_ENDINGS = (".w_norm", ".b_norm")
MAGNITUDES = ("magnitude", "toolkit_magnitude", "dora_scale")
PATTERN, MAX_WILDCARDS = re.compile(r"\^?(?:[\w-]|\\?\.|\.\*)*\$?"), 2


class Shaped(Protocol):
    """A tensor, or what a header says of one."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> object: ...


Values = TypeVar("Values", bound=Shaped)


OF_KOHYA = "ss_network_module"
"""A field of kohya's metadata that every single file of this program has."""


@dataclass(frozen=True)
class StoredModule(Generic[Values]):
    """One module of a file.

    key: its name in the file. place: what it means. parts: role -> tensor. alpha, rank: of PEFT's config, if it counts.
    rslora: alpha is divided by the root of the rank.
    """

    key: str
    place: Place
    parts: dict[str, Values]
    alpha: float | None
    rank: float | None
    rslora: bool


@dataclass(frozen=True)
class Contents(Generic[Values]):
    """modules: of the file. unknown: keys that no model of the family has. norms: trained norms by name."""

    kind: KindParts
    modules: list[StoredModule[Values]]
    unknown: list[str]
    norms: dict[str, Values]


def contents_of(
    family: str,
    tensors: Mapping[str, Values],
    path: Path,
    *,
    metadata: Mapping[str, str] | None = None,
    peft: Mapping[str, Any] | None = None,
    with_norms: bool = True,
    say: Say = lambda text: None,
) -> Contents[Values]:
    """Return what a file holds for a family.

    Args:
        family: value of ``model.family``.
        tensors: of the file, by its names.
        path: of the file, for errors.
        metadata: of the file.
        peft: the config of a PEFT folder; None: the file is not in one.
        with_norms: whether trained norms are taken; else such a file is refused.
        say: receives notices.

    Raises:
        AdapterError: it is no adapter, holds what is not read, or has lost its strength.
    """
    if DORA_NORM in (metadata or {}):
        what = "This DoRA is in the comfyui form: its magnitudes are for ComfyUI's rule alone."
        fix = "Give the same run's file in the kohya or diffusers form."
        raise AdapterError("lora-magnitudes", what, where=str(path), fix=fix)
    standard, norms = standard_names(tensors, path), dict[str, Values]()
    kind = kind_with(standard)
    dotted = tuple(f"{row.name}." for row in components(family) if row.own_prefixes)
    if with_norms and peft is None and not any(name.startswith(dotted) for name in standard):
        norms = {name: standard.pop(name) for name in sorted(standard) if name.endswith(NORM_ENDINGS)}
    groups = grouped(standard, path, kind, say)
    configs = {"": dict(peft)} if peft is not None else _configs(metadata or {}, dotted)
    for config in configs.values():
        check_config({**config, "peft_type": config.get("peft_type", kind.peft_type)}, path, kind)
    found, unknown = list[StoredModule[Values]](), list[str]()
    for key, parts in groups.items():
        place = place_of(family, key)
        if place is None:
            unknown.append(key)
        elif "alpha" in parts:
            if math.prod(parts["alpha"].shape) != 1:
                raise ValueError(f"{key} has an alpha of the shape {list(parts['alpha'].shape)}")
            found.append(StoredModule(key, place, parts, None, None, False))
        else:
            of_component = configs.get(f"{place.component}.", configs.get(""))
            found.append(_by_config(key, place, parts, of_component, kind, path, whole_config=peft is not None))
    for each in found:
        _check_factors(each)
    unknown += [name for name in norms if place_of(family, name.rpartition(".")[0], norm=True) is None]
    _check_strength(found, kind, path, metadata or {}, say)
    return Contents(kind, found, unknown, norms)


def _configs(metadata: Mapping[str, str], dotted: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return start of a component's names ("unet.", "") -> its config in the metadata of diffusers."""
    configs: dict[str, dict[str, Any]] = {}
    for field, value in parse_json(metadata.get(DIFFUSERS_METADATA, "{}")).items():
        component = next((start for start in dotted if field.startswith(start)), "")
        configs.setdefault(component, {})[field.removeprefix(component)] = value
    return configs


def _by_config(
    key: str,
    place: Place,
    parts: dict[str, Values],
    config: Mapping[str, Any] | None,
    kind: KindParts,
    path: Path,
    *,
    whole_config: bool,
) -> StoredModule[Values]:
    """Return a module without an alpha of its own: alpha and rank are those of the config, if there is one.

    ``whole_config``: it is the file of a PEFT folder, which has all fields.

    Raises:
        AdapterError: lora-strength: the config does not give them, or is of another file.
    """
    if config is None or not kind.alpha_of:
        return StoredModule(key, place, parts, None, None, False)
    starts = (PEFT_PREFIX, f"{place.component}.")
    name = next((key.removeprefix(start) for start in starts if key.startswith(start)), key)
    alpha = _value(config, "alpha_pattern", kind.config_alpha, name)
    rank = _value(config, "rank_pattern", "r", name)
    actual = parts["down"].shape[0] if "down" in parts and len(parts["down"].shape) else None
    if rank is None and not whole_config and not kind.config_decides_rank:
        rank = actual  # diffusers' metadata; the factors have it
    for field, value in ((kind.config_alpha, alpha), ("r", rank)):
        if not _is_number(value):
            fault = "a value that is no number" if value is not None else "no such field"
            what = f"The strength of {key:.200} is not known: its PEFT config needs {field}, and has {fault}."
            raise _lost(what, path, f"Use the {PEFT_CONFIG} that was saved with it, or save the adapter again.")
    if not isinstance(config.get("use_rslora") or False, bool):
        what = "The strength of this file is not known: use_rslora of its PEFT config is neither true nor false."
        raise _lost(what, path, "Write true or false, as it was trained.")
    if actual is not None and rank != actual:
        what = f"The PEFT config of this file gives {key:.200} the rank {rank}, and the file has {actual}."
        raise _lost(what, path, f"Use the {PEFT_CONFIG} that was saved with this file.")
    if config.get("use_dora") and set(MAGNITUDES).isdisjoint(parts):
        raise _lost(
            f"The PEFT config says that this is a DoRA, and {key:.200} has no magnitudes.", path, "Save it again."
        )
    return StoredModule(key, place, parts, float(alpha), float(rank), bool(config.get("use_rslora")))


def _check_factors(module: StoredModule[Values]) -> None:
    """Refuse what no model could use.

    Raises:
        ValueError: factors are whole numbers, or do not fit each other.
    """
    for role, value in module.parts.items():
        if role != "alpha" and len(value.shape) and re.match(r"torch\.(u?int|bool)|[IU]\d+$|BOOL$", str(value.dtype)):
            raise ValueError(f"{module.key:.200} is stored as whole numbers")
    if "down" in module.parts:
        down, up = (tuple(module.parts[role].shape) for role in ("down", "up"))
        if len(down) < 2 or len(up) < 2 or down[0] == 0:
            raise ValueError(f"{module.key:.200} has factors of the shapes {up} and {down}")
        if up[1] != down[0]:
            raise ValueError(f"{module.key:.200} has factors of the ranks {up[1]} and {down[0]}")


def _check_strength(
    modules: Sequence[StoredModule[Values]], kind: KindParts, path: Path, metadata: Mapping[str, str], say: Say
) -> None:
    """Refuse a file in which the strength of some modules is not known.

    A single file of this program with the names of PEFT has its strength in its factors. Its metadata tell it from a
    file of PEFT, which has none of kohya's fields.

    Raises:
        AdapterError: lora-strength.
    """
    scaled = [each for each in modules if not set(kind.alpha_of).isdisjoint(each.parts)]
    lost = [each for each in scaled if "alpha" not in each.parts and each.alpha is None]
    named = f"{count_text(len(lost), 'module')} such as {lost[0].key:.200}" if lost else ""
    if any(each.key.startswith(PEFT_PREFIX) for each in lost):
        if OF_KOHYA in metadata:
            return
        config = path / PEFT_CONFIG if path.is_dir() else path.with_name(PEFT_CONFIG)
        raise _lost(
            f"This file has the names of PEFT ({lost[0].key:.200}), whose strength is in {config}. It is missing.",
            path,
            f"Copy {PEFT_CONFIG} from where the adapter was saved into the same folder, and give the folder.",
        )
    if lost and len(lost) < len(scaled):
        raise _lost(
            f"This file says nothing of the strength of {named}; of others it does.", path, "Save the file again."
        )
    if any("toolkit_magnitude" in each.parts and re.match("lora_|lycoris_", each.key) for each in lost):
        what = f"This is a DoRA of ai-toolkit, which keeps no alphas: the strength of {named} is not known."
        raise _lost(what, path, "Use a LoRA file, or a DoRA of another program.")
    dora = [each for each in scaled if not set(MAGNITUDES).isdisjoint(each.parts)]
    if dora and len(dora) < len(scaled):
        counts = f"{count_text(len(scaled) - len(dora), 'module')} of {len(scaled)}"
        say(f"{path.name} is a DoRA, and {counts} have no magnitudes in it: they are read as plain LoRA.")
    if lost:
        say(f"{path.name} has no alphas: it is read at strength 1, as other programs read it.")


def _value(config: Mapping[str, Any], patterns: str, default: str, module: str) -> Any:
    """Return a module's value in a PEFT config: by the first pattern that matches it, else the default."""
    own = config.get(patterns) or {}
    return next((own[key] for key in own if _means(key, module)), config.get(default))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _means(pattern: str, module: str) -> bool:
    """Return whether a key of ``alpha_pattern`` matches a module, like PEFT's ``get_pattern_key``.

    Only the patterns that PEFT's writers produce are accepted.

    Raises:
        ValueError: another regular expression; one from an untrusted file could backtrack without end.
    """
    if not PATTERN.fullmatch(pattern) or pattern.count(".*") > MAX_WILDCARDS:
        raise ValueError(f"the alpha_pattern {pattern[:80]!r} is no name of a module")
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


def _lost(what: str, path: Path, fix: str) -> AdapterError:
    return AdapterError("lora-strength", what, where=str(path), fix=fix)
