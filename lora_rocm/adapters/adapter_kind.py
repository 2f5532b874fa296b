"""The methods that each kind of adapter implements, grouped by the code that calls them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from peft import PeftConfig, inject_adapter_in_model
from torch import Tensor, nn

from lora_rocm.adapters import new_tokens, trained_norms
from lora_rocm.adapters.entry import Entry, FileKind, Form
from lora_rocm.adapters.flat_params import FlatWeights
from lora_rocm.adapters.kinds.lora_start import START
from lora_rocm.adapters.lora_files.key_table import KeyTable, canonical
from lora_rocm.families.base import LoadedModel, ModelFamily
from lora_rocm.optim.norm_limit import NormLimit
from lora_rocm.recipe.adapter_sections import AdapterSection
from lora_rocm.recipe.sections import MAX_RANK

PEFT_NAME = "default"
OWN = (PEFT_NAME, START)
"""PEFT's names for the two adapters in a layer: the trained one, and the frozen start values."""
Reader = Literal["diffusers", "peft", "comfyui"]


class AdapterKind(ABC):
    """The adapted layers of a model, and the operations that depend on the kind.

    modules: maps module name ("unet.mid_block...to_q") to (component, path in the component, PEFT layer), in a fixed
        order.
    norms: maps module name to a norm that is trained with the adapter.
    leaves: maps "<module name>.<role>" to a tensor of the layer, in the same order; "new_tokens.<component>" comes
        last.
    parameters: maps the same names to the trained tensors: the leaves, or after ``flatten`` the master weights.
    constants: maps "<module name>.<role>" to a frozen tensor on the CPU that checkpoints also store. Empty for most
        kinds.

    Set by each kind:
        layer_type: class of its layers.
        files: its file format.
        readers: maps each format that can be written to the programs that load an export back for verification.
    """

    layer_type: ClassVar[type[Any]]
    files: ClassVar[FileKind]
    readers: ClassVar[Mapping[Form, tuple[Reader, ...]]]

    def __init__(self, family: ModelFamily, model: LoadedModel) -> None:
        found = [
            (canonical(component, path), (component, path, layer))
            for component, root in model.components.items()
            for path, layer in root.named_modules()
            if isinstance(layer, self.layer_type) and PEFT_NAME in layer.r
        ]
        self.modules: dict[str, tuple[str, str, Any]] = dict(sorted(found, key=lambda item: item[0]))
        self.family, self.model, self.components_in_model = family, model, model.components
        self.read: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = _read  # a run replaces it with a verified copy
        self.leaves: dict[str, nn.Parameter] = {
            f"{name}.{role}": tensor
            for name, (_, _, layer) in self.modules.items()
            for role, tensor in self.trained(layer, PEFT_NAME).items()
        }
        self.norms = trained_norms.layers_of(model)
        self.leaves |= {f"{n}.{role}": leaf for n, norm in self.norms.items() for role, leaf in norm.trained().items()}
        self.leaves |= {f"{new_tokens.NAME}.{c}": layer.rows_ND for c, layer in new_tokens.layers_of(model).items()}
        self.parameters: dict[str, Tensor] = dict(self.leaves)
        self.constants: dict[str, Tensor] = {}
        self._flat: FlatWeights | None = None
        self._key_tables: dict[bool, KeyTable] = {}  # key: whether the table is for kohya's scripts

    # The start of a run: layers are attached to a model.

    @classmethod
    @abstractmethod
    def config(cls, lora: AdapterSection, pattern: str) -> PeftConfig:
        """Return PEFT's config for those modules of a component that match the regular expression ``pattern``."""

    @classmethod
    def insert_layers(cls, component: nn.Module, config: PeftConfig) -> None:
        """Insert adapter layers into a component, as its PEFT config describes."""
        inject_adapter_in_model(config, component, PEFT_NAME)

    @abstractmethod
    def start(self, name: str, layer: Any, lora: AdapterSection, rng: torch.Generator) -> None:
        """Initialise a new layer so that the model's output is unchanged. Values are drawn on the CPU in float32."""

    def norm_limit(self, lora: AdapterSection) -> NormLimit | None:
        """Return the limiter for ``lora.max_update_norm``, or None if there is no limit. Call it after ``flatten``."""
        return None

    @property
    def needs_float32(self) -> bool:
        """Whether the layers compute in float32 even if the base model has another dtype."""
        return False

    @torch.no_grad()
    def load_constants(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the ``constants`` of a checkpoint. Call it before the layers are moved to a device.

        Raises:
            AdapterError: "adapter-mismatch", the tensors do not match this adapter.
        """
        return None

    # The memory plan: the numbers trained now, and with other settings.

    @classmethod
    @abstractmethod
    def weights_of(cls, lora: AdapterSection, shape: Sequence[int]) -> int:
        """Return the number of trained parameters for a weight of this shape ([out, in] or [out, in, kh, kw])."""

    @classmethod
    def smaller(cls, lora: AdapterSection) -> Iterator[tuple[str, AdapterSection]]:
        """Yield (description, section) for smaller sections, from largest to smallest.

        A description is a text such as "lora.rank to 8".

        A smaller section trains fewer parameters than ``lora``.
        """
        for power in range(MAX_RANK.bit_length()):
            rank = MAX_RANK >> power
            if rank < lora.rank:
                yield f"lora.rank to {rank}", lora.model_copy(update={"rank": rank})

    @classmethod
    def asks_float32(cls, lora: AdapterSection) -> bool:
        """Return whether layers of this recipe section will need float32 (see ``needs_float32``)."""
        return False

    def narrow(self, lora: AdapterSection) -> int:
        """Return the number of layers with more trained parameters than their weight can use."""
        return 0

    def unstarted(self, lora: AdapterSection) -> int:
        """Return the number of layers with more ranks than ``lora.init`` can initialise."""
        return 0

    # Values of a layer.

    @staticmethod
    @abstractmethod
    def trained(layer: Any, name: str) -> dict[str, nn.Parameter]:
        """Return the trained tensors, keyed by role, of the adapter ``name`` in a layer."""

    @staticmethod
    @abstractmethod
    def entry_of(layer: Any, name: str, tensors: Mapping[str, Tensor]) -> Entry:
        """Return the entry of the adapter ``name`` in a layer, at strength 1.

        ``tensors``: the adapter's float32 values, keyed by role.
        """

    @abstractmethod
    def fill(self, layer: Any, entry: Any) -> None:
        """Copy an entry into a layer, with the same effect. Call it only for entries that ``unfit`` accepts."""

    # Files: writing, and checks whether a file fits.

    @classmethod
    @abstractmethod
    def attach(cls, family: ModelFamily, model: LoadedModel, entries: Mapping[str, Entry]) -> Self:
        """Attach layers to the modules of a file's entries, with the same sizes and effect. Return the adapter."""

    @abstractmethod
    def unfit(self, lora: AdapterSection, entries: Mapping[str, Any], path: Path) -> Sequence[tuple[str, str]]:
        """Check whether a file's entries can start this adapter.

        Returns:
            (reason, setting that would allow it) for each obstacle; empty if the entries fit.

        Raises:
            AdapterError: no setting would allow it.
        """

    def lacking_ranks(self, lora: AdapterSection, ranks: Mapping[str, int]) -> list[tuple[str, str]]:
        """Return pairs as in ``unfit`` for layers that have a lower rank than the file needs.

        ``ranks``: the needed rank, keyed by module name.
        """
        lacking: dict[str, tuple[int, int]] = {}
        for name, rank in ranks.items():
            ours = self.modules[name][2].r[PEFT_NAME] if name in self.modules else lora.rank
            key = "lora.rank" if ours == lora.rank else "the module's rank in lora.overrides, or lora.conv_rank,"
            if rank > ours:
                lacking[key] = max(lacking.get(key, (0, 0)), (rank, ours))
        return [
            (f"it has rank {rank}, but the recipe has rank {ours}", f"{key} to {rank}")
            for key, (rank, ours) in lacking.items()
        ]

    @abstractmethod
    def config_fields(self, layers: Sequence[Any]) -> dict[str, Any]:
        """Return the PEFT config fields that these layers determine, except type, rank, alpha and modules."""

    def rank_in_files(self, layer: Any) -> int:
        """Return the rank that a layer has when it is written to a file."""
        return int(layer.r[PEFT_NAME])

    def alpha_in_files(self, layer: Any) -> float:
        """Return the alpha that a PEFT config needs so that PEFT computes this layer's scale."""
        return float(getattr(layer, self.files.parts.config_alpha)[PEFT_NAME])

    @abstractmethod
    def network(self) -> dict[str, str]:
        """Return the ``ss_network_`` metadata of a kohya file, keyed by field name."""

    def reader_notice(self) -> str:
        """Return a notice about a program that cannot read this adapter's files, or "" if none is known."""
        return ""


def _read(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # A copy waits for the device. It is needed on the CPU too, because training changes the tensors in place.
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
