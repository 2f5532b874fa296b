"""Reads adapter files of any origin into one representation: kohya and diffusers files, PEFT directories.

Each module becomes an ``Entry`` under the name ``component.path`` ("unet.mid_block..."). Names in text encoders omit
the ``text_model`` level, which transformers 5 dropped from one of SDXL's two text encoders. ``adapter_contents``
decides which tensors are accepted; a file with any other tensor is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lora_rocm.adapters.entry import Entry, FileKind, FileModule, Notify, file_error
from lora_rocm.adapters.lora_files.key_table import KeyTable, adaptable, canonical, main_component
from lora_rocm.adapters.registry import file_kind
from lora_rocm.base_models.safetensors_file import read_tensors
from lora_rocm.errors import AdapterError
from lora_rocm.families.base import LoadedModel, ModelFamily
from lora_rocm.families.lora_file_names import LoraFileNames, Rows, RowsOf
from lora_rocm.families.registry import FAMILIES
from lora_rocm.foundation.units import count_text
from lora_rocm.kernels.weight_format import dense_shape
from lora_rocm.model_files.adapter_contents import DIFFUSERS_METADATA as DIFFUSERS_METADATA
from lora_rocm.model_files.adapter_contents import DORA_NORM as DORA_NORM
from lora_rocm.model_files.adapter_contents import NOT_UNDERSTOOD, Contents, contents_of, not_understood
from lora_rocm.model_files.adapter_spellings import PEFT_PREFIX as PEFT_PREFIX
from lora_rocm.model_files.adapter_spellings import NamedModule, plain, split
from lora_rocm.model_files.header import TensorFileHeader, read_header, refuse_pickle
from lora_rocm.model_files.models import Shapes
from lora_rocm.model_files.peft_folder import PEFT_WEIGHTS, peft_folders, read_peft_config
from lora_rocm.model_files.recognise_adapter import Origin, origin_of


class TensorNumbers:
    """CPU implementation of ``adapter_contents.Numbers``."""

    def array(self, stored: Tensor) -> Any:
        return stored.float().numpy()

    def largest(self, stored: Tensor) -> float:
        return float(stored.float().abs().max()) if stored.numel() else 0.0  # on the CPU: no wait for a device


def components_of(family: ModelFamily, path: Path) -> set[str]:
    """Return the components that an adapter file adapts ("unet", "text_encoder"). Reads only the names of its tensors.

    Raises:
        AdapterError: the file is missing, a pickle, damaged, for another family, or for an unknown model.
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
        ours = {main_component(family)}  # the component's names without a prefix
    if not ours or _foreign(family, names, shapes) is not None:
        raise _of_another_model(family, names, path, shapes=shapes)
    return ours


def _component_of(name: str, family: ModelFamily) -> str:
    """Return the component that a tensor's name refers to; if it is unknown, return the first part of the name."""
    found = split(family.name, name)
    return found.component if found is not None else name.split(".")[0]


def read_lora(
    family: ModelFamily, components: Mapping[str, nn.Module], path: Path, notify: Notify = lambda text: None
) -> dict[str, Any]:
    """Read an adapter of any kind and file format. Return its entries, keyed by module name.

    The file's modules and shapes are checked against ``components``. ``path``: a .safetensors file or a PEFT directory
    (one adapter, or one subdirectory per component). ``notify`` receives notices about parts that are skipped because
    they change no weight.

    Raises:
        AdapterError: the file is missing, a pickle, damaged, not an adapter, of several kinds, or for another model.
    """
    return read_adapter(family, components, path, notify)[1]


def read_for_model(
    family: ModelFamily, model: LoadedModel, path: Path, notify: Notify, norms: dict[str, Tensor] | None = None
) -> tuple[FileKind, dict[str, Entry]]:
    """Like ``read_adapter``, but text encoders that the file adapts need not be loaded."""
    absent = {name: family.skeleton(name) for name in family.text_components if name not in model.components}
    return read_adapter(family, {**model.components, **absent}, path, notify, norms)


def files_of(path: Path) -> list[Path]:
    """Return the paths of an adapter's files: one file, or all files of a PEFT directory.

    Raises:
        AdapterError: there is no such file, or it is a pickle.
    """
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [_one_file(path)]


def read_adapter(
    family: ModelFamily,
    components: Mapping[str, nn.Module],
    path: Path,
    notify: Notify = lambda text: None,
    norms: dict[str, Tensor] | None = None,
) -> tuple[FileKind, dict[str, Entry]]:
    """Read an adapter as ``read_lora`` does. Return its file kind, and its entries keyed by module name.

    ``norms`` receives the trained norms of a file with kohya's names. If it is None, a file with trained norms is
    refused.
    """
    try:
        folders = peft_folders(path)
        if folders:
            read = [_read_folder(family, folder, component, notify) for component, folder in folders.items()]
        else:
            header = read_header(_one_file(path), AdapterError)
            read = [_read_file(family, header, path, norms, notify)]
        return _entries(family, components, read, path)
    except NOT_UNDERSTOOD as error:
        raise not_understood(error, path) from error


def _read_file(
    family: ModelFamily, header: TensorFileHeader, path: Path, norms: dict[str, Tensor] | None, notify: Notify
) -> tuple[str, Contents[Tensor]]:
    found = contents_of(
        family.name,
        read_tensors(header, error=AdapterError),
        path,
        TensorNumbers(),
        metadata=header.metadata,
        with_norms=norms is not None,
        notify=notify,
    )
    if norms is not None:
        norms |= found.norms
    return "", found


def _read_folder(family: ModelFamily, folder: Path, component: str, notify: Notify) -> tuple[str, Contents[Tensor]]:
    """Read one PEFT folder. Return ``component`` unchanged, and the contents."""
    config = read_peft_config(folder)
    tensors = read_tensors(read_header(folder / PEFT_WEIGHTS, AdapterError), error=AdapterError)
    return component, contents_of(
        family.name, tensors, folder, TensorNumbers(), peft=config, with_norms=False, notify=notify
    )


def _entries(
    family: ModelFamily,
    components: Mapping[str, nn.Module],
    read: Sequence[tuple[str, Contents[Tensor]]],
    path: Path,
) -> tuple[FileKind, dict[str, Entry]]:
    """Return the file kind, and the entries keyed by module name in the shapes that the model's layers need."""
    kind, *others = {found.kind.name: file_kind(found.kind) for _, found in read}.values()
    if others:
        raise ValueError(f"it contains both a {kind.name} and a {others[0].name}")
    files = family.lora_file_names
    ways = (files.rows, files.original, _qkv_rows(files))
    table, original, whole_qkv = (KeyTable(components, rows_of) for rows_of in ways)
    shapes = {
        canonical(name, module): dense_shape(base) for name, c in components.items() for module, base in adaptable(c)
    }
    meant = _meant(family, components, table, original, whole_qkv)
    modules, unknown = dict[str, FileModule](), list[str]()
    for component, found in read:
        unknown += found.unknown
        owners = [component] if component else sorted(components)
        owner = next((o for o in owners if all(NamedModule(o, each.place.name) in meant for each in found.modules)), "")
        for each in found.modules:
            # a single PEFT folder may be for any component; one of several is for the component in its name
            name = meant.get(
                NamedModule(owner, each.place.name) if owner and each.key.startswith(PEFT_PREFIX) else each.place
            )
            if name is None or (component and not name.startswith(f"{component}.") and name in shapes):
                unknown.append(each.key)
                continue
            rank = each.rank if kind.parts.config_decides_rank else None
            module = FileModule(each.key, each.parts, each.alpha, each.rslora, rank)
            if modules.setdefault(name, module) is not module:
                raise ValueError(f"{each.key} and {modules[name].key} belong to the same module")
    count = len(modules) + len(unknown)
    if not count and not any(found.norms for _, found in read):
        raise file_error(
            "lora-empty",
            "This file contains no LoRA.",
            path,
            "Use a LoRA file. Base models belong in the model section.",
        )
    if unknown:
        raise _of_another_model(family, sorted(unknown), path, count, known=[m.key for m in modules.values()])
    fitting = {**shapes, **table.shapes, **original.shapes, **whole_qkv.shapes}
    entries = {name: kind.entry(name, module, fitting[name], path) for name, module in modules.items()}
    return kind, whole_qkv.of_modules(original.of_modules(table.of_modules(entries)))


def _qkv_rows(files: LoraFileNames) -> RowsOf:
    """Return the equivalent of ``LoraFileNames.original`` for XLabs' FLUX files.

    Where the original release fuses query, key and value with further weights (``linear1``), these files fuse only the
    three. The function returns no rows for any other module.
    """

    def rows_of(component: str, module: str, rows: int) -> Rows:
        named = files.original(component, module, rows)
        if len(named) != 1 or not module.endswith((".to_q", ".to_k", ".to_v")) or not named[0][0].endswith("linear1"):
            return ()
        return [(f"{named[0][0]}.qkv", *named[0][1:])]

    return rows_of


def _meant(
    family: ModelFamily, components: Mapping[str, nn.Module], table: KeyTable, original: KeyTable, whole_qkv: KeyTable
) -> dict[NamedModule, str]:
    """Return all names that a file may use for the model's modules, mapped to the names used here.

    A name maps to a module, or to the key of a table if it covers several modules.
    """
    main = main_component(family)
    found = {NamedModule(main, plain(key)): original.whole(key) or key for key in original.parts}
    found |= {NamedModule(main, plain(key)): key for key in whole_qkv.parts}
    for key, parts in original.parts.items():  # OneTrainer's OMI names count the parts of a fused weight
        if len({part.module for part in parts}) > 1:
            found |= {NamedModule(main, plain(f"{key}.{place}")): part.module for place, part in enumerate(parts)}
    for key in table.parts:
        if (place := split(family.name, key)) is not None:
            found[place] = table.whole(key) or key
    for component, root in components.items():
        found |= {NamedModule(component, plain(module)): canonical(component, module) for module, _ in adaptable(root)}
    return found


def _foreign(family: ModelFamily, names: Iterable[str], shapes: Shapes | None) -> Origin | None:
    """Return the origin of the names if it is a different family; None if it is this family or unknown."""
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
    """Return the error for modules that this model lacks. It names the model that they belong to, if that is known.

    Args:
        family: family of the base model.
        unknown: names of the lacking modules; if the model was not searched, names of all tensors.
        path: path of the file.
        count: number of modules in the file; 0 if the model was not searched.
        shapes: shapes of the file's tensors, or None if unknown.
        known: names of the file's modules that the model has.
    """
    origin = _foreign(family, unknown, shapes)
    base = FAMILIES[family.name].title if family.name in FAMILIES else family.name
    if origin is not None:
        of_origin = min(unknown, key=lambda name: _doubt(name, origin, family))
        if own := _of_this_model(family, unknown, known, origin):
            what = f"The file is a mixture: it contains {of_origin}, of {origin.title}, and {own}, of {base}."
            fix = f"Use a complete file for {base}; this one was assembled from two."
            return file_error("lora-of-another-model", what, path, fix)
        what = f"This is a LoRA for {origin.title}, but the base model is {base}. The file contains {of_origin}."
    elif count:
        what = f"This model lacks {len(unknown)} of {count_text(count, 'module')} of this LoRA, such as {unknown[0]}."
    else:
        what = f"This LoRA matches no part of the base model ({base}). The file contains {unknown[0]}."
    fix = f"Use a LoRA that was made for {base}, or give the base model that this LoRA was made for."
    return file_error("lora-of-another-model", what, path, fix)


def _doubt(name: str, origin: Origin, family: ModelFamily) -> int:
    """Rank a name by how poorly it proves that a file is for ``origin`` rather than ``family``.

    Returns:
        0 if the name identifies ``origin``, 1 if it is unknown or from a third origin, 2 if ``family`` uses it too.
    """
    each = origin_of([name])
    return 0 if each == origin else 1 if each is None or family.name not in each.families else 2


def _of_this_model(family: ModelFamily, names: Sequence[str], known: Sequence[str], origin: Origin) -> str:
    """Return a name in the file that only the base model's family uses, or "" if there is none.

    If the file also has names of ``origin``, such a name shows that it mixes two models. A name in ``known`` counts if
    ``origin`` does not use it. A name in ``names`` counts if no other family uses it.
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
        raise file_error(
            "lora-missing",
            f"The folder contains {len(files)} safetensors files instead of one.",
            path,
            "Use the path of a file.",
        )
    if not path.is_file():
        raise file_error(
            "lora-missing", "There is no such LoRA file.", path, "Use the path of a .safetensors file or a PEFT folder."
        )
    refuse_pickle(path, "Use the .safetensors version of the LoRA.", AdapterError)
    return path
