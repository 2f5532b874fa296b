"""Every exported file is loaded back by somebody else's code and its effect compared with the live adapter's.

What is compared is the change of each weight, number by number: no second copy of the base is needed. kohya and
diffusers files are read by diffusers, PEFT folders by PEFT, and kohya files also by a small reader of ComfyUI's rules
(diffusers drops DoRA's magnitudes and forgives a missing alpha). Runs on the CPU, which a faulty GPU cannot mislead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from lora_rocm.errors import ExportError, ModelError
from lora_rocm.families.base import LoadedModel, ModelFamily
from lora_rocm.families.weightfiles import DTYPES, read_header, read_tensors
from lora_rocm.kernels.weight_format import dense_weight
from lora_rocm.train.adapter import Adapter
from lora_rocm.train.comfy import apply_comfy
from lora_rocm.train.lora_file import LoraEntry, canonical

# unit roundoff and half of the smallest number, of the formats that files are written in
ROUNDING = {
    torch.float32: (2.0**-24, 2.0**-150),
    torch.float16: (2.0**-11, 2.0**-25),
    torch.bfloat16: (2.0**-8, 2.0**-134),
}
ARITHMETIC = 1e-5  # float32 products of different code, summed in another order
CANCELLATION = 1e-6  # float32 noise of subtracting a base weight from a patched one

UI_TOOLS = "ComfyUI, Forge, A1111 and kohya's tools"
CANNOT_READ: dict[str, tuple[str, ...]] = {
    "kohya": (),
    "diffusers": (
        "ComfyUI and Forge (apply a part of it, the modules whose names they know; only their log says so)",
        "A1111 and kohya's tools (do not know these names for SDXL)",
    ),
    "peft": (f"{UI_TOOLS} (a PEFT folder is for PEFT)",),
}
DORA_IN_KOHYA_FORM = (
    "diffusers (drops dora_scale: export the diffusers format for it)",
    "A1111 (normalises along the other axis) and kohya's networks.lora (knows no DoRA)",
)


@dataclass(frozen=True)
class Verification:
    """What loading back found.

    max_difference: largest difference of any weight's change; relative_difference: of the whole change (norms).
    cannot_read: programs that cannot read this file, or not exactly, in words.
    """

    max_difference: float
    relative_difference: float
    cannot_read: tuple[str, ...]


@torch.no_grad()
def verify(form: str, path: Path, family: ModelFamily, model: LoadedModel, adapter: Adapter) -> Verification:
    """Load an exported file as its users do and compare its effect with the adapter's.

    Args:
        form: kohya, diffusers or peft.
        path: the file, or the folder of PEFT folders.
        family: reads the file with diffusers.
        model: the base weights are those that the adapter sits on.
        adapter: what should have been written.

    Raises:
        ExportError: the file cannot be read, lacks a module, has one too many, or has another effect.
    """
    live = adapter.entries()
    comparison = _Comparison(path, _written_dtype(form, path))
    dora = any(entry.magnitude is not None for entry in live.values())
    with _reported(path):
        loaded = _load_back(form, path, family, adapter.components)
    comparison.same_modules(live.keys(), loaded.keys())
    for name, entry in live.items():
        if form == "kohya" or not dora:  # diffusers has no magnitudes in kohya's form
            comparison.factors(name, replace(entry, magnitude=None), loaded[name])
        else:
            weight = _weight(adapter.modules[name][2])
            comparison.weights(name, entry, loaded[name].effect(weight), weight)
    if form != "kohya":
        return comparison.result(CANNOT_READ[form])
    deviation = _compare_in_comfy(comparison, family, adapter, live, dora)
    note = f"ComfyUI and Forge (divide by the base weight's norm: {deviation:.1%} of the change differs)"
    return comparison.result((*DORA_IN_KOHYA_FORM, note) if dora else CANNOT_READ[form])


def _load_back(form: str, path: Path, family: ModelFamily, components: Iterable[str]) -> dict[str, LoraEntry]:
    """Module name -> what the file's usual reader made of it."""
    if form == "peft":
        loaded: dict[str, nn.Module] = {}
        for component in components:
            peft_model = PeftModel.from_pretrained(
                family.skeleton(component), str(path / component), low_cpu_mem_usage=True, torch_device="cpu"
            )
            loaded[component] = peft_model.get_base_model()
    else:
        loaded = family.load_in_diffusers(path, list(components))
    return {
        canonical(component, module): _entry_of(layer)
        for component, root in loaded.items()
        for module, layer in root.named_modules()
        if isinstance(layer, LoraLayer)
    }


def _entry_of(layer: LoraLayer) -> LoraEntry:
    """What a loader put into a PEFT layer."""
    (active,) = layer.active_adapters
    magnitude = None
    if active in layer.lora_magnitude_vector:
        magnitude = layer.lora_magnitude_vector[active].weight.float().flatten()
    down, up = layer.lora_A[active].weight, layer.lora_B[active].weight
    if any(tensor.is_meta for tensor in (down, up, magnitude) if tensor is not None):
        raise ValueError("a layer was made but not filled")
    return LoraEntry(down.float(), up.float(), float(layer.scaling[active]), magnitude)


def _compare_in_comfy(
    comparison: _Comparison, family: ModelFamily, adapter: Adapter, live: Mapping[str, LoraEntry], dora: bool
) -> float:
    """Compare by ComfyUI's rules; returns how far its present rule for DoRA is off, as a share of the whole change."""
    names = {family.export_key(component, path): name for name, (component, path, _) in adapter.modules.items()}
    weights = _Weights({key: adapter.modules[name][2] for key, name in names.items()}, real=dora)
    seen, off, whole = [], 0.0, 0.0
    with _reported(comparison.path):
        tensors = read_tensors(read_header(comparison.path))
        present = apply_comfy(tensors, weights, norm_of_base=True) if dora else None
        for key, patched in apply_comfy(tensors, weights):
            name, weight = names[key], weights[key]
            if present is not None:
                off += _norm(next(present)[1] - patched) ** 2
                whole += _norm(patched - weight) ** 2
            comparison.weights(name, live[name], patched.sub_(weight), weight)
            seen.append(name)
    comparison.same_modules(live.keys(), seen)
    return math.sqrt(off / whole) if whole else 0.0


def _weight(layer: LoraLayer) -> Tensor:
    """A layer's base weight, float32 on the CPU."""
    weight = dense_weight(layer.get_base_layer())
    return weight.detach().float().cpu()


class _Weights(Mapping[str, Tensor]):
    """Base weights by name, fetched one at a time; a zero in their shapes where only the change matters."""

    def __init__(self, layers: Mapping[str, LoraLayer], *, real: bool) -> None:
        self._layers, self._real = layers, real

    def __getitem__(self, name: str) -> Tensor:
        layer = self._layers[name]
        return _weight(layer) if self._real else torch.zeros(()).expand(layer.get_base_layer().weight.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


@dataclass
class _Comparison:
    """Collects differences, and stops at the first that rounding does not explain."""

    path: Path
    dtype: torch.dtype
    largest: float = 0.0
    squares: list[float] = field(default_factory=lambda: [0.0, 0.0])  # of the differences, of the changes

    def same_modules(self, live: Iterable[str], loaded: Iterable[str]) -> None:
        wrong = sorted(set(live) ^ set(loaded))
        if wrong:
            raise _failed(self.path, f"{len(wrong)} modules are missing or too many, for example {wrong[0]}.")

    def factors(self, name: str, live: LoraEntry, loaded: LoraEntry) -> None:
        """Compare two updates by their factors: U2 V2 - U1 V1 = (U2 - U1) V2 + U1 (V2 - V1), without cancellation."""
        if loaded.up.shape != live.up.shape or loaded.down.shape != live.down.shape:
            raise _failed(self.path, f"{name} has factors of other shapes.")
        ours, theirs = live.scale * live.up.flatten(1), loaded.scale * loaded.up.flatten(1)
        down, moved = live.down.flatten(1), loaded.down.flatten(1)
        difference = torch.cat([theirs - ours, ours], dim=1) @ torch.cat([moved, moved - down])
        self._add(name, difference, _product_norm(ours, down), _allowance(live, None, self.dtype))

    def weights(self, name: str, live: LoraEntry, change: Tensor, weight: Tensor) -> None:
        """Compare a reader's change of one weight, which is overwritten, with the live one."""
        expected = live.effect(weight)
        if change.shape != expected.shape:
            raise _failed(self.path, f"{name} has the shape {tuple(change.shape)}, not {tuple(expected.shape)}.")
        self._add(name, change.sub_(expected), _norm(expected), _allowance(live, weight, self.dtype))

    def _add(self, name: str, difference: Tensor, whole: float, allowed: float) -> None:
        norm = _norm(difference)
        if not norm <= allowed:  # also when it is not a number
            raise _failed(self.path, f"{name} has another effect: off by {norm:.3g}, rounding explains {allowed:.3g}.")
        self.largest = max(self.largest, float(torch.linalg.vector_norm(difference, ord=math.inf)))
        self.squares[0] += norm**2
        self.squares[1] += whole**2

    def result(self, cannot_read: tuple[str, ...]) -> Verification:
        relative = math.sqrt(self.squares[0] / self.squares[1]) if self.squares[1] else 0.0
        return Verification(self.largest, relative, cannot_read)


def _allowance(entry: LoraEntry, weight: Tensor | None, dtype: torch.dtype) -> float:
    """How large the norm of a difference may be when the factors were only rounded to ``dtype``.

    A first-order bound of the product's error; DoRA multiplies it by magnitude over norm, once for the product and once
    for the norm.
    """
    unit, smallest = ROUNDING[dtype]
    down, up = _norm(entry.down), _norm(entry.up)
    off_down, off_up = (
        unit * norm + smallest * math.sqrt(factor.numel()) for norm, factor in ((down, entry.down), (up, entry.up))
    )
    bound = abs(entry.scale) * (up * off_down + down * off_up + off_down * off_up + ARITHMETIC * down * up)
    if entry.magnitude is None or weight is None:
        return bound
    norms = (weight + entry.update()).flatten(1).norm(dim=1)
    stretch = float((entry.magnitude / norms).abs().nan_to_num(posinf=0.0).max())
    return 2 * stretch * bound + CANCELLATION * (_norm(weight) + _norm(entry.magnitude))


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


def _product_norm(up: Tensor, down: Tensor) -> float:
    """The norm of ``up @ down`` by the small Gram matrices."""
    return math.sqrt(max(0.0, float(((up.T @ up) * (down @ down.T)).sum())))


def _written_dtype(form: str, path: Path) -> torch.dtype:
    """The number format of the low-rank factors in the file."""
    file = next(iter(sorted(path.glob("*/*.safetensors"))), path) if form == "peft" else path
    with _reported(path):
        entries = read_header(file).tensors.items()
        return next(DTYPES[entry.dtype] for name, entry in entries if "lora_A" in name or "lora_down" in name)


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    """A foreign reader's complaint as an ExportError."""
    try:
        yield
    except (AttributeError, KeyError, OSError, RuntimeError, StopIteration, TypeError, ValueError, ModelError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise _failed(path, f"Loading it back failed: {reason}") from error


def _failed(path: Path, what: str) -> ExportError:
    return ExportError(
        "export-differs",
        f"The exported file does not do what the trained adapter does. {what}",
        where=str(path),
        fix="The checkpoints are whole: export again from the last one (lora-rocm export), and please report this.",
    )
