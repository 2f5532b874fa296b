"""Says for ``lora-rocm inspect`` whether a run can start from an adapter file, by the function that reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lora_rocm.commands.stored_numbers import StoredNumbers
from lora_rocm.errors import AdapterError
from lora_rocm.families.registry import Registry
from lora_rocm.families.spec import FamilySpec
from lora_rocm.foundation.terminal_text import one_line
from lora_rocm.model_files.adapter_contents import NOT_UNDERSTOOD, contents_of, not_understood, other_axis
from lora_rocm.model_files.adapter_parts import Say
from lora_rocm.model_files.header import Header
from lora_rocm.model_files.peft_folder import PEFT_WEIGHTS, read_peft_config

MAX_SHOWN = 200
MAX_NAMED = 3
LIMITS_HERE = ("lora-kind", "lora-magnitudes", "init-from-axis")
"""Codes of refusals of files that are whole, and that other programs may read; any other file has a fault."""


def peft_config(header: Header) -> Mapping[str, Any] | None:
    """Return the config of a PEFT folder; None if the file is in none."""
    return read_peft_config(header.path.parent) if header.path.name == PEFT_WEIGHTS else None


def _refusal(
    header: Header, config: Mapping[str, Any] | None, spec: FamilySpec, numbers: StoredNumbers, say: Say
) -> AdapterError | None:
    """Return why no run of a family starts from an adapter file, by the function that reads it; None if one can."""
    path = header.path
    try:
        found = contents_of(
            spec.name,
            header.tensors,
            path,
            numbers,
            metadata=header.metadata,
            peft=config,
            with_norms=spec.trains_norms,
            say=say,
        )
    except AdapterError as error:
        return error
    except NOT_UNDERSTOOD as error:
        return not_understood(error, path)
    if not found.unknown:
        axis = next((each for each in found.modules if each.per_input), None)
        return None if axis is None else other_axis(axis.key, axis.parts["dora_scale"].shape, path)
    others = f", and {len(found.unknown) - 1} more modules of this file" if len(found.unknown) > 1 else ""
    what = f"{spec.title} has no module {one_line(found.unknown[0])[:MAX_SHOWN]}{others}."
    names = sorted(name for name in header.tensors if name.startswith(found.unknown[0])) or found.unknown
    named = one_line(", ".join(names[:MAX_NAMED]))[:MAX_SHOWN]
    fix = f"Use a LoRA that was made for {spec.title}. In this one the tensors are {named}."
    return AdapterError("lora-of-another-model", what, where=str(path), fix=fix)


def refusals(
    header: Header, families: Sequence[str], registry: Registry, say: Say = lambda text: None
) -> dict[str, AdapterError]:
    """Return family -> why no run of it starts from the file, of those that are trained here. ``say``: gets notices."""
    config, errors, numbers = peft_config(header), dict[str, AdapterError](), StoredNumbers(header)
    for name in families:
        if name in registry and (error := _refusal(header, config, registry[name], numbers, say)) is not None:
            errors[name] = error
    return errors


def has_fault(refused: Mapping[str, AdapterError]) -> bool:
    """Whether a file that no family takes is damaged or of another model, so that no program could use it."""
    return any(error.code not in LIMITS_HERE for error in refused.values())
