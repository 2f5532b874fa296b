"""LoRA files of any origin, read into one form: kohya and diffusers files, PEFT directories.

Every module's part of a file is a ``LoraEntry``; modules are named ``component.module`` ("unet.mid_block...", and for
text encoders without the ``text_model`` level that transformers 5 dropped from one of the two).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.utils.state_dict_utils import (
    convert_state_dict_to_diffusers,
    convert_state_dict_to_peft,
    convert_unet_state_dict_to_peft,
)
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from lora_rocm.errors import AdapterError
from lora_rocm.families.base import ModelFamily
from lora_rocm.families.weightfiles import Header, read_header, read_tensors
from lora_rocm.host.plain import read_plain

PEFT_CONFIG, PEFT_WEIGHTS, PEFT_PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
DIFFUSERS_METADATA = "lora_adapter_metadata"
OTHER_KINDS = {"hada_w": "a LoHa", "lokr_w": "a LoKr", "lora_mid": "a Tucker-form LoCon", "oft_": "an OFT"}
PICKLES = (".ckpt", ".bin", ".pt", ".pth")
KOHYA_PREFIXES = ("lora_unet_", "lora_te")
MAX_CONFIG_BYTES = 1 << 22
PATTERN, MAX_WILDCARDS = re.compile(r"\^?(?:[\w-]|\\?\.|\.\*)*\$?"), 2


@dataclass
class LoraEntry:
    """One module's low-rank update, ``scale * up @ down``: float32 on the CPU.

    down: [r, in] or [r, in, kh, kw].
    up: [out, r] or [out, r, 1, 1].
    scale: what multiplies the product (alpha / rank, or alpha / sqrt(rank) for rsLoRA).
    magnitude: DoRA's [out], or None.
    """

    down: Tensor
    up: Tensor
    scale: float
    magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    def update(self) -> Tensor:
        """What is added to the weight before DoRA's normalisation, in the weight's shape."""
        product = (self.scale * self.up.flatten(1)) @ self.down.flatten(1)
        return product.reshape(self.up.shape[0], *self.down.shape[1:])

    def effect(self, weight: Tensor) -> Tensor:
        """The change of the weight as a whole: ``update``, or with DoRA ``m * (W + update) / ||W + update|| - W``.

        Args:
            weight: the base weight, float32; the norm is taken per output row (DoRA, arXiv 2402.09353, eq. 5).
        """
        if self.magnitude is None:
            return self.update()
        moved = weight + self.update()
        shape = (-1, *[1] * (weight.ndim - 1))
        return moved * (self.magnitude / moved.flatten(1).norm(dim=1)).view(shape) - weight


def canonical(component: str, module: str) -> str:
    """The name of a module, the same for every version of transformers."""
    return f"{component}.{module.removeprefix('text_model.')}"


def adaptable(component: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path, base layer) of every Linear and Conv2d that can carry a LoRA, also where one is injected already."""
    injected: tuple[str, ...] = ()
    for path, module in component.named_modules():
        if isinstance(module, LoraLayer):
            injected = (*injected[-1:], path + ".")
            yield path, module.get_base_layer()
        elif isinstance(module, nn.Linear | nn.Conv2d) and not path.startswith(injected):
            yield path, module


def components_of(path: Path) -> set[str]:
    """The components that a LoRA file adapts ("unet", "text_encoder", "text_encoder_2"), from names alone.

    Raises:
        AdapterError: missing, pickle, damaged, no LoRA.
    """
    folders = _peft_folders(path)
    if folders:
        return {name for name in folders if name} or {"unet"}
    kohya = {"lora_unet": "unet", "lora_te1": "text_encoder", "lora_te": "text_encoder", "lora_te2": "text_encoder_2"}
    names = read_header(_one_file(path), AdapterError).tensors
    found = {kohya.get("_".join(name.split("_")[:2]), name.split(".")[0]) for name in names}
    return found & set(kohya.values())


def read_lora(family: ModelFamily, components: Mapping[str, nn.Module], path: Path) -> dict[str, LoraEntry]:
    """Read a LoRA of this model, whatever its format: module name -> entry.

    Args:
        family: knows the kohya names.
        components: the model's components; modules and shapes of the file are checked against them.
        path: a .safetensors file or a PEFT directory (one adapter, or one sub-folder a component).

    Raises:
        AdapterError: missing, pickle, damaged, not a LoRA, or a LoRA of another model.
    """
    paths = [(name, module, base) for name, c in components.items() for module, base in adaptable(c)]
    shapes = {canonical(name, module): tuple(base.weight.shape) for name, module, base in paths}
    try:
        folders = _peft_folders(path)
        if folders:
            return _checked(_from_peft(folders, shapes), shapes, path)
        header = read_header(_one_file(path), AdapterError)
        _refuse_other_kinds(header)
        tensors = {name: tensor.float() for name, tensor in read_tensors(header, error=AdapterError).items()}
        if any(name.startswith(KOHYA_PREFIXES) for name in tensors):
            keys = {f"lora_{name}_{module.replace('.', '_')}": canonical(name, module) for name, module, _ in paths}
            keys |= {family.export_key(name, module): canonical(name, module) for name, module, _ in paths}
            return _checked(_from_kohya(tensors, keys), shapes, path)
        return _checked(_from_diffusers(tensors, header.metadata, set(family.text_components)), shapes, path)
    except (
        OSError,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        ArithmeticError,
        RecursionError,
    ) as error:  # a config with values of the wrong kind
        raise _error(
            "lora-unreadable", f"This LoRA cannot be understood: {error}.", path, "Use another file."
        ) from error


def _from_kohya(tensors: Mapping[str, Tensor], keys: Mapping[str, str]) -> dict[str, LoraEntry]:
    """Kohya's form; a name that ``keys`` does not know is kept as it is, for the error message."""
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.partition(".")
        groups.setdefault(module, {})[kind] = tensor
    entries = {}
    for module, parts in groups.items():
        if "lora_down.weight" in parts and "lora_up.weight" in parts:
            alpha = parts["alpha"].flatten()[0].item() if "alpha" in parts and parts["alpha"].numel() else None
            entries[keys.get(module, module)] = _entry(
                module, parts["lora_down.weight"], parts["lora_up.weight"], alpha, parts.get("dora_scale")
            )
    return entries


def _entry(
    module: str, down: Tensor, up: Tensor, alpha: Any, magnitude: Tensor | None, use_rslora: bool = False
) -> LoraEntry:
    """An entry from what a file says of one module; without an alpha the scale is 1, as every reader assumes.

    Raises:
        ValueError: it cannot be a low-rank update.
    """
    if down.ndim < 2 or up.ndim < 2 or down.shape[0] == 0:
        raise ValueError(f"{module} has factors of the shapes {tuple(up.shape)} and {tuple(down.shape)}")
    rank = down.shape[0]
    scale = 1.0 if alpha is None else float(alpha) / (math.sqrt(rank) if use_rslora else rank)
    if not math.isfinite(scale):
        raise ValueError(f"{module} has the alpha {alpha}")
    return LoraEntry(down, up, scale, None if magnitude is None else magnitude.flatten())


def _from_diffusers(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], text_components: set[str]
) -> dict[str, LoraEntry]:
    """The diffusers form, new (``lora_A``) and old (``lora.down``, ``to_q_lora``), by diffusers' own name maps."""
    configs = json.loads(metadata.get(DIFFUSERS_METADATA, "{}"))
    entries = {}
    for component in {name.split(".")[0] for name in tensors}:
        part = {
            name.removeprefix(component + "."): t for name, t in tensors.items() if name.startswith(component + ".")
        }
        if not any("lora_A" in name for name in part):
            if component in text_components:
                part = convert_state_dict_to_peft(convert_state_dict_to_diffusers(part))
            else:
                part = convert_unet_state_dict_to_peft(part)
        config = {k.removeprefix(component + "."): v for k, v in configs.items() if k.startswith(component + ".")}
        entries |= {canonical(component, name): entry for name, entry in _peft_entries(part, config).items()}
    return entries


def _from_peft(folders: Mapping[str, Path], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, LoraEntry]:
    """PEFT directories; the component of a single one is that which has its modules."""
    entries = {}
    for component, folder in folders.items():
        config = json.loads(read_plain(folder / PEFT_CONFIG, MAX_CONFIG_BYTES).decode("utf-8"))
        tensors = read_tensors(read_header(folder / PEFT_WEIGHTS, AdapterError), error=AdapterError)
        found = _peft_entries({n.removeprefix(PEFT_PREFIX): t.float() for n, t in tensors.items()}, config)
        owners = {name.split(".")[0] for name in shapes}
        owner = component or next(
            (o for o in sorted(owners) if {canonical(o, n) for n in found} <= shapes.keys()), "unet"
        )
        entries |= {canonical(owner, name): entry for name, entry in found.items()}
    return entries


def _peft_entries(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, LoraEntry]:
    """Entries from PEFT names and a PEFT config (empty when there is none)."""
    entries = {}
    for name, down in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removesuffix(".lora_A.weight")
        up = tensors.get(f"{module}.lora_B.weight")
        if up is None:
            continue
        alphas = config.get("alpha_pattern") or {}
        alpha = next((alphas[key] for key in alphas if _means(key, module)), config.get("lora_alpha"))
        name = f"{module}.lora_magnitude_vector"
        magnitude = tensors.get(name, tensors.get(f"{name}.weight"))
        entries[module] = _entry(module, down, up, alpha, magnitude, bool(config.get("use_rslora")))
    return entries


def _means(pattern: str, module: str) -> bool:
    """Whether a key of ``alpha_pattern`` means a module: PEFT's ``get_pattern_key``, for what its writers write.

    Raises:
        ValueError: another regular expression; a file from anywhere could name one that never ends.
    """
    if not PATTERN.fullmatch(pattern) or pattern.count(".*") > MAX_WILDCARDS:
        raise ValueError(f"the alpha_pattern {pattern[:80]!r} is no name of a module")
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


def _checked(entries: dict[str, LoraEntry], shapes: Mapping[str, tuple[int, ...]], path: Path) -> dict[str, LoraEntry]:
    """The entries, in the shapes that the model's layers need.

    Raises:
        AdapterError: lora-empty, lora-of-another-model.
    """
    if not entries:
        raise _error("lora-empty", "This file holds no LoRA.", path)
    unknown = sorted(name for name in entries if name not in shapes)
    if unknown:
        text = [name for name in unknown if name.startswith(("lora_te", "text_encoder"))]
        raise _error(
            "lora-of-another-model",
            f"{len(unknown)} of {len(entries)} modules of this LoRA are not in this model, for example {unknown[0]}.",
            path,
            "It also adapts the text encoders: set lora.train_text_encoder to true."
            if len(text) == len(unknown)
            else "Use a LoRA that was made for this model's family.",
        )
    for name, entry in entries.items():
        shape, rank = shapes[name], entry.rank
        if entry.up.numel() != shape[0] * rank or entry.down.numel() != rank * math.prod(shape[1:]):
            raise _error(
                "lora-of-another-model",
                f"In this LoRA {name} changes a {entry.up.shape[0]} x {math.prod(entry.down.shape[1:])} weight; "
                f"in this model it is {shape[0]} x {math.prod(shape[1:])}.",
                path,
                "Use a LoRA that was made for this model's family.",
            )
        entry.down = entry.down.reshape(rank, *shape[1:])
        entry.up = entry.up.reshape(shape[0], rank, *[1] * (len(shape) - 2))
        if not all(torch.isfinite(t).all() for t in (entry.down, entry.up)):
            raise _error("lora-not-finite", f"{name} holds values that are no numbers.", path, "Use another file.")
    return entries


def _peft_folders(path: Path) -> dict[str, Path]:
    """Component ("" when only one is there) -> PEFT folder; empty when ``path`` is none."""
    if path.name == PEFT_WEIGHTS and (path.parent / PEFT_CONFIG).is_file():
        path = path.parent
    if (path / PEFT_CONFIG).is_file():
        return {"": path}
    return (
        {folder.parent.name: folder.parent for folder in sorted(path.glob(f"*/{PEFT_CONFIG}"))} if path.is_dir() else {}
    )


def _one_file(path: Path) -> Path:
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        if len(files) == 1:
            return files[0]
        raise _error("lora-missing", f"This folder holds {len(files)} safetensors files.", path, "Give one file.")
    if not path.is_file():
        raise _error("lora-missing", "There is no such LoRA file.", path, "Give a .safetensors file or a PEFT folder.")
    if path.suffix.lower() in PICKLES:
        raise _error(
            "pickle-refused",
            "This is a pickle file: loading one can run any program hidden in it, so only .safetensors is read.",
            path,
            "Use the .safetensors edition of the LoRA.",
        )
    return path


def _refuse_other_kinds(header: Header) -> None:
    for mark, kind in OTHER_KINDS.items():
        if any(mark in name for name in header.tensors):
            raise _error("lora-kind", f"This is {kind} file, not a LoRA.", header.path, "Use a plain LoRA or LoCon.")
    if not any("lora" in name for name in header.tensors):
        raise _error(
            "lora-empty", "This file holds no LoRA.", header.path, "Give a LoRA file; base models go in model."
        )


def _error(code: str, what: str, path: Path, fix: str = "") -> AdapterError:
    return AdapterError(code, what, where=str(path), fix=fix)
