"""Builds a component while its files are read.

Each layer is packed (quantised) as soon as it is complete, so the component is never dense as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock

import torch
from torch import Tensor, nn

from lora_rocm.base_models.conversion import State, computed, is_source, sources_of
from lora_rocm.base_models.stored_weights import FourBitWeight, ScaledWeight, Storage, Stored
from lora_rocm.kernels.nf4_codes import BLOCK, LEVELS
from lora_rocm.kernels.quantised import NESTED_BLOCK, Nf4, ScaledRows
from lora_rocm.kernels.weight_format import PackedLinear, WeightFormat


class Assembly:
    """Builds a component from tensors that arrive in any order and from several threads.

    When all file tensors for a weight have been read, the thread that read the last one computes the weight. If the
    weight belongs to a layer that is to be packed, the thread packs it and frees the dense weight.

    A weight that is stored with scales is complete when all its parts have been read. If its format is the wanted
    one and gives the same numbers, its layer keeps the stored codes. This also applies to fp8 weights without a
    scale.

    Args:
        module: the component, with weights on the meta device.
        made: the component's tensors without data, as ``conversion.traced`` returns them.
        weights: wanted storage format of the layers.
        dtype: dtype of the tensors that stay dense.
        stored: storage of each weight that the files store with scales, keyed by name.
    """

    def __init__(
        self,
        module: nn.Module,
        made: State,
        weights: WeightFormat,
        dtype: torch.dtype,
        stored: Mapping[str, Storage],
    ) -> None:
        self._module, self._made, self._weights, self._dtype, self._stored = module, made, weights, dtype, stored
        self._layers = {f"{path}.weight": path for path, _ in weights.chosen(module).items()}
        self._users: dict[str, set[str]] = {}
        for name, tensor in made.items():
            for source in sources_of(tensor):
                self._users.setdefault(source, set()).add(name)
        self._weight_of = {part: name for name, storage in stored.items() for part in storage.parts.values()}
        self._parts: dict[str, State] = {name: {} for name in stored}
        self._read: State = {}
        self._as_stored: dict[str, Stored] = {}
        self._dense: State = {}
        self._lock = Lock()

    def take(self, name: str, tensor: Tensor) -> None:
        """Add a tensor of a file. It is ignored if the component does not need it.

        Threads compute and pack in parallel. The lock only protects the state that they share.
        """
        source = self._weight_of.get(name, name)
        if source not in self._users:
            return
        if source in self._stored:
            with self._lock:
                self._parts[source][name] = tensor
                read, parts = self._parts[source], self._stored[source].parts
                if len(read) < len(parts):
                    return
                del self._parts[source]
            self._as_stored[source] = self._stored[source].weight({role: read[at] for role, at in parts.items()})
            tensor = self._as_stored[source].dense(self._dtype)
            del read
        elif tensor.dtype is torch.float8_e4m3fn and tensor.ndim == 2:  # a plain cast
            self._as_stored[source] = ScaledWeight(tensor, torch.ones(len(tensor), 1))
        if tensor.is_floating_point():
            tensor = tensor.to(self._dtype)
        with self._lock:
            self._read[source] = tensor
            complete = [user for user in self._users[source] if sources_of(self._made[user]) <= self._read.keys()]
        del tensor
        for user in complete:
            self._build(user)

    def reusable(self, name: str) -> bool:
        """Whether ``take`` keeps no reference to a file's tensor, because it packs the tensor immediately.

        Such a tensor is the weight of a single layer that is to be packed.
        """
        users = self._users.get(name, set())
        if name in self._weight_of or len(users) != 1:
            return False
        (user,) = users
        made = self._made[user]
        return user in self._layers and is_source(made) and made.dtype is not torch.float8_e4m3fn  # its codes may stay

    def finished(self) -> nn.Module:
        """Return the component, frozen and in eval mode. Call it after all files have been read."""
        constants = {name: tensor for name, tensor in self._made.items() if not sources_of(tensor)}
        self._module.load_state_dict({**self._dense, **constants}, strict=False, assign=True)
        return self._module.requires_grad_(False).eval()

    def _build(self, name: str) -> None:
        path, tensor = self._layers.get(name), computed(self._made[name], self._read)
        if path is None:
            self._dense[name] = tensor
        else:
            layer = self._module.get_submodule(path)
            assert isinstance(layer, nn.Linear)
            layer.weight = nn.Parameter(tensor, requires_grad=False)
            self._module.set_submodule(path, self._kept(name, layer) or self._weights.packed(layer))
        with self._lock:
            for source in sources_of(self._made[name]):
                self._users[source].remove(name)
                if not self._users[source]:
                    del self._read[source]
                    self._as_stored.pop(source, None)

    def _kept(self, name: str, layer: nn.Linear) -> PackedLinear | None:
        """Return the layer with the file's codes, or None.

        It is None unless the codes have the wanted format and give the same numbers.
        """
        made = self._made[name]
        stored = {source: self._as_stored.get(source) for source in sources_of(made)}
        scaled = {source: weight for source, weight in stored.items() if isinstance(weight, ScaledWeight)}
        if isinstance(self._weights, ScaledRows) and scaled and len(scaled) == len(stored):
            codes = {source: weight.codes_OI for source, weight in scaled.items()}
            if {tensor.dtype for tensor in codes.values()} != {self._weights.stored}:
                return None
            # An operation that moves rows moves their scales in the same way.
            as_bytes = {source: tensor.view(torch.uint8) for source, tensor in codes.items()}
            scales = {source: weight.scale_O1.expand_as(weight.codes_OI) for source, weight in scaled.items()}
            codes_OI, scale_O1 = computed(made, as_bytes).contiguous(), computed(made, scales)[:, :1].contiguous()
            kept = self._weights.of_codes(layer, codes_OI.view(self._weights.stored), scale_O1)
            return kept if torch.equal(kept.dense(self._dtype), layer.weight) else None
        if isinstance(self._weights, Nf4) and is_source(made):
            (weight,) = stored.values()
            return _kept_nf4(self._weights, layer, weight) if isinstance(weight, FourBitWeight) else None
        return None


def _kept_nf4(weights: Nf4, layer: nn.Linear, stored: FourBitWeight) -> PackedLinear | None:
    sizes, codes_K = [stored.state.get(key) for key in ("blocksize", "nested_blocksize")], stored.absmax
    # Both maps are on the CPU: comparing them does not wait for a GPU
    if sizes != [BLOCK, NESTED_BLOCK] or stored.quant_map.tolist() != torch.tensor(LEVELS).tolist():
        return None
    if stored.nested_absmax is None or stored.nested_quant_map is None:
        return None
    return weights.of_codes(
        layer,
        stored.pairs,
        nested_codes=nn.functional.pad(codes_K, (0, -len(codes_K) % NESTED_BLOCK)),
        nested=stored.nested_absmax,
        offset=torch.tensor([stored.nested_offset]),
        code=stored.nested_quant_map,
    )
