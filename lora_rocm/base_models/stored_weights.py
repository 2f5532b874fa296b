"""Weights that a file stores in few bits with scales beside them, each seen as one tensor.

ComfyUI's scaled fp8 and int8: ``X.weight`` times ``X.scale_weight`` (older files) or ``X.weight_scale``, one number or
one for each output. ``X.comfy_quant`` names the format as JSON. Scales of inputs are not used: products are computed in
the precision of the run. bitsandbytes in 4 bits: two codes a byte in ``X.weight``, what they mean in
``X.weight.quant_map``, the largest magnitude of each block in ``X.weight.absmax`` (or quantised again, with
``nested_absmax`` and ``nested_quant_map``), and shape and sizes of blocks as JSON in ``X.weight.quant_state.*``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from lora_rocm.base_models.safetensors_file import read_tensors
from lora_rocm.foundation.safetensors_header import TensorEntry
from lora_rocm.model_files.header import Header, damaged
from lora_rocm.model_files.storage_formats import quantised_error

SCALES = (".scale_weight", ".weight_scale")
UNUSED = (".scale_input", ".input_scale", ".comfy_quant", "scaled_fp8")
FOUR_BITS = ".weight.quant_state.bitsandbytes__"
OF_FOUR_BITS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
COMFY_FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise")
SCALED_DTYPES = {"F8_E4M3": "scaled fp8", "F8_E5M2": "scaled fp8", "I8": "scaled int8", "U8": "scaled fp8"}
MAX_DESCRIPTION = 1 << 16


@dataclass(frozen=True)
class ScaledWeight:
    """codes_OI: fp8 or int8. scale_O1: float32."""

    codes_OI: Tensor
    scale_O1: Tensor

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight [O, I]."""
        return (self.codes_OI.float() * self.scale_O1).to(dtype)


@dataclass(frozen=True)
class FourBitWeight:
    """A weight of bitsandbytes in 4 bits.

    pairs: uint8, two codes a byte, the first in its upper half. quant_map: the numbers of the codes. absmax: of each
    block, float32; or codes, whose numbers are ``nested_quant_map``, times ``nested_absmax`` of each nested block, plus
    ``nested_offset``. state: what the file says of it.
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
        """The weight in its shape."""
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
    """How one weight is stored. parts: role -> name of a tensor in the file. state: of 4 bits."""

    form: str
    shape: tuple[int, ...]
    parts: Mapping[str, str]
    state: Mapping[str, Any] = field(default_factory=dict)

    def weight(self, tensors: Mapping[str, Tensor]) -> Stored:
        """The weight, of its tensors by their roles."""
        if self.state:
            pairs, rest = tensors["weight"], {role: tensor for role, tensor in tensors.items() if role != "weight"}
            return FourBitWeight(self.shape, pairs, state=self.state, **rest)
        codes_OI = tensors["weight"]
        codes_OI = codes_OI.view(torch.float8_e4m3fn) if codes_OI.dtype is torch.uint8 else codes_OI
        return ScaledWeight(codes_OI, tensors["scale"].float().reshape(-1, 1).expand(len(codes_OI), 1))


@dataclass(frozen=True)
class ComponentTensors:
    """The tensors of a component in its files.

    headers: of the files. prefix: of the names that belong to it.
    """

    headers: Sequence[Header]
    prefix: str

    @cached_property
    def entries(self) -> dict[str, TensorEntry]:
        """Name -> entry, of weights as they are without quantisation: the tensors beside them are left out."""
        hidden = {name for stored in self.stored.values() for role, name in stored.parts.items() if role != "weight"}
        found = {key: entry for key, entry in self._all.items() if key not in hidden and not key.endswith(UNUSED)}
        for name, stored in self.stored.items():
            found[name] = replace(found[name], dtype="F32", shape=stored.shape)
        return {key: entry for key, entry in found.items() if FOUR_BITS not in key}

    @cached_property
    def stored(self) -> dict[str, Storage]:
        """Name of a weight -> how it is stored; weights that are whole are not in it.

        Raises:
            ModelError: weights-quantised, weights-damaged.
        """
        found = {}
        for header in self.headers:
            names = [name for name in header.tensors if name.startswith(self.prefix)]
            small = [name for name in names if FOUR_BITS in name or name.endswith(".comfy_quant")]
            described = _described(header, small)
            for name in names:
                if FOUR_BITS in name:
                    weight = name.partition(FOUR_BITS)[0] + ".weight"
                    found[weight] = _four_bits(header, weight, described[name])
                elif name.endswith(SCALES):
                    base = name.rpartition(".")[0]
                    found[f"{base}.weight"] = _scaled(header, base, name, described.get(f"{base}.comfy_quant"))
        return found

    @cached_property
    def _all(self) -> dict[str, TensorEntry]:
        return {key: entry for h in self.headers for key, entry in h.tensors.items() if key.startswith(self.prefix)}

    @property
    def forms(self) -> list[str]:
        """The formats of its stored weights, for people."""
        return sorted({stored.form for stored in self.stored.values()})


def _described(header: Header, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The JSON objects in small tensors."""
    for name in names:
        if header.tensors[name].end - header.tensors[name].begin > MAX_DESCRIPTION:
            raise damaged(header.path, f"the description {name:.200} is too long")
    found = {}
    for name, tensor in read_tensors(header, frozenset(names).__contains__).items():
        try:
            found[name] = json.loads(tensor.numpy().tobytes())
        except (ValueError, RecursionError) as error:
            raise damaged(header.path, f"{name:.200} is no JSON") from error
        if not isinstance(found[name], dict):
            raise damaged(header.path, f"{name:.200} is no JSON object")
    return found


def _scaled(header: Header, base: str, scale: str, described: Mapping[str, Any] | None) -> Storage:
    weight, entry = f"{base}.weight", header.tensors.get(f"{base}.weight")
    if entry is None or prod(header.tensors[scale].shape) not in (1, *entry.shape[:1]):
        raise quantised_error("scales of blocks", header.path, scale)
    form = str((described or {}).get("format", COMFY_FORMATS[0]))
    parameters = (described or {}).get("params")
    turned = "convrot" in {**(described or {}), **(parameters if isinstance(parameters, dict) else {})}
    is_bytes = entry.dtype == "U8" and form != COMFY_FORMATS[0]
    if form not in COMFY_FORMATS or turned or entry.dtype not in SCALED_DTYPES or is_bytes or len(entry.shape) != 2:
        raise quantised_error(f"ComfyUI's {form}{' with rotation' if turned else ''}", header.path, weight)
    return Storage(SCALED_DTYPES[entry.dtype], entry.shape, {"weight": weight, "scale": scale})


def _four_bits(header: Header, weight: str, state: dict[str, Any]) -> Storage:
    parts = {"weight": weight} | {role: f"{weight}.{role}" for role in OF_FOUR_BITS}
    parts = {role: name for role, name in parts.items() if name in header.tensors}
    is_nested, shape, needed = "nested_absmax" in parts, state.get("shape"), {"absmax", "quant_map"}
    sizes = [state.get("blocksize")]
    if is_nested:
        needed |= {"nested_quant_map"}
        sizes += [state.get("nested_blocksize"), 1 if "nested_offset" in state else None]
    if not isinstance(shape, list) or not all(isinstance(size, int) and size > 0 for size in (*shape, *sizes)):
        raise damaged(header.path, f"what it says of {weight:.200} is incomplete")
    count = {role: prod(header.tensors[name].shape) for role, name in parts.items()}
    blocks = -(-prod(shape) // int(state["blocksize"]))
    wanted = {"weight": -(-prod(shape) // 2), "absmax": blocks, "quant_map": 16}
    if not needed <= count.keys() or any(count.get(role) != number for role, number in wanted.items()):
        raise damaged(header.path, f"the parts of {weight:.200} do not fit its shape {shape}")
    kind = str(state.get("quant_type", "4 bits"))[:10]
    return Storage(f"bitsandbytes' {kind}", tuple(shape), parts, state)
