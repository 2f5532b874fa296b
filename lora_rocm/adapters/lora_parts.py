"""Sorts a LoRA file's tensors by the endings of their names: accepted, noticed or refused.

Every tensor is accounted for: it is accepted, it is named in a notice because it changes no weight of the model, or the
file is refused. Skipping a part silently would produce images that differ from those of the file's author.

Names of parts: kohya-ss/sd-scripts ``networks``, LyCORIS ``lycoris/modules`` (``weight_list`` of each kind), ComfyUI
``comfy/lora.py`` and ``comfy/weight_adapter``, diffusers ``utils/state_dict_utils.py``, PEFT
``utils/save_and_load.py``, OneTrainer ``modelSaver`` (bundled embeddings).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lora_rocm.adapters.entry import FileKind, Say
from lora_rocm.errors import AdapterError


@dataclass(frozen=True)
class Other:
    """Tensors that are not part of a plain LoRA.

    pattern: found in their names. what: description of such tensors. instead: what the author of the file can do.
    """

    pattern: str
    what: str
    instead: str = "Use a plain LoRA or LoCon."


REFUSED: tuple[Other, ...] = (
    Other(r"\.hada_\w+$", "a LoHa"),
    Other(r"\.lokr_t[12]$", "a Tucker-form LoKr", "Make it again without use_tucker (use_cp in older LyCORIS)."),
    Other(r"\.lokr_\w+$", "a LoKr"),
    Other(r"\.(oft_\w+|oft_\w+\.weight|boft_\w+|rescale)$", "an OFT or BOFT"),
    Other(r"\.lora_mid\.weight$", "a Tucker-form LoCon", "Make it again without use_tucker (use_cp in older LyCORIS)."),
    Other(r"\.([ab][12]|bm)\.weight$", "a GLoRA"),
    Other(r"\.(on_input|ia3_l)$|^(lora|lycoris)_[^.]*\.weight$", "an IA3"),
    Other(r"\.dora_scale$", "a weight decomposition (DoRA)", "Make it again without weight decomposition."),
    Other(r"\.[wb]_norm$", "trained norms (LyCORIS train_norm)", "Make it again without train_norm."),
    Other(r"\.(diff|diff_b)$", "weights or biases trained in full (LyCORIS full)", "Make it again with LoRA alone."),
    Other(r"\.(set_weight|set_bias|reshape_weight)$", "weights that replace the model's"),
    Other(r"\.scalar$", "factors of whole modules (LyCORIS use_scalar)", "Make it again without use_scalar."),
    Other(r"\.lora_embedding_[AB](\.\w+)*$", "a LoRA of token embeddings"),
    Other(r"\bbias$", "trained biases", "Make it again without biases (PEFT: bias: none, lora_bias: false)."),
    Other(r"scale_weight$|weight_scale$|scaled_fp8$", "factors in a scaled number format", "Save it as fp16 or bf16."),
)
"""Checked in order: the first match describes a tensor."""

NOTICED: tuple[Other, ...] = (
    Other(
        r"^bundle_emb\.",
        "embeddings that OneTrainer bundled with the LoRA: the words that stand for them mean nothing without them",
    ),
)
"""Tensors that change no weight of the model."""


def grouped(tensors: Mapping[str, Tensor], path: Path, kind: FileKind, say: Say) -> dict[str, dict[str, Tensor]]:
    """Group all tensors of a file as module (the file's own name) -> role -> tensor; ``say`` receives notices.

    Raises:
        AdapterError: lora-kind, lora-empty, lora-parts, lora-incomplete.
    """
    modules: dict[str, dict[str, Tensor]] = {}
    rest = []
    for name, tensor in tensors.items():
        known = kind.role_of(name)
        if known is None:
            rest.append(name)
            continue
        module, role = known
        parts = modules.setdefault(module, {})
        if role in parts:
            raise _error("lora-parts", f"Two tensors of this file are the same part: {name} is the second.", path)
        parts[role] = tensor
    whole = {module: parts for module, parts in modules.items() if not kind.lacking(parts)}
    _refuse_others(rest, bool(whole), path, kind, say)
    _refuse_halves({module: parts for module, parts in modules.items() if module not in whole}, path, kind, say)
    return whole


def _refuse_others(names: Iterable[str], has_any: bool, path: Path, adapter: FileKind, say: Say) -> None:
    found: dict[Other | None, list[str]] = {}
    for name in names:
        kinds = (kind for kind in (*NOTICED, *REFUSED) if re.search(kind.pattern, name))
        found.setdefault(next(kinds, None), []).append(name)
    for kind in NOTICED:
        if kind in found:
            say(f"Left out of {path.name}: {kind.what} ({_some(found.pop(kind))}).")
    unknown = found.pop(None, [])
    refused = next((kind for kind in REFUSED if kind in found), None)
    if unknown and not has_any and len(unknown) >= sum(map(len, found.values())):
        raise _error("lora-empty", "This file holds no LoRA.", path, "Give a LoRA file; base models go in model.")
    if not has_any and refused is not None:
        what = f"This file holds {refused.what} and no {adapter.name}: {_some(found[refused])}."
        raise _error("lora-kind", what, path, refused.instead)
    if refused is not None:
        what = f"Beside a {adapter.name} this file holds {refused.what}: {_some(found[refused])}."
        raise _error("lora-parts", f"{what} Without that the effect would be another.", path, refused.instead)
    if unknown:
        what = f"Beside a {adapter.name} this file holds something that is not known here: {_some(unknown)}."
        raise _error("lora-parts", f"{what} Without that the effect would be another.", path)


def _refuse_halves(halves: Mapping[str, Mapping[str, Tensor]], path: Path, kind: FileKind, say: Say) -> None:
    """Refuse modules that lack a factor. An alpha alone has no effect in any program, so it only gets a notice."""
    broken = {module: parts for module, parts in halves.items() if parts.keys() != {"alpha"}}
    if broken:
        module, parts = next(iter(sorted(broken.items())))
        lacking = " and ".join(kind.lacking(parts))
        raise _error(
            "lora-incomplete",
            f"{len(broken)} modules of this file lack a factor, for example {module} (it has no {lacking}).",
            path,
            "Download or save the file again.",
        )
    if halves:
        say(f"Left out of {path.name}: alphas of modules that have no weights in it ({_some(halves)}).")


def check_config(config: Mapping[str, Any], path: Path, kind: FileKind) -> None:
    """Refuse a PEFT config that asks for anything but a plain adapter of this kind.

    Raises:
        AdapterError: lora-kind.
    """
    peft_type = config.get("peft_type")
    if peft_type is not None and str(peft_type).rpartition(".")[2] != kind.peft_type:
        raise _error("lora-kind", f"This is a PEFT adapter of the type {peft_type!s:.40}, not a {kind.name}.", path)
    kind.check_config(config, path)


def _some(names: Iterable[str]) -> str:
    """Return the number of names and one example."""
    found = sorted(names)
    return found[0] if len(found) == 1 else f"{len(found)} tensors such as {found[0]}"


def _error(code: str, what: str, path: Path, fix: str = "") -> AdapterError:
    return AdapterError(code, what, where=str(path), fix=fix or "Use a plain LoRA or LoCon.")
