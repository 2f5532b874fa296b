"""Adapters: trainable layers in a frozen model, with trained tensors under stable names.

There is one subclass per kind (``kinds.KINDS``). Only a kind's own module knows the names of its tensors; all other
code uses this interface. ``adapter_kind`` has the methods that a kind implements, ``adapter_files`` the methods for
files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftConfig
from torch import Tensor, nn

from lora_rocm.adapters import new_tokens
from lora_rocm.adapters.adapter_kind import OWN, PEFT_NAME
from lora_rocm.adapters.adapter_to_entries import AdapterInFiles
from lora_rocm.adapters.flat_params import FlatWeights
from lora_rocm.adapters.targets import overrides_of
from lora_rocm.errors import AdapterError
from lora_rocm.recipe.adapter_sections import AdapterSection
from lora_rocm.recipe.optim_sections import OptimSection


class Adapter(AdapterInFiles):
    """The adapter methods used by training, validation and previews."""

    @classmethod
    def insert(cls, component: nn.Module, config: PeftConfig) -> None:
        """Attach float32 layers to a component (``insert_layers``) without advancing any global random generator."""
        with torch.random.fork_rng(devices=[]):
            cls.insert_layers(component, config)
        for layer in component.modules():
            if isinstance(layer, cls.layer_type):
                for tensor in cls.trained(layer, PEFT_NAME).values():
                    tensor.data = tensor.data.float()

    @property
    def components(self) -> list[str]:
        """The adapted components, in a fixed order."""
        return sorted({component for component, _, _ in self.modules.values()})

    @torch.no_grad()
    def initialise(self, lora: AdapterSection, seed: int) -> None:
        """Initialise all layers from a seed. Random values are drawn layer by layer, sorted by module name."""
        rng = torch.Generator().manual_seed(seed)
        for name, (_, _, layer) in self.modules.items():
            self.start(name, layer, lora, rng)

    def flatten(
        self, base_dtype: torch.dtype, weight_dtype: torch.dtype, groups: Sequence[Mapping[str, Any]] = ()
    ) -> FlatWeights:
        """Move all trained tensors into flat memory for training, group by group. They stay on their device.

        The layers then compute in the base model's dtype without autocast, or in float32 if the kind needs it.
        """
        leaves = {name: self.leaves[name] for group in groups for name in group["names"]} or self.leaves
        self._flat = FlatWeights(leaves, torch.float32 if self.needs_float32 else base_dtype, weight_dtype)
        self.parameters = self._flat.parameters
        return self._flat

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy values into all trained tensors. Tensors that belong to ``constants`` are ignored.

        Raises:
            AdapterError: the other names or shapes do not match this adapter.
        """
        tensors = {name: tensor for name, tensor in tensors.items() if name not in self.constants}
        wrong = tensors.keys() ^ self.parameters.keys()
        wrong |= {name for name in tensors.keys() - wrong if tensors[name].shape != self.parameters[name].shape}
        if wrong:
            raise AdapterError(
                "adapter-mismatch",
                f"{len(wrong)} weights of this checkpoint do not match the adapter.",
                where=min(wrong),
                fix="Use the same lora section as the run that wrote the checkpoint.",
            )
        for name, parameter in self.parameters.items():
            parameter.copy_(tensors[name])
        if self._flat is not None:
            self._flat.publish()

    @contextmanager
    def using(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Use other weights within the context, such as the average for previews; restore the present ones after it."""
        present = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        try:
            self.load(tensors)
            yield
        finally:
            self.load(present)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Disable the adapter within the context, so that the base model runs alone. New tokens keep their vectors."""
        for _, _, layer in self.modules.values():
            layer.enable_adapters(False)
        try:
            with self._norms_at(0.0):
                yield
        finally:
            for _, _, layer in self.modules.values():
                layer.enable_adapters(True)
            for leaf in self.leaves.values():
                leaf.requires_grad_(True)

    @contextmanager
    def scaled(self, strength: float) -> Iterator[None]:
        """Multiply the adapter's effect by ``strength`` within the context. DoRA magnitudes are not scaled."""
        before = [dict(layer.scaling) for _, _, layer in self.modules.values()]
        try:
            for _, _, layer in self.modules.values():
                layer.scaling |= {name: scale * strength for name, scale in layer.scaling.items() if name in OWN}
            with self._norms_at(strength):
                yield
        finally:
            for (_, _, layer), scaling in zip(self.modules.values(), before, strict=True):
                layer.scaling |= scaling

    @contextmanager
    def _norms_at(self, factor: float) -> Iterator[None]:
        before = {name: norm.strength for name, norm in self.norms.items()}
        try:
            for norm in self.norms.values():
                norm.strength *= factor
            yield
        finally:
            for name, norm in self.norms.items():
                norm.strength = before[name]

    def cast_inputs(self, enabled: bool) -> None:
        """Set whether PEFT casts the input of every adapted layer to the dtype of its trained tensors.

        Without the cast, layers that compute in the base's dtype or under autocast need no copies. A kind that needs
        float32 always casts.
        """
        casts = enabled or self.needs_float32
        for _, _, layer in self.modules.values():
            layer.cast_input_dtype_enabled = casts

    @contextmanager
    def casting_inputs(self) -> Iterator[None]:
        """Cast the inputs of adapted layers within the context, for code that runs without autocast (the sampler)."""
        self.cast_inputs(True)
        try:
            yield
        finally:
            self.cast_inputs(False)

    def groups(self, optim: OptimSection, lora: AdapterSection) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups: one per component and peak learning rate.

        The vectors of new tokens form a separate group. Its "stops" is true: it is trained only until
        ``OptimSection.embedding_until``.

        Raises:
            AdapterError: an override of ``lora.overrides`` is invalid (see ``overrides_of``).
        """
        overrides, found = overrides_of(lora, self.modules), dict[tuple[str, float], list[str]]()
        for name, (component, _, layer) in self.modules.items():
            rate = optim.text_rate if component in self.family.text_components else optim.learning_rate
            override = overrides.get(name)
            rate = rate if override is None else override.learning_rate or rate
            for role in self.trained(layer, PEFT_NAME):
                found.setdefault((component, rate * lora.rate_factor(role)), []).append(f"{name}.{role}")
        for name, norm in self.norms.items():
            names = found.setdefault((name.partition(".")[0], optim.learning_rate), [])
            names += [f"{name}.{role}" for role in norm.trained()]
        if vectors := [name for name in self.parameters if name.startswith(f"{new_tokens.NAME}.")]:
            found[new_tokens.NAME, optim.embedding_rate] = vectors
        return [
            {"names": names, "component": component, "lr": rate, "stops": component == new_tokens.NAME}
            for (component, rate), names in found.items()
        ]
