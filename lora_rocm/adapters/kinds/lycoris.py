"""Common code of LyCORIS' adapter kinds: layers, names of their tensors, and files with two factors.

The layers are PEFT's, but their forward pass draws random numbers only for dropout. PEFT's forward pass draws one in
every call.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from peft import LoHaConfig, PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from lora_rocm.adapters.adapter_kind import PEFT_NAME
from lora_rocm.adapters.base import Adapter
from lora_rocm.adapters.entry import Entry, FileModule
from lora_rocm.adapters.lora_files.key_table import adaptable, canonical
from lora_rocm.adapters.targets import either
from lora_rocm.families.base import LoadedModel, ModelFamily
from lora_rocm.kernels.adapter_dropout import AdapterDropout
from lora_rocm.kernels.weight_format import dense_shape
from lora_rocm.optim.norm_limit import NormLimit
from lora_rocm.recipe.adapter_sections import AdapterSection, ProductSection

Factor = tuple[Tensor, ...]
"""A factor of a product: one matrix, or two matrices that are multiplied."""


def product(factor: Factor) -> Tensor:
    """Return the factor as one matrix."""
    return factor[0] if len(factor) == 1 else factor[0] @ factor[1]


@dataclass(frozen=True)
class FactorNames:
    """Names of the tensors of a kind's two factors, in PEFT's layers and in files.

    prefix: start of the names ("lokr").
    whole: whether a factor may be one matrix ("lokr_w1") as well as a product of two ("lokr_w1_a", "lokr_w1_b").
    """

    prefix: str
    whole: bool = False

    @property
    def factors(self) -> tuple[str, str]:
        return f"{self.prefix}_w1", f"{self.prefix}_w2"

    @property
    def parts(self) -> tuple[str, ...]:
        """All names that the tensors can have."""
        endings = ("", "_a", "_b") if self.whole else ("_a", "_b")
        return tuple(f"{factor}{ending}" for factor in self.factors for ending in endings)

    def split(self, tensors: Mapping[str, Tensor]) -> tuple[Factor, Factor]:
        """Return both factors, assembled from tensors keyed by name.

        Raises:
            ValueError: a factor is missing, or exists both as one matrix and as a product.
        """
        found: list[Factor] = []
        for factor in self.factors:
            whole, parts = factor in tensors, f"{factor}_a" in tensors
            if whole == parts:
                raise ValueError(f"{factor} is missing, or present both as one matrix and as a product")
            found.append((tensors[factor],) if whole else (tensors[f"{factor}_a"], tensors[f"{factor}_b"]))
        return found[0], found[1]

    def named(self, w1: Factor, w2: Factor) -> dict[str, Tensor]:
        """Return the tensors of both factors, keyed by name."""
        return {
            f"{name}{part}": tensor
            for name, factor in zip(self.factors, (w1, w2), strict=True)
            for part, tensor in zip(("",) if len(factor) == 1 else ("_a", "_b"), factor, strict=True)
        }

    def of_file(self, module: FileModule) -> tuple[Factor, Factor]:
        """Return both factors of a file's module, in float32.

        Raises:
            ValueError: a tensor is not a matrix, or the two matrices of a product have different ranks.
        """
        found = self.split({role: tensor.float() for role, tensor in module.parts.items() if role != "alpha"})
        for factor in found:
            if (
                factor[0].ndim < 2
                or 0 in factor[0].shape
                or (len(factor) == 2 and factor[0].shape[1] != len(factor[1]))
            ):
                raise ValueError(
                    f"{module.key} has factors that do not fit each other: {[tuple(tensor.shape) for tensor in factor]}"
                )
        return found


@dataclass
class FactorEntry(Entry):
    """The change of one module's weight: ``scale`` times a product of two factors, float32 on the CPU.

    w1, w2: the two factors.
    scale: factor of the product.
    shape: shape of the weight.

    Set by each kind:
        title: display name of the kind.
        names: names of the kind's tensors.
    """

    w1: Factor
    w2: Factor
    scale: float
    shape: tuple[int, ...]
    title: ClassVar[str]
    names: ClassVar[FactorNames]

    def named(self) -> dict[str, Tensor]:
        """Return the tensors of both factors, keyed by name."""
        return self.names.named(self.w1, self.w2)

    def joined(self, parts: Sequence[tuple[int, Entry]], rows: int) -> Entry:
        return alone(self, parts, self.shape[0] == rows, self.title)


def alone(entry: Entry, parts: Sequence[tuple[int, Entry]], whole: bool, name: str) -> Entry:
    """Implement ``Entry.joined`` for a kind that cannot join the entries of several modules.

    Returns ``entry`` if it is the only part and covers the ``whole`` weight. ``name``: display name of the kind.

    Raises:
        ValueError: there are several parts, or the part does not cover the weight.
    """
    if len(parts) == 1 and whole:
        return entry
    raise ValueError(f"a {name} of several modules cannot be written as one fused weight")


class LycorisLayer(nn.Module):
    """Base class of a kind's layers with their forward pass. It precedes PEFT's layer class in the list of bases.

    input_dropout: dropout that ``change`` applies to its input tensor.
    dropouts: dropouts applied to the change of the output.
    """

    input_dropout: nn.Dropout
    dropouts: nn.Sequential

    def drop(self, config: PeftConfig) -> None:
        """Create the dropouts that a config describes."""
        layer: Any = self
        rates: Any = vars(config)
        self.input_dropout = nn.Dropout(rates.get("input_dropout", 0.0))
        base = layer.get_base_layer()
        axis = 1 if isinstance(base, nn.Conv2d) else -1
        outputs = AdapterDropout(rates["rank_dropout"], dense_shape(base)[0], axis)
        drops = outputs, AdapterDropout(rates["module_dropout"])
        self.dropouts = nn.Sequential(*(drop for drop in drops if drop.p))

    @abstractmethod
    def change(self, x: Tensor, output: Tensor, base: Any) -> Tensor:
        """Return the change of the layer's output at scale 1.

        Args:
            x: the layer's input, cast to the dtype of the trained tensors if inputs are cast.
            output: the base layer's output.
            base: the base layer.
        """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer: Any = self
        output: Tensor = layer.base_layer(x, *args, **kwargs)
        if layer.disable_adapters:
            return output
        dtype = next(
            getattr(layer, name)[PEFT_NAME].dtype for name in layer.adapter_layer_names if getattr(layer, name)
        )
        x = layer._cast_input_dtype(x, dtype)
        change = self.dropouts(self.change(x, output, layer.get_base_layer()))
        adapted: Tensor = output + (change * layer.scaling[PEFT_NAME]).to(output.dtype)
        return adapted


class OutputEntry(Entry):
    """An entry of a kind that multiplies the base weight, so that the change cannot be computed without it.

    shape: shape of the weight.
    """

    shape: tuple[int, ...]

    @property
    def rank(self) -> None:
        return None

    @property
    def needs_weight(self) -> bool:
        return True

    def update(self) -> Tensor:
        """Return zeros: without the base weight, the change is unknown."""
        return torch.zeros(self.shape)

    def norm(self) -> float:
        return 0.0


class OutputLayer(LycorisLayer, BaseTunerLayer):
    """A layer that multiplies the base layer's output; PEFT has no such layers. Its tensors start at zero.

    Changing the weight ``W`` by ``D W`` adds ``D y`` to the output, where ``y`` is the output without the bias. Input
    dropout is applied to ``y``.
    """

    other_param_names = ("r", "alpha", "scaling")

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: PeftConfig, r: int, alpha: float) -> None:
        super().__init__()
        layer: Any = self
        self.base_layer, self._active_adapter = base_layer, adapter_name
        self._disable_adapters, self.merged_adapters = False, list[str]()
        self.r, self.alpha, self.scaling = {adapter_name: r}, {adapter_name: alpha}, {adapter_name: 1.0}
        for name, size in self.sizes(dense_shape(layer.get_base_layer())[0], r).items():
            setattr(self, name, nn.ParameterDict({adapter_name: nn.Parameter(torch.zeros(size))}))
        layer._move_adapter_to_device_of_base_layer(adapter_name)
        layer.set_adapter(layer.active_adapters, inference_mode=config.inference_mode)

    @classmethod
    @abstractmethod
    def sizes(cls, rows: int, r: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors, keyed by name, for a weight with this number of rows and rank ``r``."""

    @abstractmethod
    def changed(self, y: Tensor) -> Tensor:
        """Return the change of the output, of shape [..., O]. ``y``: the base layer's output without its bias."""

    def change(self, x: Tensor, output: Tensor, base: Any) -> Tensor:
        channels = -3 if isinstance(base, nn.Conv2d) else -1
        y = output.movedim(channels, -1)
        y = y if base.bias is None else y - base.bias.to(y.dtype)
        return self.changed(self.input_dropout(y)).movedim(-1, channels)


class LycorisAdapter(Adapter):
    """The layers of one of LyCORIS' kinds. The roles of the tensors are their names in files.

    Set by each kind:
        algorithm: name of the kind in LyCORIS.
        tuner: PEFT's model class, with the kind's layers in its ``layers_mapping``.
    """

    algorithm: ClassVar[str]
    tuner: ClassVar[type[Any]]
    readers = {"kohya": ("comfyui",), "peft": ("peft",)}

    @classmethod
    @abstractmethod
    def smallest(cls, pattern: str) -> PeftConfig:
        """Return a PEFT config that creates layers of minimal size; ``attach`` then replaces their tensors."""

    @classmethod
    def insert_layers(cls, component: nn.Module, config: PeftConfig) -> None:
        cls.tuner(component, config, PEFT_NAME)
        for layer in component.modules():
            if isinstance(layer, LycorisLayer):
                layer.drop(config)

    @classmethod
    def attach(cls, family: ModelFamily, model: LoadedModel, entries: Mapping[str, Any]) -> Self:
        for component, root in model.components.items():
            ours = [path for path, _ in adaptable(root) if canonical(component, path) in entries]
            if ours:
                cls.insert(root, cls.smallest(either(ours)))
        layers = cls(family, model).modules
        for name, entry in entries.items():
            layer = layers[name][2]
            for part in cls.trained(layer, PEFT_NAME):
                del getattr(layer, part)[PEFT_NAME]
            for part, tensor in entry.named().items():
                getattr(layer, part)[PEFT_NAME] = nn.Parameter(tensor, requires_grad=False)
            layer.scaling[PEFT_NAME] = entry.scale
        return cls(family, model)

    @staticmethod
    def trained(layer: Any, name: str) -> dict[str, nn.Parameter]:
        return {part: getattr(layer, part)[name] for part in layer.adapter_layer_names if name in getattr(layer, part)}

    def config_fields(self, layers: Sequence[Any]) -> dict[str, Any]:
        return {"rank_dropout": 0.0, "module_dropout": 0.0, "use_effective_conv2d": False, "init_weights": True}

    def arguments(self) -> dict[str, str]:
        """Return the arguments of LyCORIS' ``ss_network_args``, except the algorithm."""
        return {}

    def network(self) -> dict[str, str]:
        """Return the ``ss_network_`` metadata that LyCORIS itself would write, for kohya's tools."""
        layers = [layer for _, _, layer in self.modules.values()]
        layer = next((layer for layer in layers if layer.scaling[PEFT_NAME] != 1.0), layers[0])
        differs = len({layer.r[PEFT_NAME] for layer in layers}) > 1
        return {
            "ss_network_module": "lycoris.kohya",
            "ss_network_dim": "Dynamic" if differs else str(layer.r[PEFT_NAME]),
            "ss_network_alpha": "Dynamic" if differs else f"{layer.alpha[PEFT_NAME]:g}",
            "ss_network_args": json.dumps({"algo": self.algorithm, **self.arguments()}),
        }


class FactorAdapter(LycorisAdapter):
    """A kind that changes a weight by ``scale`` times a product of its tensors.

    Set by each kind:
        config_type: PEFT's config class.
    """

    config_type: ClassVar[type[PeftConfig]]

    @classmethod
    def config(cls, lora: AdapterSection, pattern: str) -> PeftConfig:
        assert isinstance(lora, ProductSection), "a section of this kind"
        config: Any = cls.config_type(
            r=lora.rank,
            alpha=lora.effective_alpha,  # PEFT divides by the rank; any number works
            target_modules=pattern,
            rank_dropout=lora.rank_dropout,
            module_dropout=lora.module_dropout,
            **cls.options(lora),
        )
        config.input_dropout = lora.dropout
        return config

    @classmethod
    def options(cls, lora: Any) -> dict[str, Any]:
        """Return the PEFT config fields that only this kind has."""
        return {}

    @classmethod
    def smallest(cls, pattern: str) -> PeftConfig:
        return cls.config_type(r=1, alpha=1, target_modules=pattern)

    @staticmethod
    @abstractmethod
    def update_norms(modules: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Return the Frobenius norms of the modules' changes at scale 1, float32 [n].

        ``modules``: n modules of one shape, each with its tensors keyed by role.
        """

    def norm_limit(self, lora: AdapterSection) -> NormLimit | None:
        if lora.max_update_norm is None:
            return None
        modules = [
            ({role: self.parameters[f"{name}.{role}"] for role in self.trained(layer, PEFT_NAME)},
             float(layer.scaling[PEFT_NAME]))
            for name, (_, _, layer) in self.modules.items()
        ]  # fmt: skip
        return NormLimit(modules, lora.max_update_norm, self.update_norms)


class OutputAdapter(LycorisAdapter):
    """A kind with ``OutputLayer`` layers. PEFT's LoHa model inserts them. It cannot be written as a PEFT folder."""

    readers = {"kohya": ("comfyui",)}

    @classmethod
    def smallest(cls, pattern: str) -> LoHaConfig:
        return LoHaConfig(r=1, alpha=0, target_modules=pattern)

    def start(self, name: str, layer: Any, lora: AdapterSection, rng: torch.Generator) -> None:
        """Set the layer's tensors to zero."""
        for tensor in self.trained(layer, PEFT_NAME).values():
            tensor.zero_()

    def fill(self, layer: Any, entry: Any) -> None:
        for part, tensor in entry.named().items():
            self.trained(layer, PEFT_NAME)[part].copy_(tensor)
