"""Reads weights that a file stores in few bits with separate scales. Each such weight appears as one tensor.

ComfyUI's scaled fp8 and int8: ``X.weight`` is multiplied by ``X.scale_weight`` (older files) or ``X.weight_scale``,
which has one number or one per output. ``X.comfy_quant`` describes the format as JSON. Scales of inputs are
ignored, because products are computed in the precision of the run.

bitsandbytes in 4 bits: ``X.weight`` has two codes per byte, and ``X.weight.quant_map`` has the value of each code.
``X.weight.absmax`` has the largest magnitude of each block. It may be quantised, too, with ``nested_absmax`` and
``nested_quant_map``. ``X.weight.quant_state.*`` has the weight's shape and the block sizes as JSON.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_rocm.base_models.safetensors_file import read_tensors
from lora_rocm.errors import ModelError
from lora_rocm.foundation.json_text import parse_json
from lora_rocm.foundation.safetensors_header import TensorEntry
from lora_rocm.foundation.terminal_text import printable
from lora_rocm.model_files.header import TensorFileHeader, damaged
from lora_rocm.model_files.storage_formats import quantised_error

SCALES = (".scale_weight", ".weight_scale")
SCALES_OF_INPUTS = (".scale_input", ".input_scale")
DESCRIPTION, MARKER = ".comfy_quant", "scaled_fp8"
UNUSED = (*SCALES_OF_INPUTS, DESCRIPTION, MARKER)
FOUR_BITS = ".weight.quant_state.bitsandbytes__"
OF_FOUR_BITS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
NESTED_KEYS = ("nested_blocksize", "nested_offset", "nested_dtype")
FOUR_BIT_TYPES = ("nf4", "fp4")
BLOCK_SIZES = tuple(1 << power for power in range(5, 13))  # of bitsandbytes: 32 to 4096
FP8, FLOATS = ("F8_E4M3", "F8_E5M2"), ("F64", "F32", "F16", "BF16")
COMFY_FORMATS = {"float8_e4m3fn": ("F8_E4M3", "U8"), "float8_e5m2": ("F8_E5M2",), "int8_tensorwise": ("I8",)}
"""Dtypes in which the codes of each ComfyUI format may be stored."""
SCALED_DTYPES = (*FP8, "I8")
"""Dtypes of codes that have a scale but no ``comfy_quant`` description."""
EMBEDDINGS = ("embed", "shared", "wte")
"""Words in the names of embedding tables. They may be stored in fp8 without a scale even if the layers have scales."""
LARGEST = {
    "scale": 1024.0,
    "absmax": 65504.0,
    "nested_absmax": 65504.0,
    "quant_map": 2.0,
    "nested_quant_map": 2.0,
}
"""Largest plausible magnitude of a tensor, keyed by role. A float16 weight is at most 65,504, and a code's value at
most 1.
"""
MAX_SMALL_PART = 1 << 20
MAX_DESCRIPTION = 1 << 16


@dataclass(frozen=True)
class ScaledWeight:
    """A weight with scales.

    codes_OI: fp8 or int8, shape [O, I].
    scale_O1: float32, one scale per output, shape [O, 1].
    """

    codes_OI: Tensor
    scale_O1: Tensor

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight as a dense tensor, shape [O, I]."""
        return (self.codes_OI.float() * self.scale_O1).to(dtype)


@dataclass(frozen=True)
class FourBitWeight:
    """A weight in bitsandbytes' 4-bit format.

    pairs: uint8; two codes per byte, the first one in the upper half.
    quant_map: value of each code.
    absmax: largest magnitude of each block: float32, or codes if it is quantised, too.
    state: the JSON description in the file, with the block sizes.
    nested_absmax, nested_quant_map: scale of each nested block and values of the codes, if ``absmax`` is quantised.

    A quantised ``absmax`` is ``nested_quant_map[code] * nested_absmax + nested_offset``.
    """

    shape: tuple[int, ...]
    pairs: Tensor
    quant_map: Tensor
    absmax: Tensor
    state: Mapping[str, Any]
    nested_absmax: Tensor | None = None
    nested_quant_map: Tensor | None = None

    @property
    def nested_offset(self) -> float:
        return float(self.state["nested_offset"])

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight as a dense tensor in its original shape."""
        pairs = self.pairs.flatten()
        codes_N = torch.stack([pairs >> 4, pairs & 15], dim=1).flatten()
        absmax_K = self.absmax
        if self.nested_absmax is not None and self.nested_quant_map is not None:
            of_block_K = self.nested_absmax.repeat_interleave(int(self.state["nested_blocksize"]))[: len(absmax_K)]
            absmax_K = self.nested_quant_map[absmax_K.int()] * of_block_K + self.nested_offset
        of_block_N = absmax_K.repeat_interleave(int(self.state["blocksize"]))[: len(codes_N)]
        return (self.quant_map[codes_N.int()] * of_block_N).to(dtype).view(self.shape)


Stored = ScaledWeight | FourBitWeight


@dataclass(frozen=True)
class Storage:
    """The parts of one weight in a file.

    path: path of the file.
    parts: names of tensors in the file, keyed by role.
    state: the JSON description of a 4-bit weight; empty for other formats.
    """

    path: Path
    form: str
    shape: tuple[int, ...]
    parts: Mapping[str, str]
    state: Mapping[str, Any] = field(default_factory=dict)

    def require_numbers(self, role: str, tensor: Tensor) -> None:
        """Refuse a tensor if it has numbers that no weight has. ``role``: its role in ``parts``.

        Raises:
            ModelError: weights-not-finite, weights-implausible.
        """
        if role not in LARGEST or not tensor.is_floating_point() or not tensor.numel():
            return
        largest = float(tensor.float().abs().amax())  # NaN if there is one
        if largest <= LARGEST[role]:
            return
        is_finite = math.isfinite(largest)
        raise ModelError(
            "weights-implausible" if is_finite else "weights-not-finite",
            f"{printable(self.parts[role]):.200} contains numbers that "
            + (f"are too large for a weight, up to {largest:.3g}." if is_finite else "are not finite."),
            where=str(self.path),
            fix="Download the model again, or use another version.",
        )

    def weight(self, tensors: Mapping[str, Tensor]) -> Stored:
        """Return the weight, built from its tensors. ``tensors``: keyed by role.

        Raises:
            ModelError: see ``require_numbers``.
        """
        for role, tensor in tensors.items():
            self.require_numbers(role, tensor)
        if self.state:
            pairs, rest = tensors["weight"], {role: tensor for role, tensor in tensors.items() if role != "weight"}
            return FourBitWeight(self.shape, pairs, state=self.state, **rest)
        codes_OI = tensors["weight"]
        codes_OI = codes_OI.view(torch.float8_e4m3fn) if codes_OI.dtype is torch.uint8 else codes_OI
        return ScaledWeight(codes_OI, tensors["scale"].float().reshape(-1, 1).expand(len(codes_OI), 1))


@dataclass(frozen=True)
class ComponentTensors:
    """The tensors of a component in its files.

    headers: headers of the files. prefix: prefix of the component's tensor names.
    """

    headers: Sequence[TensorFileHeader]
    prefix: str

    @cached_property
    def entries(self) -> dict[str, TensorEntry]:
        """The entry of each tensor, keyed by name.

        Weights with scales appear as if they were dense, and their other parts are omitted.
        """
        hidden = {name for stored in self.stored.values() for role, name in stored.parts.items() if role != "weight"}
        found = {key: entry for key, entry in self._all.items() if key not in hidden and not key.endswith(UNUSED)}
        for name, stored in self.stored.items():
            found[name] = replace(found[name], dtype="F32", shape=stored.shape)
        return {key: entry for key, entry in found.items() if FOUR_BITS not in key}

    @cached_property
    def stored(self) -> dict[str, Storage]:
        """The storage of each weight that is stored with scales, keyed by name.

        Raises:
            ModelError: see ``_all_stored``.
        """
        return _all_stored(self.headers, self.prefix)

    @cached_property
    def _all(self) -> dict[str, TensorEntry]:
        return {key: entry for h in self.headers for key, entry in h.tensors.items() if key.startswith(self.prefix)}

    @property
    def stored_formats(self) -> list[str]:
        """Display names of the formats in which weights with scales are stored."""
        return sorted({stored.form for stored in self.stored.values()})


def _described(header: TensorFileHeader, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the JSON objects that tensors contain as text, keyed by the tensor's name."""
    for name in names:
        if header.tensors[name].end - header.tensors[name].begin > MAX_DESCRIPTION:
            raise damaged(header.path, f"the description {name:.200} is too long")
        if header.tensors[name].dtype != "U8":
            raise damaged(header.path, f"the description {name:.200} is {header.tensors[name].dtype}, not bytes")
    found = {}
    for name, tensor in read_tensors(header, frozenset(names).__contains__).items():
        try:
            found[name] = parse_json(tensor.numpy().tobytes())
        except (ValueError, RecursionError) as error:
            raise damaged(header.path, f"{name:.200} cannot be read: {error}") from error
        if not isinstance(found[name], dict):
            raise damaged(header.path, f"{name:.200} is not a JSON object")
    return found


def _all_stored(headers: Sequence[TensorFileHeader], prefix: str) -> dict[str, Storage]:
    """Return the storage of a component's weights that are stored with scales, keyed by name.

    This is the only function that judges the parts of a weight. It checks headers and small tensors. The values of
    large tensors are checked when they are read (``Storage.weight``).

    Raises:
        ModelError: weights-quantised, weights-damaged, weights-not-finite.
    """
    found: dict[str, Storage] = {}
    for header in headers:
        names = [name for name in header.tensors if name.startswith(prefix)]
        small = [name for name in names if FOUR_BITS in name or name.endswith(DESCRIPTION)]
        described = _described(header, small)
        for name in names:
            if FOUR_BITS in name:
                weight = name.partition(FOUR_BITS)[0] + ".weight"
                made = _four_bits(header, weight, described[name])
            elif name.endswith(SCALES):
                base = name.rpartition(".")[0]
                made = _scaled(header, base, name, described.get(base + DESCRIPTION))
            else:
                continue
            if made.parts["weight"] in found:
                raise damaged(header.path, f"{name:.200} describes the same weight as another tensor")
            found[made.parts["weight"]] = made
    _require_one_dtype(headers, prefix, found)
    for header in headers:
        _require_scales(header, prefix, found)
        _require_numbers(header, prefix, found)
    return found


def _require_scales(header: TensorFileHeader, prefix: str, stored: Mapping[str, Storage]) -> None:
    """Refuse fp8 weights without a scale if other weights have one.

    Such a scale was lost, and the weight is wrong without it.
    """
    of_codes = [each.parts["weight"] for each in stored.values() if each.form == "scaled fp8"]
    for name, entry in header.tensors.items():
        if not name.startswith(prefix):
            continue
        base = name.rpartition(".")[0]
        codes = header.tensors.get(f"{base}.weight")
        told = name.endswith((DESCRIPTION, *SCALES_OF_INPUTS)) and f"{base}.weight" not in stored
        told = told and codes is not None and codes.dtype in (*SCALED_DTYPES, "U8")
        plain = name not in stored and name.endswith(".weight") and len(entry.shape) == 2 and entry.dtype in FP8
        if told or (plain and of_codes and not any(word in name for word in EMBEDDINGS)):
            raise damaged(header.path, f"the scale of {base:.200}.weight is missing")


def _require_one_dtype(headers: Sequence[TensorFileHeader], prefix: str, stored: Mapping[str, Storage]) -> None:
    """Refuse weights with codes of different dtypes, unless descriptions in the file define their meaning."""
    entries = {name: (header, entry) for header in headers for name, entry in header.tensors.items()}
    undescribed = {name for name in stored if name.removesuffix(".weight") + DESCRIPTION not in entries}
    undescribed -= {name for name, each in stored.items() if each.state}
    found = {name: entries[name][1].dtype for name in undescribed}
    markers = {n: e.dtype for n, (_, e) in entries.items() if n.startswith(prefix) and n.endswith(MARKER)}
    found |= {name: dtype for name, dtype in markers.items() if dtype in FP8}
    usual = Counter(found.values()).most_common(1)
    odd = sorted(name for name, dtype in found.items() if dtype != usual[0][0])
    if odd:
        what = f"{odd[0]:.200} is {found[odd[0]]}, but other weights are {usual[0][0]}"
        raise damaged(entries[odd[0]][0].path, what)


def _require_numbers(header: TensorFileHeader, prefix: str, stored: Mapping[str, Storage]) -> None:
    """Check the values of small tensors. Reading them takes no noticeable time."""
    parts = {name: (each, role) for each in stored.values() for role, name in each.parts.items()}
    small = {
        name
        for name, (_, role) in parts.items()
        if role in LARGEST and (entry := header.tensors.get(name)) and entry.end - entry.begin <= MAX_SMALL_PART
    }
    for name, tensor in read_tensors(header, small.__contains__).items():
        each, role = parts[name]
        each.require_numbers(role, tensor)


def _scaled(header: TensorFileHeader, base: str, scale: str, described: Mapping[str, Any] | None) -> Storage:
    weight, entry, of_scale = f"{base}.weight", header.tensors.get(f"{base}.weight"), header.tensors[scale]
    if entry is None:
        raise damaged(header.path, f"{scale:.200} is the scale of a weight that is missing")
    rows = entry.shape[:1]
    if of_scale.shape not in ((), (1,), (1, 1), rows, (*rows, 1)):
        raise quantised_error("scales of blocks or columns", header.path, scale)
    if of_scale.dtype not in FLOATS:
        raise damaged(header.path, f"{scale:.200} is {of_scale.dtype}, which cannot be the dtype of a scale")
    form = (described or {}).get("format")
    parameters = (described or {}).get("params")
    turned = "convrot" in {**(described or {}), **(parameters if isinstance(parameters, dict) else {})}
    fitting = entry.dtype in SCALED_DTYPES if described is None else entry.dtype in COMFY_FORMATS.get(str(form), ())
    if turned or not fitting or len(entry.shape) != 2:
        named = printable(str(form or entry.dtype))[:40]
        raise quantised_error(f"ComfyUI's {named}{' with rotation' if turned else ''}", header.path, weight)
    kind = "scaled int8" if entry.dtype == "I8" else "scaled fp8"
    return Storage(header.path, kind, entry.shape, {"weight": weight, "scale": scale})


def _four_bits(header: TensorFileHeader, weight: str, state: dict[str, Any]) -> Storage:
    parts = {"weight": weight} | {role: f"{weight}.{role}" for role in OF_FOUR_BITS}
    parts = {role: name for role, name in parts.items() if name in header.tensors}
    is_nested = "nested_absmax" in parts or "nested_quant_map" in parts or any(key in state for key in NESTED_KEYS)
    # The description: sizes and kind of the codes
    shape, block, nested_block = state.get("shape"), state.get("blocksize"), state.get("nested_blocksize")
    if not isinstance(shape, list) or not shape or not all(type(size) is int and size > 0 for size in shape):
        raise damaged(header.path, f"its description of {weight:.200} is incomplete: shape")
    for key, size in [("blocksize", block), *([("nested_blocksize", nested_block)] if is_nested else [])]:
        if type(size) is not int or size not in BLOCK_SIZES:
            raise damaged(header.path, f"its description of {weight:.200} is incomplete: {key}")
    if state.get("quant_type") not in FOUR_BIT_TYPES:
        raise quantised_error(f"bitsandbytes' {printable(str(state.get('quant_type')))[:40]}", header.path, weight)
    # the shape of each part, from the shape of the weight
    assert isinstance(block, int)
    blocks = -(-prod(shape) // block)
    wanted = {"absmax": ("U8" if is_nested else "F32", blocks), "quant_map": ("F32", 16)}
    if is_nested:
        assert isinstance(nested_block, int)
        wanted |= {"nested_absmax": ("F32", -(-blocks // nested_block)), "nested_quant_map": ("F32", 256)}
        offset = state.get("nested_offset")
        is_number = isinstance(offset, int | float) and not isinstance(offset, bool)
        if not is_number or offset is None or not abs(offset) <= LARGEST["nested_absmax"]:  # NaN fails this comparison
            raise damaged(header.path, f"its description of {weight:.200} is incomplete: nested_offset")
    # Compare with the stored parts
    found = {role: header.tensors[name] for role, name in parts.items()}
    for role, (dtype, count) in wanted.items():
        if role not in found or found[role].dtype != dtype or found[role].shape != (count,):
            raise damaged(header.path, f"{weight:.200}.{role} does not fit the shape {shape}")
    codes = found.get("weight")
    if codes is None or codes.dtype != "U8" or prod(codes.shape) != -(-prod(shape) // 2):
        raise damaged(header.path, f"the codes of {weight:.200} do not fit the shape {shape}")
    return Storage(header.path, f"bitsandbytes' {state['quant_type']}", tuple(shape), parts, state)
