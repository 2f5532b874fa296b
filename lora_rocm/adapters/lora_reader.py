"""Reads adapter files of any origin into one form: kohya and diffusers files, PEFT directories.

Each module becomes an ``Entry``. Modules are named ``component.path`` ("unet.mid_block...", and for text encoders
without the ``text_model`` level that transformers 5 dropped from one of the two). ``lora_parts`` decides which tensors
of a file are accepted; a file with others is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers.utils.state_dict_utils import (
    convert_state_dict_to_diffusers,
    convert_state_dict_to_peft,
    convert_unet_state_dict_to_peft,
)
from torch import Tensor, nn

from lora_rocm.adapters.entry import Entry, FileKind, FileModule, Say, file_error
from lora_rocm.adapters.kinds import file_kinds
from lora_rocm.adapters.lora_parts import check_config, grouped
from lora_rocm.adapters.module_names import KeyTable, adaptable, canonical, main_component
from lora_rocm.adapters.trained_norms import ENDINGS
from lora_rocm.base_models.safetensors_file import read_tensors
from lora_rocm.errors import AdapterError
from lora_rocm.families.base import LoadedModel, ModelFamily
from lora_rocm.families.registry import PRODUCT
from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.foundation.units import count_text
from lora_rocm.kernels.weight_format import dense_shape
from lora_rocm.model_files.adapters import Origin, origin_of
from lora_rocm.model_files.header import Header, read_header
from lora_rocm.model_files.models import Shapes
from lora_rocm.model_files.peft_folder import PEFT_CONFIG, PEFT_WEIGHTS, peft_folders

PEFT_PREFIX = "base_model.model."
DIFFUSERS_METADATA = "lora_adapter_metadata"
DORA_NORM = "dora_norm"
"""Metadata of our files in the comfyui form: "base" if DoRA's magnitudes are for the norm of the base weight."""
PICKLES = (".ckpt", ".bin", ".pt", ".pth")
MAIN_PREFIXES = ("lora_unet_", "lycoris_", "diffusion_model.", PEFT_PREFIX)  # before names of the main component
OLD_DIFFUSERS = re.compile(r"_lora\.(up|down)\.")
MAX_CONFIG_BYTES = 1 << 22
PATTERN, MAX_WILDCARDS = re.compile(r"\^?(?:[\w-]|\\?\.|\.\*)*\$?"), 2


def components_of(family: ModelFamily, path: Path) -> set[str]:
    """Return the model components that an adapter file names ("unet", "text_encoder"). Reads names only.

    Raises:
        AdapterError: the file is missing, a pickle, damaged, for another family, or for no known model.
    """
    folders = peft_folders(path)
    if folders:
        names, shapes = [name or main_component(family) for name in folders], None
        found = set(names)
    else:
        shapes = read_header(_one_file(path), AdapterError).shapes
        names = sorted(shapes)
        found = {_component_of(name, family) for name in names}
    ours = found & {main_component(family), *family.text_components}
    if not ours and (origin := origin_of(names, shapes)) is not None and family.name in origin.families:
        ours = {main_component(family)}  # its names, and nothing before them
    if not ours or _foreign(family, names, shapes) is not None:
        raise _of_another_model(family, names, path, shapes=shapes)
    return ours


def _component_of(name: str, family: ModelFamily) -> str:
    """Return the component of a tensor name; if no component is known, the first part of the name."""
    prefixes = dict.fromkeys(MAIN_PREFIXES, main_component(family))
    prefixes |= {f"lora_{component}_": component for component in family.file_prefixes}
    prefixes |= {prefix: component for component, prefix in family.file_prefixes.items()}
    longest = max((prefix for prefix in prefixes if name.startswith(prefix)), key=len, default="")
    return prefixes.get(longest, name.split(".")[0])


def read_lora(
    family: ModelFamily, components: Mapping[str, nn.Module], path: Path, say: Say = lambda text: None
) -> dict[str, Any]:
    """Read an adapter of this model, whatever its kind and its file's format: module name -> entry.

    Args:
        family: knows the kohya names.
        components: the model's components; modules and shapes of the file are checked against them.
        path: a .safetensors file or a PEFT directory (one adapter, or one sub-folder per component).
        say: receives notices about parts that are left out because they change no weight.

    Raises:
        AdapterError: the file is missing, a pickle, damaged, no adapter, of several kinds, or for another model.
    """
    return read_adapter(family, components, path, say)[1]


def read_for_model(
    family: ModelFamily, model: LoadedModel, path: Path, say: Say, norms: dict[str, Tensor] | None = None
) -> tuple[FileKind, dict[str, Entry]]:
    """As ``read_adapter``, also of a file that adapts text encoders which are not in the model."""
    absent = {name: family.skeleton(name) for name in family.text_components if name not in model.components}
    return read_adapter(family, {**model.components, **absent}, path, say, norms)


def files_of(path: Path) -> list[Path]:
    """The files of an adapter: one, or all of a PEFT directory.

    Raises:
        AdapterError: there is no such file, or it is a pickle.
    """
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [_one_file(path)]


def read_adapter(
    family: ModelFamily,
    components: Mapping[str, nn.Module],
    path: Path,
    say: Say = lambda text: None,
    norms: dict[str, Tensor] | None = None,
) -> tuple[FileKind, dict[str, Entry]]:
    """Like ``read_lora``, and also return the file's kind.

    ``norms`` gets the trained norms of a file with kohya's names; None: such a file is refused.
    """
    paths = [(name, module, base) for name, c in components.items() for module, base in adaptable(c)]
    shapes = {canonical(name, module): dense_shape(base) for name, module, base in paths}
    try:
        folders = peft_folders(path)
        if folders:
            kind, modules = _from_peft(folders, shapes, main_component(family), say)
            return kind, _fitted(modules, shapes, kind, family, path)
        header = read_header(_one_file(path), AdapterError)
        if DORA_NORM in header.metadata:
            raise file_error(
                "lora-magnitudes",
                "This DoRA is in the comfyui form: its magnitudes are for ComfyUI's rule alone.",
                path,
                "Give the same run's file in the kohya or diffusers form.",
            )
        tensors = read_tensors(header, error=AdapterError)
        kind = _kind_of(tensors)
        plain = tuple(f"{component}." for component in family.file_prefixes)
        if not any(name.startswith(plain) for name in tensors):
            if norms is not None:
                norms |= {name: tensors.pop(name) for name in sorted(tensors) if name.endswith(ENDINGS)}
            return kind, _from_kohya(grouped(tensors, path, kind, say), family, components, shapes, kind, path)
        modules = _from_diffusers(tensors, header, set(family.text_components), kind, say)
        return kind, _fitted(modules, shapes, kind, family, path)
    except (
        OSError,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        ArithmeticError,
        RecursionError,
    ) as error:  # a config with values of the wrong type
        raise file_error(
            "lora-unreadable", f"This LoRA cannot be understood: {error}.", path, "Use another file."
        ) from error


def _kind_of(names: Iterable[str]) -> FileKind:
    """Return the first kind whose factors the file has; if there is none, the first kind, whose checks report it."""
    names, kinds = list(names), file_kinds()
    for kind in kinds:
        roles = (known[1] for name in names if (known := kind.role_of(name)) is not None)
        if not kind.factors.isdisjoint(roles):
            return kind
    return kinds[0]


def _from_kohya(
    groups: Mapping[str, dict[str, Tensor]],
    family: ModelFamily,
    components: Mapping[str, nn.Module],
    shapes: Mapping[str, tuple[int, ...]],
    kind: FileKind,
    path: Path,
) -> dict[str, Entry]:
    """Read modules by the family's names, by the original release's and by diffusers', behind any known prefix."""
    table, original = KeyTable(family, components), KeyTable(family, components, family.original_rows)
    prefixes = (*MAIN_PREFIXES, "")
    spellings = [(key, key, prefixes) for key in original.parts]
    for component, root in components.items():
        own = (f"lora_{component}_", *(prefixes if component == main_component(family) else ()))
        spellings += [(module, canonical(component, module), own) for module, _ in adaptable(root)]
    keys = {
        prefix + (name.replace(".", "_") if prefix.endswith("_") else name): meant
        for name, meant, starts in spellings
        for prefix in starts
    }
    keys |= {key: table.whole(key) or key for key in table.parts}
    modules = _modules(groups, {}, lambda key: keys.get(key, key), kind)
    entries = _fitted(modules, {**shapes, **table.shapes, **original.shapes}, kind, family, path)
    return original.of_modules(table.of_modules(entries))


def _modules(
    groups: Mapping[str, dict[str, Tensor]], config: Mapping[str, Any], name_of: Callable[[str], str], kind: FileKind
) -> dict[str, FileModule]:
    """Return module name -> its data in the file. Alphas come from the file, else from a PEFT config (empty: none).

    Raises:
        ValueError: the file names a module twice, under two names.
    """
    modules: dict[str, FileModule] = {}
    for key, parts in groups.items():
        if "alpha" in parts and parts["alpha"].numel() != 1:
            raise ValueError(f"{key} has an alpha of the shape {list(parts['alpha'].shape)}")
        if "alpha" in parts:
            found = FileModule(key, parts, parts["alpha"].float().item())
        else:
            alpha = _number(config, "alpha_pattern", kind.config_alpha, key)
            rank = _number(config, "rank_pattern", "r", key) if kind.config_decides_rank else None
            found = FileModule(key, parts, alpha, bool(config.get("use_rslora")), rank)
        if modules.setdefault(name_of(key), found) is not found:
            raise ValueError(f"{key} and {modules[name_of(key)].key} are the same module")
    return modules


def _number(config: Mapping[str, Any], patterns: str, default: str, module: str) -> float | None:
    """Return a module's number from a PEFT config: by the first pattern that matches it, else the default."""
    own = config.get(patterns) or {}
    value = next((own[key] for key in own if _means(key, module)), config.get(default))
    return None if value is None else float(value)


def _from_diffusers(
    tensors: Mapping[str, Tensor], header: Header, text_components: set[str], kind: FileKind, say: Say
) -> dict[str, FileModule]:
    """Read the diffusers form, new (``lora_A``) or old (``lora.down``, ``to_q_lora``), with diffusers' name maps."""
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
    whole = {name: tensor for name, tensor in tensors.items() if "." not in name}  # names without a component
    if len(renamed) + len(whole) != len(tensors):
        raise ValueError("two names in it mean the same tensor")
    modules: dict[str, FileModule] = {}
    groups = grouped(renamed | whole, header.path, kind, say)
    for component in sorted({key.split(".")[0] for key in groups}):
        config = {k.removeprefix(component + "."): v for k, v in configs.items() if k.startswith(component + ".")}
        check_config(config, header.path, kind)
        own = {k.removeprefix(component + "."): v for k, v in groups.items() if k.startswith(component + ".")}
        modules |= _modules(own, config, partial(canonical, component), kind)
    return modules


def _from_peft(
    folders: Mapping[str, Path], shapes: Mapping[str, tuple[int, ...]], main: str, say: Say
) -> tuple[FileKind, dict[str, FileModule]]:
    """Read PEFT directories; a single adapter belongs to the component that has its modules."""
    modules: dict[str, FileModule] = {}
    owners = sorted({name.split(".")[0] for name in shapes})
    read = {}
    for component, folder in folders.items():
        config = json.loads(read_plain(folder / PEFT_CONFIG, MAX_CONFIG_BYTES).decode("utf-8"))
        read[component] = config, read_tensors(read_header(folder / PEFT_WEIGHTS, AdapterError), error=AdapterError)
    kind = _kind_of([name for _, tensors in read.values() for name in tensors])
    for component, (config, tensors) in read.items():
        check_config(config, folders[component], kind)
        named = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in tensors.items()}
        groups = grouped(named, folders[component], kind, say)
        owner = component or next((o for o in owners if {canonical(o, n) for n in groups} <= shapes.keys()), main)
        modules |= _modules(groups, config, partial(canonical, owner), kind)
    return kind, modules


def _means(pattern: str, module: str) -> bool:
    """Return whether a key of ``alpha_pattern`` matches a module, like PEFT's ``get_pattern_key``.

    Only the patterns that PEFT's writers produce are accepted.

    Raises:
        ValueError: another regular expression; one from an untrusted file could backtrack without end.
    """
    if not PATTERN.fullmatch(pattern) or pattern.count(".*") > MAX_WILDCARDS:
        raise ValueError(f"the alpha_pattern {pattern[:80]!r} is no name of a module")
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


def _fitted(
    modules: dict[str, FileModule],
    shapes: Mapping[str, tuple[int, ...]],
    kind: FileKind,
    family: ModelFamily,
    path: Path,
) -> dict[str, Entry]:
    """Return entries in the shapes that the model's layers need.

    Raises:
        ValueError: a module's tensors cannot be of this kind.
        AdapterError: lora-empty, lora-of-another-model, lora-magnitudes, lora-not-finite.
    """
    if not modules:
        raise file_error("lora-empty", "This file holds no LoRA.", path, "Give a LoRA file; base models go in model.")
    unknown = sorted(name for name in modules if name not in shapes)
    if unknown:
        known = [name for name in modules if name in shapes]
        raise _of_another_model(family, unknown, path, len(modules), known=known)
    return {name: _entry(name, module, shapes[name], kind, path) for name, module in modules.items()}


def _entry(name: str, module: FileModule, shape: tuple[int, ...], kind: FileKind, path: Path) -> Entry:
    numbers = [tensor for role, tensor in module.parts.items() if role != "alpha" and tensor.ndim]
    if not all(tensor.is_floating_point() for tensor in numbers):
        raise ValueError(f"{module.key} is stored as whole numbers")
    entry = kind.entry(name, module, shape, path)
    if not all(torch.isfinite(tensor.float()).all() for tensor in numbers):
        raise file_error("lora-not-finite", f"{name} holds values that are no numbers.", path, "Use another file.")
    return entry


def _foreign(family: ModelFamily, names: Iterable[str], shapes: Shapes | None) -> Origin | None:
    """Return the origin of the names if it excludes the family; None if it includes it or is unknown."""
    origin = origin_of(names, shapes)
    return None if origin is None or family.name in origin.families else origin


def _of_another_model(
    family: ModelFamily,
    unknown: list[str],
    path: Path,
    count: int = 0,
    shapes: Shapes | None = None,
    known: Sequence[str] = (),
) -> AdapterError:
    """Return the error for modules that this model lacks; it names the model they belong to, if known.

    Args:
        family: of the base model.
        unknown: names of the modules, or of all tensors if the model was not asked.
        path: the file.
        count: number of all modules; 0 if the model was not asked.
        shapes: of the file's tensors, if they are known.
        known: names of the modules that the model has.
    """
    origin = _foreign(family, unknown, shapes)
    base = PRODUCT[family.name].title if family.name in PRODUCT else family.name
    if origin is not None:
        of_origin = min(unknown, key=lambda name: _doubt(name, origin, family))
        if own := _of_this_model(family, unknown, known, origin):
            what = f"This file is a mixture: it names {of_origin}, of {origin.title}, and {own}, of {base}."
            fix = f"Use a file that is whole and for {base}; this one was put together from two."
            return file_error("lora-of-another-model", what, path, fix)
        what = f"This is a LoRA for {origin.title}, and the base model is {base}: it names {of_origin}."
    elif count:
        what = f"This model lacks {len(unknown)} of {count_text(count, 'module')} of this LoRA, such as {unknown[0]}."
    else:
        what = f"This LoRA names no part of the base model, which is {base}: it names {unknown[0]}."
    fix = f"Use a LoRA that was made for {base}, or give the base model that this one was made for."
    return file_error("lora-of-another-model", what, path, fix)


def _doubt(name: str, origin: Origin, family: ModelFamily) -> int:
    """Return how badly a name shows that a file is of ``origin``, and not of the base model's family."""
    each = origin_of([name])
    return 0 if each == origin else 1 if each is None or family.name not in each.families else 2


def _of_this_model(family: ModelFamily, names: Sequence[str], known: Sequence[str], origin: Origin) -> str:
    """Return a name that can only be of the base model's family, beside those of ``origin``; empty if there is none.

    A module of the model counts if ``origin`` has no such module. If the model was not asked, a name counts that only
    this family uses.
    """
    for name in known:
        each = origin_of([name])
        if each is not None and family.name in each.families and set(each.families).isdisjoint(origin.families):
            return name
    main = (name for name in names if _component_of(name, family) == main_component(family))
    return next((name for name in main if (each := origin_of([name])) and each.families == (family.name,)), "")


def _one_file(path: Path) -> Path:
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        if len(files) == 1:
            return files[0]
        raise file_error("lora-missing", f"This folder holds {len(files)} safetensors files.", path, "Give one file.")
    if not path.is_file():
        raise file_error(
            "lora-missing", "There is no such LoRA file.", path, "Give a .safetensors file or a PEFT folder."
        )
    if path.suffix.lower() in PICKLES:
        raise file_error(
            "pickle-refused",
            "This is a pickle file: loading one can run any program hidden in it, so only .safetensors is read.",
            path,
            "Use the .safetensors edition of the LoRA.",
        )
    return path
