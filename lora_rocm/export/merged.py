"""Merges an adapter into the weights of a base model, and writes them as a folder that the model's library can load.

The folder has the same file names, shards and tensors as the base; only the adapted tensors differ. One tensor is in
memory at a time. An adapted weight is computed in float32 and rounded once, to the base's dtype.

If adapted weights are quantised with scales, all weights of the base are written dense, and the config loses its
``quantization_config``. Otherwise quantised weights are copied unchanged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from lora_rocm.adapters.base import Adapter
from lora_rocm.adapters.entry import Entry, norm_of, rounded
from lora_rocm.base_models.safetensors_file import DTYPES, read_tensors
from lora_rocm.base_models.stored_weights import ComponentTensors
from lora_rocm.errors import AdapterError, ExportError
from lora_rocm.export.safetensors_writer import header_of, ordered
from lora_rocm.families.base import OwnFiles
from lora_rocm.foundation.files import PIECE_BYTES, json_bytes, new_folder, write_pieces, write_through
from lora_rocm.model_files.config_file import read_config
from lora_rocm.model_files.header import TensorFileHeader, damaged, read_header
from lora_rocm.model_files.storage_formats import QUANTISED_KEYS
from lora_rocm.rundir.disk_space import require

INDEX = "model.safetensors.index.json"
DENSE_DTYPES = {"float16": torch.float16, "float32": torch.float32}
"""Values of ``dtype`` in a model's config. With any other value, quantised weights are written as bfloat16."""


@dataclass(frozen=True)
class Rounding:
    """The error that rounding causes in the merged weights.

    largest: largest error of any number.
    lost: norm of all errors, relative to the norm of the adapter's changes.
    """

    largest: float
    lost: float


@torch.no_grad()
def write_merged(folder: Path, files: OwnFiles, adapter: Adapter, root: Path | None = None) -> Rounding:
    """Write the merged model, completely or not at all; read it back, and return the rounding error.

    Args:
        folder: folder to create; it may exist if it is empty.
        files: files of the base model.
        adapter: adapter to merge, with its current weights.
        root: the run directory if the folder is inside one (``foundation.files.make_folder``), else None.

    Raises:
        AdapterError: ``export-form``: the base's files do not store an adapted weight as one separate tensor.
            ``export-link``: a file of the base is a link to a file outside the base's folder.
        ExportError: "weights-not-finite"; or "export-differs": the files on disk differ from the merged weights.
        StorageError: the disk is full, permission is missing, or ``folder`` is not empty.
    """
    for path in files.beside:
        _require_own(path)
    merge = _Merge(files, _by_file_name(files, adapter))
    what, fix = "the merged weights", "Free some space, or name a folder on another disk (--output)."
    require(folder, sum(map(merge.num_bytes, merge.headers)), what, fix)
    with new_folder(folder, root) as made:
        for header in merge.headers:
            write_pieces(made / header.path.name, merge.pieces(header))
        if len(merge.headers) > 1:
            write_through(made / INDEX, json_bytes(merge.index()))
        config, *others = files.beside
        write_through(made / config.name, json_bytes(merge.config(read_config(config))))
        for path in others:
            write_through(made / path.name, path.read_bytes())
        return merge.compare(made)


def _require_own(path: Path) -> None:
    """Refuse a file that is a link to outside the base: an untrusted base could make the user publish a private file.

    Links in the hub's cache from ``snapshots/REVISION`` to ``blobs`` are allowed.

    Raises:
        AdapterError: export-link.
    """
    folder, target = path.parent.resolve(), path.resolve()
    blobs = folder.parent.parent / "blobs"
    if target.is_relative_to(folder) or (folder.parent.name == "snapshots" and target.parent == blobs):
        return
    raise AdapterError(
        "export-link",
        "A file of the base is a link to a file outside the base's folder. That file may not belong to the model, and "
        "the merged model would contain a copy of it.",
        where=f"{path} -> {target}",
        fix="If it belongs to the model, replace the link by the file; else remove the link.",
    )


def modules_with_shared_weights(files: OwnFiles, adapter: Adapter) -> list[str]:
    """Return the adapted modules that share their weight with another layer, such as a tied output head."""
    names = files.source.stored_names(files.component)
    used = Counter(names.values())
    return [module for module, (_, path, _) in adapter.modules.items() if used[names.get(f"{path}.weight", "")] > 1]


def _by_file_name(files: OwnFiles, adapter: Adapter) -> dict[str, Entry]:
    """Return the adapter's entries, keyed by the names that their weights have in the base's files.

    Raises:
        AdapterError: ``export-form``: a weight is not one separate tensor in the files.
    """
    names, entries = files.source.stored_names(files.component), adapter.entries()
    shared, found = modules_with_shared_weights(files, adapter), dict[str, Entry]()
    for module, (_, path, _) in adapter.modules.items():
        name = names.get(f"{path}.weight")
        if name is None or module in shared:
            how = "consists of several tensors" if name is None else "is also the weight of another layer"
            raise AdapterError(
                "export-form",
                f"The adapter cannot be merged: in the base's files, the weight of {module} {how}.",
                where=f"lora.targets: {module}",
                fix="Export the peft format, or train without this layer (lora.targets).",
            )
        found[name] = entries[module]
    return found


@dataclass(frozen=True)
class _Merge:
    """Computes the content of the merged model's files.

    entries: adapter entries, keyed by the weights' names in the base's files.
    """

    files: OwnFiles
    entries: Mapping[str, Entry]

    @property
    def tensors(self) -> ComponentTensors:
        return self.files.source.tensors(self.files.component)

    @property
    def headers(self) -> list[TensorFileHeader]:
        return sorted(self.tensors.headers, key=lambda header: header.path.name)

    @cached_property
    def _all_dense(self) -> bool:
        return not self.entries.keys().isdisjoint(self.tensors.stored)

    @cached_property
    def _dense_dtype(self) -> torch.dtype:
        config = read_config(self.files.beside[0])
        config = config.get("text_config", config)
        return DENSE_DTYPES.get(str(config.get("dtype", config.get("torch_dtype"))), torch.bfloat16)

    def meta_tensors(self, header: TensorFileHeader) -> dict[str, Tensor]:
        """Return the tensors of the new file that replaces a base file, as meta tensors by name."""
        found = {}
        for name, entry in header.tensors.items():
            dtype, shape = DTYPES[entry.dtype], entry.shape
            if self._all_dense and name not in self.tensors.entries:
                continue  # a scale
            if self._all_dense and name in self.tensors.stored:
                dtype, shape = self._dense_dtype, self.tensors.stored[name].shape
            elif name in self.entries and dtype.itemsize == 1:
                dtype = self._dense_dtype
            found[name] = torch.empty(shape, dtype=dtype, device="meta")
        return found

    def num_bytes(self, header: TensorFileHeader) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.meta_tensors(header).values())

    def pieces(self, header: TensorFileHeader) -> Iterator[bytes | memoryview]:
        """Yield the bytes of the new file that replaces a base file."""
        meta_tensors = self.meta_tensors(header)
        yield header_of(meta_tensors, {**header.metadata, "format": "pt"})
        for name, wanted in ordered(meta_tensors):
            if name in self.entries or (self._all_dense and name in self.tensors.stored):
                yield self._new(header, name, wanted.dtype)
            else:
                yield from _bytes_of(header, name)

    def _new(self, header: TensorFileHeader, name: str, dtype: torch.dtype) -> memoryview:
        """Return the bytes of a tensor that differs from the base's file."""
        weight = self.base(header, name)
        if name in self.entries:
            # Add in float32, then round once
            weight = weight + self.entries[name].effect(weight)
        rounded_weight = weight.to(dtype)
        if not torch.isfinite(rounded_weight).all():
            raise ExportError(
                "weights-not-finite",
                f"A merged weight is larger than any {str(dtype).removeprefix('torch.')} number.",
                where=name,
                fix="Export the peft format, and check the loss of the run: this adapter is hardly usable.",
            )
        return memoryview(rounded_weight.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def base(self, header: TensorFileHeader, name: str) -> Tensor:
        """Return a weight of the base as a dense float32 tensor."""
        stored = self.tensors.stored.get(name)
        if stored is None:
            return read_tensors(header, {name}.__contains__)[name].float()
        read = read_tensors(header, frozenset(stored.parts.values()).__contains__)
        return stored.weight({role: read[at] for role, at in stored.parts.items()}).dense(torch.float32)

    def config(self, config: Mapping[str, object]) -> dict[str, object]:
        """Return the config of the merged model, derived from the base's config."""
        return {key: value for key, value in config.items() if not (self._all_dense and key in QUANTISED_KEYS)}

    def index(self) -> dict[str, object]:
        """Return the index of the shards, in transformers' format."""
        names = {name: header.path.name for header in self.headers for name in self.meta_tensors(header)}
        return {"metadata": {"total_size": sum(map(self.num_bytes, self.headers))}, "weight_map": names}

    def compare(self, folder: Path) -> Rounding:
        """Read the new files back, compare every tensor, and return the rounding error.

        Raises:
            ExportError: a tensor differs by more than rounding explains.
        """
        found = []
        for header in self.headers:
            written = read_header(folder / header.path.name)
            for name, wanted in self.meta_tensors(header).items():
                if name in self.entries:
                    found.append(self._difference(header, written, name, wanted.dtype))
                elif not self._same(header, written, name):
                    raise _differs(written.path, name)
        largest, norms, changes = zip(*found, strict=True)
        whole = math.hypot(*changes)
        return Rounding(max(largest), math.hypot(*norms) / whole if whole else 0.0)

    def _difference(
        self, header: TensorFileHeader, written: TensorFileHeader, name: str, dtype: torch.dtype
    ) -> tuple[float, float, float]:
        """Compare a merged weight on disk with the exact one.

        Return the largest error, the norm of the error, and the norm of the adapter's change.
        """
        found = read_tensors(written, {name}.__contains__)[name]
        weight = self.base(header, name)
        change = self.entries[name].effect(weight)
        weight += change
        # In float32 the difference is the rounding of the written weight alone
        difference = found.float() - weight
        norm = norm_of(difference)
        if found.dtype != dtype or not norm <= rounded(weight, dtype)[1]:
            raise _differs(written.path, name)
        return float(difference.abs().max()), norm, norm_of(change)

    def _same(self, header: TensorFileHeader, written: TensorFileHeader, name: str) -> bool:
        if self._all_dense and name in self.tensors.stored:
            found = read_tensors(written, {name}.__contains__)[name]
            return torch.equal(found, self.base(header, name).to(found.dtype))
        pairs = zip(_bytes_of(header, name), _bytes_of(written, name), strict=True)
        return all(one == other for one, other in pairs)


def _bytes_of(header: TensorFileHeader, name: str) -> Iterator[bytes]:
    """Yield the bytes of a tensor in a file, piece by piece."""
    entry = header.tensors[name]
    with header.path.open("rb") as file:
        file.seek(entry.begin)
        for start in range(entry.begin, entry.end, PIECE_BYTES):
            wanted = min(PIECE_BYTES, entry.end - start)
            piece = file.read(wanted)
            if len(piece) != wanted:
                raise damaged(header.path, f"it ends inside {name}")
            yield piece


def _differs(path: Path, name: str) -> ExportError:
    return ExportError(
        "export-differs",
        f"The merged weights on the disk are wrong: they differ from the base with the adapter, first in {name}.",
        where=str(path),
        fix="Check the disk and the memory of the machine, then export again.",
    )
