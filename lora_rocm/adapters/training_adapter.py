"""A frozen LoRA that is active only during training (``model.training_adapter``).

Training a base model that was distilled to few steps breaks the distillation. The training adapter undoes the
distillation during training, so the trained LoRA does not learn to undo it. The trained LoRA is later used without the
training adapter.

The training adapter is a second low-rank pair next to the trained one. It is not merged into the base weights, for
three reasons: a quantised weight keeps its rounding, fingerprints and seals stay valid, and removing the adapter is
exact. The pairs are buffers, so they are not trained. They are transferred, checked, offloaded and counted like frozen
weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from lora_rocm.adapters.adapter_kind import PEFT_NAME
from lora_rocm.adapters.entry import Notify
from lora_rocm.adapters.kinds.lora import config_for
from lora_rocm.adapters.kinds.lora_entry import LORA, LoraEntry
from lora_rocm.adapters.kinds.lora_start import START
from lora_rocm.adapters.lora_files.key_table import canonical
from lora_rocm.adapters.lora_files.lora_reader import read_for_model
from lora_rocm.errors import AdapterError
from lora_rocm.families.base import LoadedModel, ModelFamily
from lora_rocm.foundation.quiet import EVERYTHING

NAME = "training_adapter"
"""Name of the training adapter in PEFT's layers. The names of its tensors contain it."""


class TrainingAdapter:
    """The training adapter in a model.

    layers: all adapted layers of the components that have a training adapter.
    """

    def __init__(self, layers: Sequence[BaseTunerLayer]) -> None:
        self._layers = layers
        self._use([PEFT_NAME, START, NAME])

    @contextmanager
    def absent(self) -> Iterator[None]:
        """Disable the training adapter within the context, because users of the trained LoRA do not have it."""
        self._use([PEFT_NAME, START])
        try:
            yield
        finally:
            self._use([PEFT_NAME, START, NAME])

    def _use(self, names: list[str]) -> None:
        for layer in self._layers:
            layer.set_adapter([name for name in names if name in layer.r])


def attach_training_adapter(
    family: ModelFamily, model: LoadedModel, path: str | None, notify: Notify = lambda text: None
) -> TrainingAdapter:
    """Attach a training adapter from a file to a model that already has the adapter to train.

    The model may be on the meta device. ``path``: path of the file, or None for no training adapter.

    Returns:
        The training adapter; it has no layers if ``path`` is None.

    Raises:
        AdapterError: the file is missing, damaged, not a LoRA, for another model, or adapts a part that is not loaded.
    """
    if path is None:
        return TrainingAdapter([])
    entries = _entries(family, model, Path(path), notify)
    layers = list[BaseTunerLayer]()
    for component, root in model.components.items():
        config = config_for(component, root, entries)
        if config is None:
            continue
        trained = [tensor for tensor in root.parameters() if tensor.requires_grad]
        # PEFT warns about a second adapter
        with torch.device(model.device), torch.random.fork_rng(devices=[]), EVERYTHING:
            inject_adapter_in_model(config, root, NAME)
        for tensor in trained:  # PEFT freezes everything except its own layers
            tensor.requires_grad_(True)
        for name, layer in root.named_modules():
            if isinstance(layer, BaseTunerLayer):
                layers.append(layer)
            if isinstance(layer, LoraLayer) and NAME in layer.lora_A:
                _fill(layer, entries[canonical(component, name)], model.dtype)
    return TrainingAdapter(layers)


def _fill(layer: LoraLayer, entry: LoraEntry, dtype: torch.dtype) -> None:
    """Write an entry into a layer's pair of training factors.

    The values are rescaled, because both pairs of the layer have the trained pair's scale.
    """
    scale = layer.scaling[NAME] = layer.scaling.get(PEFT_NAME, 1.0)
    for pairs, values in ((layer.lora_A, entry.down), (layer.lora_B, entry.up * (entry.scale / scale))):
        pair: nn.Module = pairs[NAME]
        weight = pair.get_parameter("weight")
        del pair.weight
        pair.register_buffer("weight", torch.empty_like(weight, dtype=dtype).copy_(values))


def _entries(family: ModelFamily, model: LoadedModel, path: Path, notify: Notify) -> dict[str, LoraEntry]:
    files, entries = read_for_model(family, model, path, notify)
    where = f"model.training_adapter: {path}"
    plain = {name: entry for name, entry in entries.items() if isinstance(entry, LoraEntry) and not entry.needs_weight}
    if len(plain) < len(entries):
        what = f"The training adapter is a {'DoRA' if files is LORA else files.name}, but it has to be a LoRA."
        raise AdapterError("training-adapter-kind", what, where=where, fix="Use a LoRA file.")
    beyond = [name for name in entries if name.split(".")[0] not in model.components]
    if beyond:
        raise AdapterError(
            "training-adapter-text",
            f"The training adapter adapts the text encoders ({beyond[0]}), which are not part of training.",
            where=where,
            fix="Set lora.train_text_encoder: true, or use a file without text encoders.",
        )
    return plain
