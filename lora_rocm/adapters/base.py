"""Base class of adapters: layers in a frozen model, their trained tensors by stable names, and their values.

There is one subclass per kind (``kinds.KINDS``). Only a kind's own module knows its tensors by name; all other code
uses this interface.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from peft import PeftConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from lora_rocm.adapters import new_tokens, trained_norms
from lora_rocm.adapters.entry import Entry, FileKind, Form
from lora_rocm.adapters.flat_params import FlatWeights
from lora_rocm.adapters.lora_start import START
from lora_rocm.adapters.module_names import SD_SCRIPTS, KeyTable, canonical
from lora_rocm.adapters.targets import overrides_of
from lora_rocm.errors import AdapterError
from lora_rocm.families.base import LoadedModel, ModelFamily
from lora_rocm.optim.norm_limit import NormLimit
from lora_rocm.recipe.adapter_sections import AdapterSection
from lora_rocm.recipe.optim_sections import OptimSection
from lora_rocm.recipe.sections import MAX_RANK

PEFT_NAME = "default"
OWN = (PEFT_NAME, START)
"""PEFT's names of what belongs to the adapter in a layer."""
Reader = Literal["diffusers", "peft", "comfyui"]


class Adapter(ABC):
    """The adapted layers of a model.

    modules: module name ("unet.mid_block...to_q") -> (component, path in the component, PEFT layer), in a fixed order.
    norms: module name -> norm that is trained beside the adapter.
    leaves: "<module name>.<role>" -> tensor in its layer, in the same order; then "new_tokens.<component>".
    parameters: the same names -> trained tensors: the leaves, or the masters after ``flatten``.
    constants: "<module name>.<role>" -> what a checkpoint keeps beside them, on the CPU; most kinds have none.

    Set by each kind:
        layer_type: class of its layers.
        files: its file format.
        readers: form -> programs that load an export back for verification; a missing form cannot be written.
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
        self._key_tables: dict[bool, KeyTable] = {}  # by whether they are of the form "kohya"

    # Implemented by each kind.

    @classmethod
    @abstractmethod
    def config(cls, lora: AdapterSection, pattern: str) -> PeftConfig:
        """Return PEFT's config for the modules of a component that match a regular expression."""

    @classmethod
    @abstractmethod
    def attach(cls, family: ModelFamily, model: LoadedModel, entries: Mapping[str, Entry]) -> Adapter:
        """Put in layers with the effect of a file's entries, with the file's own modules and sizes."""

    @classmethod
    @abstractmethod
    def weights_of(cls, lora: AdapterSection, shape: Sequence[int]) -> int:
        """Return how many numbers are trained for a weight of this shape ([out, in] or [out, in, kh, kw])."""

    @classmethod
    def smaller(cls, lora: AdapterSection) -> Iterator[tuple[str, AdapterSection]]:
        """Yield (words such as "lora.rank to 8", section) for settings that train fewer numbers, mildest first."""
        for power in range(MAX_RANK.bit_length()):
            rank = MAX_RANK >> power
            if rank < lora.rank:
                yield f"lora.rank to {rank}", lora.model_copy(update={"rank": rank})

    @classmethod
    def asks_float32(cls, lora: AdapterSection) -> bool:
        """Return whether a recipe's layers will compute in float32 on a base of another dtype (``needs_float32``)."""
        return False

    @staticmethod
    @abstractmethod
    def trained(layer: Any, name: str) -> dict[str, nn.Parameter]:
        """Return role -> trained tensor of a layer's adapter ``name``."""

    @staticmethod
    @abstractmethod
    def entry_of(layer: Any, name: str, tensors: Mapping[str, Tensor]) -> Entry:
        """Return the entry of a layer's adapter at strength 1. ``tensors``: role -> float32 value."""

    @abstractmethod
    def start(self, name: str, layer: Any, lora: AdapterSection, rng: torch.Generator) -> None:
        """Initialise a new layer so that it changes nothing; values are drawn on the CPU in float32."""

    @abstractmethod
    def fill(self, layer: Any, entry: Any) -> None:
        """Write an entry that passed ``unfit`` into a layer, with the same effect."""

    @abstractmethod
    def unfit(self, lora: AdapterSection, entries: Mapping[str, Any], path: Path) -> Sequence[tuple[str, str]]:
        """Return why a file's entries cannot start this adapter: (reason, setting that would allow it) pairs.

        Raises:
            AdapterError: no setting would allow it.
        """

    @abstractmethod
    def config_fields(self, layers: Sequence[Any]) -> dict[str, Any]:
        """Return the fields of these layers' PEFT config besides type, rank, alpha and modules."""

    @abstractmethod
    def network(self) -> dict[str, str]:
        """Return the ``ss_network_`` metadata of a kohya file."""

    @property
    def needs_float32(self) -> bool:
        """Whether the layers compute in float32 on a base of another dtype."""
        return False

    def norm_limit(self, lora: AdapterSection) -> NormLimit | None:
        """Return what keeps the modules' updates within ``lora.max_update_norm``, once the weights are flat."""
        return None

    def lacking_ranks(self, lora: AdapterSection, ranks: Mapping[str, int]) -> list[tuple[str, str]]:
        """Return, as ``unfit``, the layers whose rank is below what a file needs. ``ranks``: module name -> needed."""
        lacking: dict[str, tuple[int, int]] = {}
        for name, rank in ranks.items():
            ours = self.modules[name][2].r[PEFT_NAME] if name in self.modules else lora.rank
            key = "lora.rank" if ours == lora.rank else "its own rank in lora.overrides, or lora.conv_rank,"
            if rank > ours:
                lacking[key] = max(lacking.get(key, (0, 0)), (rank, ours))
        return [
            (f"it has rank {rank}, the recipe asks for rank {ours}", f"{key} to {rank}")
            for key, (rank, ours) in lacking.items()
        ]

    def narrow(self, lora: AdapterSection) -> int:
        """Return how many layers have more trained numbers than their weight can use."""
        return 0

    def reader_notice(self) -> str:
        """Which program will refuse the files of this adapter, as sentences; empty if none is known to."""
        return ""

    def unstarted(self, lora: AdapterSection) -> int:
        """Return how many layers have ranks for which ``lora.init`` has no numbers."""
        return 0

    @classmethod
    def put(cls, component: nn.Module, config: PeftConfig) -> None:
        """Put layers into a component."""
        inject_adapter_in_model(config, component, PEFT_NAME)

    # Shared by all kinds.

    def peft_config(self, component: str) -> dict[str, Any]:
        """Return the PEFT config of one component, with the fields that every version of PEFT knows.

        Module names omit ``text_model``; PEFT's suffix matching accepts that with every version of transformers.
        """
        layers = {n.removeprefix(component + "."): layer for n, (c, _, layer) in self.modules.items() if c == component}
        field = self.files.parts.config_alpha
        ranks = {name: self.rank_in_files(layer) for name, layer in layers.items()}
        alphas = {name: plain_number(self.alpha_in_files(layer)) for name, layer in layers.items()}
        rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
        return {
            "peft_type": self.files.parts.peft_type,
            "r": rank,
            field: alpha,
            "rank_pattern": {name: value for name, value in ranks.items() if value != rank},
            "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
            "target_modules": sorted(layers),
            **self.config_fields(list(layers.values())),
            "inference_mode": True,
        }

    def rank_in_files(self, layer: Any) -> int:
        """Return the rank of a layer's entry."""
        return int(layer.r[PEFT_NAME])

    def alpha_in_files(self, layer: Any) -> float:
        """Return the alpha with which PEFT gives a layer's entry its scale."""
        return float(getattr(layer, self.files.parts.config_alpha)[PEFT_NAME])

    @torch.no_grad()
    def load_constants(self, tensors: Mapping[str, Tensor]) -> None:
        """Load ``constants`` of a checkpoint. Call it before the layers are sent to a device.

        Raises:
            AdapterError: "adapter-mismatch", they are not those of this adapter.
        """
        return None

    def key_table(self, form: Form) -> KeyTable:
        """Return the keys of a file that is written in the form "kohya" or "sd-scripts"; each table is made once."""
        rows_of = self.family.scripts_rows if form == SD_SCRIPTS else None
        if (rows_of is None) not in self._key_tables:
            self._key_tables[rows_of is None] = KeyTable(self.family, self.components_in_model, rows_of)
        return self._key_tables[rows_of is None]

    @classmethod
    def insert(cls, component: nn.Module, config: PeftConfig) -> None:
        """``put`` layers in float32 into a component without advancing any global random generator."""
        with torch.random.fork_rng(devices=[]):
            cls.put(component, config)
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
        """Initialise all layers from a seed, drawing in the order of their names."""
        rng = torch.Generator().manual_seed(seed)
        for name, (_, _, layer) in self.modules.items():
            self.start(name, layer, lora, rng)

    def flatten(
        self, base_dtype: torch.dtype, weight_dtype: torch.dtype, groups: Sequence[Mapping[str, Any]] = ()
    ) -> FlatWeights:
        """Move all trained tensors into flat memory for training, on their present device, group by group.

        The layers compute in the base's dtype, without autocast, unless the kind needs float32.
        """
        leaves = {name: self.leaves[name] for group in groups for name in group["names"]} or self.leaves
        self._flat = FlatWeights(leaves, torch.float32 if self.needs_float32 else base_dtype, weight_dtype)
        self.parameters = self._flat.parameters
        return self._flat

    def state(self) -> dict[str, Tensor]:
        """Return a copy of every trained tensor, and ``constants``, on the CPU."""
        return {**self.read(self.parameters), **self.constants}

    @contextmanager
    def shapes_only(self) -> Iterator[None]:
        """Inside the context ``state``, and all made of it, is on the meta device: shapes and dtypes alone."""
        before = self.read, self.constants
        self.read, self.constants = _on_meta, _on_meta(self.constants)
        try:
            yield
        finally:
            self.read, self.constants = before

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load every trained tensor in place; ``constants`` among them are passed over.

        Raises:
            AdapterError: names or shapes are not this adapter's.
        """
        tensors = {name: tensor for name, tensor in tensors.items() if name not in self.constants}
        wrong = tensors.keys() ^ self.parameters.keys()
        wrong |= {name for name in tensors.keys() - wrong if tensors[name].shape != self.parameters[name].shape}
        if wrong:
            raise AdapterError(
                "adapter-mismatch",
                f"{len(wrong)} weights of this checkpoint are not those of the adapter.",
                where=min(wrong),
                fix="The lora section of the recipe must be the one that the checkpoint was made with.",
            )
        for name, parameter in self.parameters.items():
            parameter.copy_(tensors[name])
        if self._flat is not None:
            self._flat.publish()

    @contextmanager
    def using(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Use other weights inside the context (the average, for previews and export); restore them after it."""
        present = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        try:
            self.load(tensors)
            yield
        finally:
            self.load(present)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Disable the adapter inside the context: the base model alone. New tokens keep their vectors."""
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
        """Multiply the adapter's effect by ``strength`` inside the context. A DoRA's magnitudes stay as trained."""
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

    def norm_tensors(self) -> dict[str, Tensor]:
        """Return the trained norms as a file has them, float32 on the CPU: "<key of the file>.<role>" -> difference."""
        keys = trained_norms.names_in_files(self.family, self.model) if self.norms else {}
        state = self.state() if self.norms else {}
        return {
            f"{keys[name]}.{role}": state[f"{name}.{role}"].float()
            for name, norm in self.norms.items()
            for role in norm.trained()
        }

    def cast_inputs(self, enabled: bool) -> None:
        """Set whether PEFT casts the input of every adapted layer to the dtype of its trained tensors.

        Without the cast, layers that compute in the base's dtype or under autocast avoid copies. A kind that needs
        float32 always casts.
        """
        casts = enabled or self.needs_float32
        for _, _, layer in self.modules.values():
            layer.cast_input_dtype_enabled = casts

    @contextmanager
    def casting_inputs(self) -> Iterator[None]:
        """Cast inputs inside the context, for code that runs without autocast (the sampler)."""
        self.cast_inputs(True)
        try:
            yield
        finally:
            self.cast_inputs(False)

    def groups(self, optim: OptimSection, lora: AdapterSection) -> list[dict[str, Any]]:
        """Return the optimizer parameter groups: weights of one component with one peak learning rate, and new tokens.

        "stops" says which ends with ``OptimSection.embedding_until``.

        Raises:
            AdapterError: as ``overrides_of``.
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

    def entries(self) -> dict[str, Any]:
        """Return the adapter at strength 1 as values: module name -> entry, on the CPU."""
        state = {name: tensor.float() for name, tensor in self.state().items()}
        return {
            name: self.entry_of(
                layer, PEFT_NAME, {role: state[f"{name}.{role}"] for role in self.trained(layer, PEFT_NAME)}
            )
            for name, (_, _, layer) in self.modules.items()
        }

    def entries_in(self, form: Form) -> Mapping[str, Entry]:
        """Return ``entries`` as a file of this form has them."""
        return self.entries()

    @torch.no_grad()
    def start_from(self, entries: Mapping[str, Entry]) -> None:
        """Load the effect of entries that fit; modules without an entry keep their neutral start."""
        for name, entry in entries.items():
            self.fill(self.modules[name][2], entry)


def plain_number(value: float) -> int | float:
    """Return a whole number as int, without its ".0"."""
    return int(value) if float(value).is_integer() else float(value)


def loaded_entry(kind: type[Adapter], layer: BaseTunerLayer) -> Entry:
    """Return the entry that another program's loader put into a layer of this kind.

    Raises:
        ValueError: the loader made the layer and left it empty.
    """
    (active,) = layer.active_adapters
    tensors = kind.trained(layer, active)
    if any(tensor.is_meta for tensor in tensors.values()):
        raise ValueError("a layer was made but not filled")
    return kind.entry_of(layer, active, {role: tensor.detach().float() for role, tensor in tensors.items()})


def _on_meta(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}


def _read(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
