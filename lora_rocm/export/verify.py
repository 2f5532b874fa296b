"""Loads every exported file with independent code, and compares its effect with the live adapter's.

Each weight's change is compared element by element, so no second copy of the base is needed. Files in kohya's and
diffusers' format are loaded by diffusers, and PEFT folders by PEFT. A small reader with ComfyUI's rules also loads
kohya files, because diffusers drops DoRA's magnitudes and tolerates a missing alpha. All of this runs on the CPU,
because a faulty GPU could hide an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from lora_rocm.adapters.adapter_to_entries import loaded_entry
from lora_rocm.adapters.base import Adapter
from lora_rocm.adapters.entry import Entry, FileKind, Form, norm_of, rounded
from lora_rocm.adapters.lora_files.key_table import COMFYUI, KeyTable, canonical
from lora_rocm.adapters.trained_norms import B_NORM, W_NORM
from lora_rocm.base_models.safetensors_file import DTYPES, read_tensors
from lora_rocm.errors import ExportError, ModelError
from lora_rocm.export.comfyui_check import apply_comfy, apply_norms
from lora_rocm.families.base import LoadedModel, ModelFamily
from lora_rocm.foundation.quiet import Quiet
from lora_rocm.foundation.units import count_text
from lora_rocm.kernels.weight_format import dense_weight
from lora_rocm.model_files.header import TensorFileHeader, read_header
from lora_rocm.model_files.readers import readers_of_file

DEPRECATIONS = Quiet(FutureWarning)  # PEFT reads an attribute that transformers deprecates


@dataclass(frozen=True)
class Verification:
    """The result of verifying an exported file.

    max_difference: largest difference of any number of the weight changes.
    relative_difference: norm of all differences, relative to the norm of all changes.
    cannot_read: programs that cannot read the file, or only inexactly, as text for the user.
    can_read: programs that can read the file.
    """

    max_difference: float
    relative_difference: float
    cannot_read: tuple[str, ...]
    can_read: tuple[str, ...]


@torch.no_grad()
def verify(file_format: Form, path: Path, family: ModelFamily, model: LoadedModel, adapter: Adapter) -> Verification:
    """Load an exported file as its readers do, and compare its effect with the adapter's.

    Args:
        file_format: a value of ``output.formats``.
        path: the file, or the folder that contains the PEFT folders.
        family: family of the base model; it loads the file with diffusers.
        model: the model with the base weights.
        adapter: the live adapter.

    Raises:
        ExportError: the file cannot be read, has missing or extra modules, or changes the model differently.
    """
    live, readers = adapter.entries(), ("comfyui",) if adapter.norms else adapter.readers[file_format]
    header = _header(file_format, path)
    comparison = _Comparison(path, _written_dtype(header, adapter.files))
    of_weights = any(entry.needs_weight for entry in live.values())
    if readers != ("comfyui",):
        with _reported(path):
            loaded = _load_back(file_format, path, family, adapter)
        comparison.same_modules(live.keys(), loaded.keys())
        for name, entry in live.items():
            if file_format == "kohya" or not of_weights:  # diffusers drops magnitudes in kohya's format
                comparison.updates(name, entry.additive(), loaded[name])
            else:
                weight = _weight(adapter.modules[name][2])
                comparison.weights(name, entry, loaded[name].effect(weight), weight)
    known = readers_of_file(header, [family.name])
    if "comfyui" in readers:
        deviation = _compare_in_comfy(comparison, file_format, adapter, live, of_weights)
        known = known.differing(deviation) if known and deviation and file_format != COMFYUI else known
    cannot_read = known.cannot_read if known else ("other programs (not known)",)
    return comparison.result(cannot_read, known.can_read if known else ())


def _load_back(file_format: Form, path: Path, family: ModelFamily, adapter: Adapter) -> dict[str, Entry]:
    """Load the file with the library that usually reads it. Return its adapter entries by module name."""
    if file_format == "peft":
        loaded: dict[str, nn.Module] = {}
        for component in adapter.components:
            with DEPRECATIONS:
                peft_model = PeftModel.from_pretrained(
                    family.skeleton(component), str(path / component), low_cpu_mem_usage=True, torch_device="cpu"
                )
            loaded[component] = peft_model.get_base_model()
    else:
        loaded = family.lora_file_names.load_in_diffusers(path, adapter.components)
    return {
        canonical(component, module): loaded_entry(type(adapter), layer)
        for component, root in loaded.items()
        for module, layer in root.named_modules()
        if isinstance(layer, BaseTunerLayer)
    }


def _compare_in_comfy(
    comparison: _Comparison, file_format: Form, adapter: Adapter, live: Mapping[str, Entry], of_weights: bool
) -> float:
    """Compare the file with the adapter by ComfyUI's rules.

    A DoRA in the comfyui format is compared by ComfyUI's DoRA rule, in other formats by DoRA's definition. Return the
    difference between these two rules, relative to the whole change; 0 without DoRA.
    """
    table = adapter.key_table(file_format)
    expected = table.of_keys(live)
    weights = _Weights(table, adapter.modules, expected, real=of_weights)
    seen, off, whole = [], 0.0, 0.0
    with _reported(comparison.path):
        tensors = read_tensors(read_header(comparison.path))
        _compare_norms(comparison, adapter, tensors)
        present = apply_comfy(tensors, weights, norm_of_base=True) if of_weights else None
        for key, patched in apply_comfy(tensors, weights, norm_of_base=file_format == COMFYUI):
            weight = weights[key]
            if present is not None:
                off += norm_of(next(present)[1] - patched) ** 2
                whole += norm_of(patched - weight) ** 2
            comparison.weights(key, expected[key], patched.sub_(weight), weight)
            seen.append(key)
    comparison.same_modules(expected, seen)
    return math.sqrt(off / whole) if whole else 0.0


def _compare_norms(comparison: _Comparison, adapter: Adapter, tensors: dict[str, Tensor]) -> None:
    """Compare the trained norms by ComfyUI's rules, and remove them from ``tensors``.

    Their dtype in the file may differ from the dtype of the other tensors: an IA3 is stored in float32.
    """
    live, dtypes = adapter.norm_tensors(), {name: tensor.dtype for name, tensor in tensors.items()}
    zeros = {name: torch.zeros_like(tensor) for name, tensor in live.items()}
    keys = dict.fromkeys(name.rpartition(".")[0] for name in live)
    bases = {key: (zeros[f"{key}.{W_NORM}"], zeros.get(f"{key}.{B_NORM}")) for key in keys}
    seen = []
    for key, *changes in apply_norms(tensors, bases):
        for role, change in zip((W_NORM, B_NORM), changes, strict=True):
            if change is not None:
                name = f"{key}.{role}"
                size, off = rounded(live[name], dtypes.get(name, comparison.dtype))
                comparison.add(name, change - live[name], size, off)
                seen.append(name)
    comparison.same_modules(live, seen)


def _weight(layer: BaseTunerLayer) -> Tensor:
    """Return a layer's base weight as float32 on the CPU."""
    # On the CPU, so that a faulty GPU cannot hide an error; this waits for the GPU
    weight = dense_weight(layer.get_base_layer())
    return weight.detach().float().cpu()


class _Weights(Mapping[str, Tensor]):
    """Mapping of kohya keys to base weights, which are fetched one at a time.

    If ``real`` is false, the weights are zeros.
    """

    def __init__(
        self, table: KeyTable, modules: Mapping[str, tuple[str, str, Any]], keys: Iterable[str], *, real: bool
    ) -> None:
        self._table, self._modules, self._keys, self._real = table, modules, tuple(keys), real

    def __getitem__(self, key: str) -> Tensor:
        shape = self._table.shapes[key]
        if not self._real:
            return torch.zeros(()).expand(shape)
        weight = torch.zeros(shape)
        for part in self._table.parts[key]:
            if part.module in self._modules:
                rows = _weight(self._modules[part.module][2])[part.first : part.first + part.count]
                weight[part.at : part.at + part.count] = rows
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


@dataclass
class _Comparison:
    """Accumulates the differences of all weights.

    Raises ExportError at the first one that rounding does not explain.
    """

    path: Path
    dtype: torch.dtype
    largest: float = 0.0
    squares: list[float] = field(default_factory=lambda: [0.0, 0.0])  # squared norms of differences and of changes

    def same_modules(self, live: Iterable[str], loaded: Iterable[str]) -> None:
        wrong = sorted(set(live) ^ set(loaded))
        if wrong:
            raise _failed(
                self.path, f"File and adapter differ in {count_text(len(wrong), 'module')}, such as {wrong[0]}."
            )

    def updates(self, name: str, live: Entry, loaded: Entry) -> None:
        """Compare two updates of one layer by their factors."""
        try:
            difference = live.difference(loaded)
        except ValueError as error:
            raise _failed(self.path, f"The factors of {name} have wrong shapes: {error}.") from error
        self.add(name, difference, live.norm(), live.allowance(self.dtype))

    def weights(self, name: str, live: Entry, change: Tensor, weight: Tensor) -> None:
        """Compare the change of a weight as a reader computes it with the live adapter's. ``change`` is overwritten."""
        expected = live.effect(weight)
        if change.shape != expected.shape:
            raise _failed(
                self.path,
                f"The change of {name} has the shape {tuple(change.shape)} instead of {tuple(expected.shape)}.",
            )
        self.add(name, change.sub_(expected), norm_of(expected), live.allowance(self.dtype, weight))

    def add(self, name: str, difference: Tensor, whole: float, allowed: float) -> None:
        norm = norm_of(difference)
        if not norm <= allowed:  # also true for NaN
            raise _failed(
                self.path, f"{name} has a wrong effect: it is off by {norm:.3g}, and rounding explains {allowed:.3g}."
            )
        self.largest = max(self.largest, float(torch.linalg.vector_norm(difference, ord=math.inf)))
        self.squares[0] += norm**2
        self.squares[1] += whole**2

    def result(self, cannot_read: tuple[str, ...], can_read: tuple[str, ...]) -> Verification:
        relative = math.sqrt(self.squares[0] / self.squares[1]) if self.squares[1] else 0.0
        return Verification(self.largest, relative, cannot_read, can_read)


def _header(file_format: Form, path: Path) -> TensorFileHeader:
    """Read the header of a file. For a folder of PEFT folders, read the header of the first one."""
    with _reported(path):
        return read_header(next(iter(sorted(path.glob("*/*.safetensors"))), path) if file_format == "peft" else path)


def _written_dtype(header: TensorFileHeader, files: FileKind) -> torch.dtype:
    """Return the dtype of the adapter's factors in the file."""
    with _reported(header.path):
        known = ((files.parts.role_of(name), entry) for name, entry in header.tensors.items())
        return next(DTYPES[entry.dtype] for found, entry in known if found and found[1] in files.parts.factors)


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    """Convert exceptions of another library's reader into an ExportError."""
    try:
        yield
    except (AttributeError, KeyError, OSError, RuntimeError, StopIteration, TypeError, ValueError, ModelError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise _failed(path, f"Loading the file failed: {reason}") from error


def _failed(path: Path, what: str) -> ExportError:
    return ExportError(
        "export-differs",
        f"The exported file does not have the same effect as the trained adapter. {what}",
        where=str(path),
        fix="The checkpoints are intact: export again from the last one (lora-rocm export), and please report this.",
    )
