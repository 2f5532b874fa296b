"""Norms trained with the adapter, as in LyCORIS' ``train_norm``. Differences of weight and bias are trained.

The norm becomes ``norm(x) + normal(x) * w_norm + b_norm``, as in LyCORIS, where ``normal(x)`` is the normalised input.
Adding the difference to the weight itself would lose most of it in a 16-bit format. The base norm stays frozen and
keeps its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from lora_rocm.adapters.entry import file_error
from lora_rocm.adapters.lora_files.key_table import canonical, main_component
from lora_rocm.errors import AdapterError
from lora_rocm.families.base import LoadedModel, ModelFamily

W_NORM, B_NORM = "w_norm", "b_norm"
"""Names of the trained tensors, in layers and in files: the differences of the norm's weight and bias."""
ENDINGS = tuple(f".{role}" for role in (W_NORM, B_NORM))


class TrainedNorm(nn.Module):
    """A GroupNorm or LayerNorm with trained differences of its weight and bias, which start at zero.

    strength: factor of the differences (1: as trained).
    """

    def __init__(self, base_layer: nn.GroupNorm | nn.LayerNorm) -> None:
        super().__init__()
        self.base_layer, self.strength = base_layer, 1.0
        self.w_norm = nn.Parameter(torch.zeros(base_layer.weight.shape))
        self.b_norm = None if base_layer.bias is None else nn.Parameter(torch.zeros(base_layer.bias.shape))

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the trained tensors, keyed by role."""
        found = {W_NORM: self.w_norm, B_NORM: self.b_norm}
        return {role: tensor for role, tensor in found.items() if tensor is not None}

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base_layer(x)
        if not self.strength:
            return output
        weight, bias = (
            None if tensor is None else tensor.to(x.dtype) * self.strength for tensor in (self.w_norm, self.b_norm)
        )
        base = self.base_layer
        if isinstance(base, nn.GroupNorm):
            return output + functional.group_norm(x, base.num_groups, weight, bias, base.eps)
        return output + functional.layer_norm(x, base.normalized_shape, weight, bias, base.eps)


def _norms(root: nn.Module) -> Iterator[tuple[str, nn.GroupNorm | nn.LayerNorm]]:
    """Yield (path, norm) for all norms that have a weight. For a ``TrainedNorm``, its base layer is yielded."""
    inside = ""
    for path, module in root.named_modules():
        if isinstance(module, TrainedNorm):
            inside = f"{path}."
            yield path, module.base_layer
        elif isinstance(module, nn.GroupNorm | nn.LayerNorm) and module.weight is not None:
            if not inside or not path.startswith(inside):
                yield path, module


def insert_norms(family: ModelFamily, model: LoadedModel) -> None:
    """Replace each norm of the family's main component with a ``TrainedNorm``.

    Raises:
        AdapterError: "norms-none", the component has no norms with weights.
    """
    component = main_component(family)
    if not (found := list(_norms(model.components[component]))):
        raise AdapterError(
            "norms-none",
            f"The {component} of this base model has no norms with weights.",
            where="lora.train_norms",
            fix="Remove lora.train_norms.",
        )
    _replace_norms(model.components[component], dict(found))


def _replace_norms(root: nn.Module, norms: Mapping[str, nn.GroupNorm | nn.LayerNorm]) -> None:
    for path, norm in norms.items():
        parent, _, name = path.rpartition(".")
        with torch.device(norm.weight.device):
            setattr(root.get_submodule(parent), name, TrainedNorm(norm))


def layers_of(model: LoadedModel) -> dict[str, TrainedNorm]:
    """Return the trained norms, keyed by module name and sorted by it."""
    found = {
        canonical(component, path): layer
        for component, root in model.components.items()
        for path, layer in root.named_modules()
        if isinstance(layer, TrainedNorm)
    }
    return dict(sorted(found.items()))


def names_in_files(family: ModelFamily, model: LoadedModel) -> dict[str, str]:
    """Return the names that other programs use for the main component's norms, keyed by module name."""
    component = main_component(family)
    paths = [path for path, _ in _norms(model.components[component])]
    return {canonical(component, path): family.lora_file_names.key(component, path) for path in paths}


@torch.no_grad()
def attach(family: ModelFamily, model: LoadedModel, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Attach a file's differences to a model that has no trained norms yet.

    ``tensors``: the differences, keyed by their names in the file. ``path``: the file's path, for errors.

    Raises:
        AdapterError: the tensors do not match the model (see ``fill``).
    """
    if not tensors:
        return
    component, root = main_component(family), model.components[main_component(family)]
    keys = {key: name for name, key in names_in_files(family, model).items()}
    wanted = {keys.get(name.rpartition(".")[0], "") for name in tensors}
    _replace_norms(root, {path: norm for path, norm in _norms(root) if canonical(component, path) in wanted})
    fill(family, model, tensors, path)


@torch.no_grad()
def fill(family: ModelFamily, model: LoadedModel, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Fill the differences of all trained norms from a file. Differences that the file lacks become zero.

    Raises:
        AdapterError: "lora-parts", a tensor matches no norm of the model, or has another size.
    """
    layers, keys = layers_of(model), {key: name for name, key in names_in_files(family, model).items()}
    for layer in layers.values():
        for tensor in layer.trained().values():
            tensor.zero_()
    for name, value in tensors.items():
        key, _, role = name.rpartition(".")
        norm = layers.get(keys.get(key, ""))
        ours = None if norm is None else norm.trained().get(role)
        if ours is None or ours.shape != value.shape:
            what = f"The tensor {name} {list(value.shape)} matches no norm of this model."
            raise file_error("lora-parts", what, path, "Use a LoRA that was made for this model.")
        ours.copy_(value)
