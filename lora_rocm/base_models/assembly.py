"""Builds a component while its files are read, so that its packed layers never are dense all at once."""

from __future__ import annotations

from threading import Lock

from torch import Tensor, nn

from lora_rocm.base_models.conversion import State, computed, sources_of
from lora_rocm.kernels.weight_format import WeightFormat


class Assembly:
    """Collects the tensors of a component, which come in any order and from several threads.

    A tensor of the component is computed once all that it is made of was read, and a chosen layer is packed at once.
    Then its dense weight is freed.

    Args:
        module: the component, with weights on the meta device.
        made: each of its tensors without data, from ``conversion.traced``.
        weights: storage format of the layers.
    """

    def __init__(self, module: nn.Module, made: State, weights: WeightFormat) -> None:
        self._module, self._made, self._weights = module, made, weights
        self._layers = {f"{path}.weight": path for path in weights.chosen(module)}
        self._users: dict[str, set[str]] = {}
        for name, tensor in made.items():
            for source in sources_of(tensor):
                self._users.setdefault(source, set()).add(name)
        self._read: State = {}
        self._dense: State = {}
        self._lock = Lock()

    def take(self, source: str, tensor: Tensor) -> None:
        """Take a tensor of a file; one that the component does not need is ignored."""
        if source not in self._users:
            return
        with self._lock:  # one layer at a time is packed
            self._read[source] = tensor
            del tensor
            for name in [*self._users[source]]:
                if sources_of(self._made[name]) <= self._read.keys():
                    self._build(name)

    def finished(self) -> nn.Module:
        """The component, frozen and in eval mode, after all of its files were read."""
        constants = {name: tensor for name, tensor in self._made.items() if not sources_of(tensor)}
        self._module.load_state_dict({**self._dense, **constants}, strict=False, assign=True)
        return self._module.requires_grad_(False).eval()

    def _build(self, name: str) -> None:
        made = self._made[name]
        tensor = computed(made, self._read)
        for source in sources_of(made):
            self._users[source].remove(name)
            if not self._users[source]:
                del self._read[source]
        path = self._layers.get(name)
        if path is None:
            self._dense[name] = tensor
            return
        layer = self._module.get_submodule(path)
        assert isinstance(layer, nn.Linear)
        layer.weight = nn.Parameter(tensor, requires_grad=False)
        self._module.set_submodule(path, self._weights.packed(layer))
