"""LoRA files of any origin, read into one form: kohya and diffusers files, PEFT directories.

Every module's part of a file is a ``LoraEntry``; modules are named ``component.module`` ("unet.mid_block...", and for
text encoders without the ``text_model`` level that transformers 5 dropped from one of the two). ``lora_parts`` says
which tensors of a file are taken; a file with others is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
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

from lora_rocm.adapters.lora_parts import Say, check_config, grouped
from lora_rocm.errors import AdapterError
from lora_rocm.families.base import ModelFamily
from lora_rocm.families.weightfiles import Header, read_header, read_tensors
from lora_rocm.host.plain import read_plain

PEFT_CONFIG, PEFT_WEIGHTS, PEFT_PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
DIFFUSERS_METADATA = "lora_adapter_metadata"
PICKLES = (".ckpt", ".bin", ".pt", ".pth")
KOHYA_PREFIXES = ("lora_", "lycoris_")
OLD_DIFFUSERS = re.compile(r"_lora\.(up|down)\.")
MAX_CONFIG_BYTES = 1 << 22
PATTERN, MAX_WILDCARDS = re.compile(r"\^?(?:[\w-]|\\?\.|\.\*)*\$?"), 2


@dataclass
class LoraEntry:
    """One module's low-rank update, ``scale * up @ down``: float32 on the CPU.

    down: [r, in] or [r, in, kh, kw].
    up: [out, r] or [out, r, 1, 1].
    scale: what multiplies the product (alpha / rank, or alpha / sqrt(rank) for rsLoRA).
    magnitude: [out] of a DoRA, or None.
    input_magnitude: [in] of a DoRA that normalises each input's column instead (OneTrainer's default, LyCORIS with
        wd_on_output=False), or None.
    """

    down: Tensor
    up: Tensor
    scale: float
    magnitude: Tensor | None = None
    input_magnitude: Tensor | None = None

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
            weight: the base weight, float32; the norm is taken per output row, or per input where the magnitudes are
                per input (DoRA, arXiv 2402.09353, eq. 5, normalises one axis; programs differ in which).
        """
        if self.input_magnitude is not None:
            shape = (1, -1, *[1] * (weight.ndim - 2))
            return (weight + self.update()) * self.input_scale(weight).view(shape) - weight
        if self.magnitude is None:
            return self.update()
        moved = weight + self.update()
        shape = (-1, *[1] * (weight.ndim - 1))
        return moved * (self.magnitude / moved.flatten(1).norm(dim=1)).view(shape) - weight

    def input_scale(self, weight: Tensor) -> Tensor:
        """[in]: ``input_magnitude / norm``, by which such a DoRA multiplies the inputs of the adapted weight."""
        assert self.input_magnitude is not None, "a DoRA with magnitudes per input"
        norm = (weight + self.update()).transpose(0, 1).flatten(1).norm(dim=1)
        return self.input_magnitude / (norm + torch.finfo(norm.dtype).eps)  # as LyCORIS and ComfyUI add it


@dataclass
class FileModule:
    """What a file says of one module. ``key``: its name there; ``parts``: by role (``lora_parts.TAKEN``)."""

    key: str
    parts: dict[str, Tensor]
    alpha: float | None
    use_rslora: bool = False


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


def read_lora(
    family: ModelFamily, components: Mapping[str, nn.Module], path: Path, say: Say = lambda text: None
) -> dict[str, LoraEntry]:
    """Read a LoRA of this model, whatever its format: module name -> entry.

    Args:
        family: knows the kohya names.
        components: the model's components; modules and shapes of the file are checked against them.
        path: a .safetensors file or a PEFT directory (one adapter, or one sub-folder a component).
        say: gets a sentence for what is left out because it changes no weight.

    Raises:
        AdapterError: missing, pickle, damaged, not a LoRA, more than a LoRA, or a LoRA of another model.
    """
    paths = [(name, module, base) for name, c in components.items() for module, base in adaptable(c)]
    shapes = {canonical(name, module): tuple(base.weight.shape) for name, module, base in paths}
    try:
        folders = _peft_folders(path)
        if folders:
            return _fitted(_from_peft(folders, shapes, say), shapes, path)
        header = read_header(_one_file(path), AdapterError)
        tensors = read_tensors(header, error=AdapterError)
        if any(name.startswith(KOHYA_PREFIXES) for name in tensors):
            keys = {f"lora_{name}_{module.replace('.', '_')}": canonical(name, module) for name, module, _ in paths}
            keys |= {family.export_key(name, module): canonical(name, module) for name, module, _ in paths}
            modules = _modules(grouped(tensors, path, say), {}, lambda key: keys.get(key, key))
            return _fitted(modules, shapes, path)
        return _fitted(_from_diffusers(tensors, header, set(family.text_components), say), shapes, path)
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


def _modules(
    groups: Mapping[str, dict[str, Tensor]], config: Mapping[str, Any], name_of: Callable[[str], str]
) -> dict[str, FileModule]:
    """Module name -> what the file says of it. Alphas stand in the file, else in a PEFT config (empty: there is none).

    Raises:
        ValueError: a module stands in the file twice, under two names.
    """
    modules: dict[str, FileModule] = {}
    for key, parts in groups.items():
        if "alpha" in parts and parts["alpha"].numel() != 1:
            raise ValueError(f"{key} has an alpha of the shape {list(parts['alpha'].shape)}")
        alpha = parts["alpha"].float().item() if "alpha" in parts else _alpha(config, key)
        found = FileModule(key, parts, alpha, "alpha" not in parts and bool(config.get("use_rslora")))
        if modules.setdefault(name_of(key), found) is not found:
            raise ValueError(f"{key} and {modules[name_of(key)].key} are the same module")
    return modules


def _alpha(config: Mapping[str, Any], module: str) -> float | None:
    patterns = config.get("alpha_pattern") or {}
    alpha = next((patterns[key] for key in patterns if _means(key, module)), config.get("lora_alpha"))
    return None if alpha is None else float(alpha)


def _from_diffusers(
    tensors: Mapping[str, Tensor], header: Header, text_components: set[str], say: Say
) -> dict[str, FileModule]:
    """The diffusers form, new (``lora_A``) and old (``lora.down``, ``to_q_lora``), by diffusers' own name maps."""
    configs = json.loads(header.metadata.get(DIFFUSERS_METADATA, "{}"))
    renamed: dict[str, Tensor] = {}
    for component in {name.split(".")[0] for name in tensors}:
        part = {
            name.removeprefix(component + "."): t for name, t in tensors.items() if name.startswith(component + ".")
        }
        if not any("lora_A" in name for name in part):
            if component not in text_components:
                part = convert_unet_state_dict_to_peft(part)
            elif any(OLD_DIFFUSERS.search(name) for name in part):
                part = convert_state_dict_to_peft(convert_state_dict_to_diffusers(part))
        renamed |= {f"{component}.{name}": tensor for name, tensor in part.items()}
    whole = {name: tensor for name, tensor in tensors.items() if "." not in name}  # of no component
    if len(renamed) + len(whole) != len(tensors):
        raise ValueError("two names in it mean the same tensor")
    modules: dict[str, FileModule] = {}
    groups = grouped(renamed | whole, header.path, say)
    for component in sorted({key.split(".")[0] for key in groups}):
        config = {k.removeprefix(component + "."): v for k, v in configs.items() if k.startswith(component + ".")}
        check_config(config, header.path)
        own = {k.removeprefix(component + "."): v for k, v in groups.items() if k.startswith(component + ".")}
        modules |= _modules(own, config, partial(canonical, component))
    return modules


def _from_peft(folders: Mapping[str, Path], shapes: Mapping[str, tuple[int, ...]], say: Say) -> dict[str, FileModule]:
    """PEFT directories; the component of a single one is that which has its modules."""
    modules: dict[str, FileModule] = {}
    owners = sorted({name.split(".")[0] for name in shapes})
    for component, folder in folders.items():
        config = json.loads(read_plain(folder / PEFT_CONFIG, MAX_CONFIG_BYTES).decode("utf-8"))
        check_config(config, folder)
        tensors = read_tensors(read_header(folder / PEFT_WEIGHTS, AdapterError), error=AdapterError)
        groups = grouped({name.removeprefix(PEFT_PREFIX): t for name, t in tensors.items()}, folder, say)
        owner = component or next((o for o in owners if {canonical(o, n) for n in groups} <= shapes.keys()), "unet")
        modules |= _modules(groups, config, partial(canonical, owner))
    return modules


def _means(pattern: str, module: str) -> bool:
    """Whether a key of ``alpha_pattern`` means a module: PEFT's ``get_pattern_key``, for what its writers write.

    Raises:
        ValueError: another regular expression; a file from anywhere could name one that never ends.
    """
    if not PATTERN.fullmatch(pattern) or pattern.count(".*") > MAX_WILDCARDS:
        raise ValueError(f"the alpha_pattern {pattern[:80]!r} is no name of a module")
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


def _fitted(modules: dict[str, FileModule], shapes: Mapping[str, tuple[int, ...]], path: Path) -> dict[str, LoraEntry]:
    """Entries in the shapes that the model's layers need.

    Raises:
        AdapterError: lora-empty, lora-of-another-model, lora-magnitudes, lora-not-finite.
    """
    if not modules:
        raise _error("lora-empty", "This file holds no LoRA.", path, "Give a LoRA file; base models go in model.")
    unknown = sorted(name for name in modules if name not in shapes)
    if unknown:
        raise _error(
            "lora-of-another-model",
            f"{len(unknown)} of {len(modules)} modules of this LoRA are not in this model, for example {unknown[0]}.",
            path,
            "Use a LoRA that was made for this model's family.",
        )
    return {name: _entry(name, module, shapes[name], path) for name, module in modules.items()}


def _entry(name: str, module: FileModule, shape: tuple[int, ...], path: Path) -> LoraEntry:
    """One module's entry; without an alpha the scale is 1, as every reader assumes.

    Raises:
        ValueError: it cannot be a low-rank update.
        AdapterError: it is none of this layer.
    """
    numbers = [module.parts[role] for role in module.parts if role != "alpha"]
    if not all(tensor.is_floating_point() for tensor in numbers):
        raise ValueError(f"{module.key} is stored as whole numbers")
    down, up = module.parts["down"].float(), module.parts["up"].float()
    if down.ndim < 2 or up.ndim < 2 or down.shape[0] == 0:
        raise ValueError(f"{module.key} has factors of the shapes {tuple(up.shape)} and {tuple(down.shape)}")
    rank = down.shape[0]
    scale = 1.0 if module.alpha is None else module.alpha / (math.sqrt(rank) if module.use_rslora else rank)
    if not math.isfinite(scale):
        raise ValueError(f"{module.key} has the alpha {module.alpha}")
    if up.numel() != shape[0] * rank or down.numel() != rank * math.prod(shape[1:]):
        raise _error(
            "lora-of-another-model",
            f"In this LoRA {name} changes a {up.shape[0]} x {math.prod(down.shape[1:])} weight; "
            f"in this model it is {shape[0]} x {math.prod(shape[1:])}.",
            path,
            "Use a LoRA that was made for this model's family.",
        )
    if not all(torch.isfinite(tensor.float()).all() for tensor in numbers):
        raise _error("lora-not-finite", f"{name} holds values that are no numbers.", path, "Use another file.")
    down, up = down.reshape(rank, *shape[1:]), up.reshape(shape[0], rank, *[1] * (len(shape) - 2))
    return LoraEntry(down, up, scale, *_magnitudes(module, shape, path))


def _magnitudes(module: FileModule, shape: tuple[int, ...], path: Path) -> tuple[Tensor | None, Tensor | None]:
    """(per output, per input) of a DoRA: of ``dora_scale`` the shape tells which, by ComfyUI's rule.

    [out, 1, ...] is per output, [1, in, 1, ...] per input: so those of a square layer are told apart, too.

    Raises:
        AdapterError: lora-magnitudes.
    """
    for role in ("magnitude", "dora_scale"):
        if role not in module.parts:
            continue
        found = module.parts[role].float()
        count, first = found.numel(), found.shape[0] if found.ndim else 0
        if count == shape[0] and (role == "magnitude" or first == shape[0]):
            return found.flatten(), None
        if role == "dora_scale" and first == 1 and found.ndim > 1 and count == found.shape[1] == shape[1]:
            return None, found.flatten()
        raise _error(
            "lora-magnitudes",
            f"The DoRA magnitudes of {module.key} have the shape {list(found.shape)}; its weight is {list(shape)}, so "
            f"{shape[0]} are needed (one an output), or {[1, shape[1]]} (one an input).",
            path,
            "Use another file: this one is damaged, or of another model.",
        )
    return None, None


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


def _error(code: str, what: str, path: Path, fix: str = "") -> AdapterError:
    return AdapterError(code, what, where=str(path), fix=fix)
