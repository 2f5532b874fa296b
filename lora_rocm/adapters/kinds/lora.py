"""PEFT's LoRA layers, plain or weight-decomposed (DoRA). ``kernels.lora_layer`` computes the linear layers."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from peft import LoraConfig, PeftConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from lora_rocm.adapters.adapter_kind import PEFT_NAME
from lora_rocm.adapters.adapter_to_entries import plain_number
from lora_rocm.adapters.base import Adapter
from lora_rocm.adapters.entry import Form
from lora_rocm.adapters.kinds.lora_entry import LORA, LoraEntry
from lora_rocm.adapters.kinds.lora_start import START, attach_start, cast_start, factors, fill_start, less_start
from lora_rocm.adapters.lora_files.key_table import COMFYUI, SD_SCRIPTS, adaptable, canonical
from lora_rocm.adapters.targets import either
from lora_rocm.errors import AdapterError
from lora_rocm.families.base import LoadedModel, ModelFamily
from lora_rocm.kernels.lora_layer import drop_ranks, with_lean_layers
from lora_rocm.kernels.weight_format import dense_weight, is_packed
from lora_rocm.model_files.adapter_contents import other_axis
from lora_rocm.optim.norm_limit import NormLimit
from lora_rocm.recipe.adapter_sections import AdapterSection, LoraSection

INPUT_SCALE = "dora_input_scale"


@dataclass
class _Config(LoraConfig):  # type: ignore[misc]  # PEFT leaves its type open
    rank_dropout: float = 0.0
    module_dropout: float = 0.0
    takes_off_start: bool = False


class LoraAdapter(Adapter):
    """The LoRA layers of a model. Roles of the tensors: lora_A, lora_B, and magnitude in a DoRA."""

    layer_type = LoraLayer
    files = LORA
    readers = {
        "kohya": ("diffusers", "comfyui"),
        SD_SCRIPTS: ("comfyui",),
        COMFYUI: ("comfyui",),
        "diffusers": ("diffusers",),
        "peft": ("peft",),
    }

    def __init__(self, family: ModelFamily, model: LoadedModel) -> None:
        super().__init__(family, model)
        for _, _, layer in self.modules.values():
            if START in layer.lora_A and is_packed(layer.get_base_layer()):
                cast_start(layer, model.dtype)

    @classmethod
    def config(cls, lora: AdapterSection, pattern: str) -> LoraConfig:
        assert isinstance(lora, LoraSection), "a section of this kind"
        return _Config(
            r=lora.rank,
            lora_alpha=lora.effective_alpha,  # PEFT divides by the rank; any number works
            lora_dropout=lora.dropout,
            use_rslora=lora.use_rslora,
            use_dora=lora.use_dora,
            target_modules=pattern,
            rank_dropout=lora.rank_dropout,
            module_dropout=lora.module_dropout,
            takes_off_start=lora.takes_off_start,
        )

    @classmethod
    def insert_layers(cls, component: nn.Module, config: PeftConfig) -> None:
        assert isinstance(config, LoraConfig), "a config of this kind"
        super().insert_layers(component, with_lean_layers(config))
        if isinstance(config, _Config) and (config.rank_dropout or config.module_dropout):
            for layer in component.modules():
                if isinstance(layer, LoraLayer):
                    drop_ranks(layer, PEFT_NAME, config.rank_dropout, config.module_dropout)
        if isinstance(config, _Config) and config.takes_off_start:
            for layer in component.modules():
                if isinstance(layer, LoraLayer):
                    attach_start(layer, PEFT_NAME)

    @classmethod
    def attach(cls, family: ModelFamily, model: LoadedModel, entries: Mapping[str, Any]) -> Self:
        use_dora = any(entry.magnitude is not None for entry in entries.values())
        for component, root in model.components.items():
            config = config_for(component, root, entries)
            if config is not None:
                config.use_dora = use_dora
                cls.insert(root, config)
        adapter = cls(family, model)
        adapter.start_from(entries)
        with torch.no_grad():
            for name, entry in entries.items():
                if entry.input_magnitude is not None:
                    _scale_inputs(adapter.modules[name][2], entry)
        return adapter

    @classmethod
    def weights_of(cls, lora: AdapterSection, shape: Sequence[int]) -> int:
        assert isinstance(lora, LoraSection), "a section of this kind"
        outputs, inputs = shape[0], math.prod(shape[1:])
        return lora.rank * (outputs + inputs) + (outputs if lora.use_dora else 0)

    @classmethod
    def asks_float32(cls, lora: AdapterSection) -> bool:
        assert isinstance(lora, LoraSection), "a section of this kind"
        return lora.use_dora

    @staticmethod
    def trained(layer: Any, name: str) -> dict[str, nn.Parameter]:
        found = {"lora_A": layer.lora_A[name].weight, "lora_B": layer.lora_B[name].weight}
        if name in layer.lora_magnitude_vector:
            found["magnitude"] = layer.lora_magnitude_vector[name].weight
        return found

    @staticmethod
    def entry_of(layer: Any, name: str, tensors: Mapping[str, Tensor]) -> LoraEntry:
        magnitude = tensors["magnitude"].flatten() if "magnitude" in tensors else None
        return LoraEntry(tensors["lora_A"], tensors["lora_B"], trained_scale(layer, name), magnitude)

    def start(self, name: str, layer: Any, lora: AdapterSection, rng: torch.Generator) -> None:
        """Initialise a layer as ``lora.init`` describes. By default A is Kaiming uniform and B is zero.

        With eva, A begins as in the default, and ``train.input_start`` replaces it later. DoRA magnitudes are the row
        norms of the base weight. Ranks for which ``lora.init`` has no values begin as in the default.
        """
        assert isinstance(lora, LoraSection), "a section of this kind"
        down, up = (torch.empty(pairs[PEFT_NAME].weight.shape) for pairs in (layer.lora_A, layer.lora_B))
        nn.init.kaiming_uniform_(down, a=math.sqrt(5), generator=rng)
        up.zero_()
        if lora.init not in ("default", "eva"):
            # On the CPU in float32, so that a start has the same values on every device.
            weight = dense_weight(layer.get_base_layer()).detach().cpu().float().flatten(1)
            first, last = factors(lora.init, weight, len(down), trained_scale(layer), rng)
            down[: len(first)] = first.reshape(len(first), *down.shape[1:])
            up[:, : len(first)] = last.reshape(len(up), len(first), *up.shape[2:])
        layer.lora_A[PEFT_NAME].weight.copy_(down)
        layer.lora_B[PEFT_NAME].weight.copy_(up)
        if lora.takes_off_start:
            held = fill_start(layer, down, up)
            self.constants |= {f"{name}.{role}": tensor for role, tensor in held.items()}
        if PEFT_NAME in layer.lora_magnitude_vector:
            _set_magnitude(layer, _row_norms(dense_weight(layer.get_base_layer())))

    def linear_downs(self) -> dict[str, Tensor]:
        """Return the A matrices [rank, inputs] of the linear layers, keyed by module name.

        An initialisation that depends on the layers' inputs (eva) fills these matrices.
        """
        found = {name: layer.lora_A[PEFT_NAME].weight for name, (_, _, layer) in self.modules.items()}
        return {name: weight for name, weight in found.items() if weight.ndim == 2}

    def fill(self, layer: Any, entry: LoraEntry) -> None:
        """Copy the entry's effect. The layer may have a different scale than the file, and a higher rank."""
        layer.lora_A[PEFT_NAME].weight[: entry.rank].copy_(entry.down)
        layer.lora_B[PEFT_NAME].weight.zero_()[:, : entry.rank].copy_(entry.up * (entry.scale / trained_scale(layer)))
        if PEFT_NAME in layer.lora_magnitude_vector:
            magnitude = entry.magnitude
            if magnitude is None:  # a plain LoRA in a DoRA layer: magnitudes that make the normalisation neutral
                magnitude = _row_norms(dense_weight(layer.get_base_layer()).cpu() + entry.update())
            _set_magnitude(layer, magnitude)

    def unfit(self, lora: AdapterSection, entries: Mapping[str, Any], path: Path) -> list[tuple[str, str]]:
        assert isinstance(lora, LoraSection), "a section of this kind"
        for name, entry in entries.items():
            if entry.input_magnitude is not None:
                raise other_axis(name, [1, *entry.input_magnitude.shape], path)
        found = self.lacking_ranks(lora, {name: entry.rank for name, entry in entries.items()})
        if not lora.use_dora and any(entry.magnitude is not None for entry in entries.values()):
            found.append(("it is a DoRA", "lora.use_dora to true"))
        return found

    def config_fields(self, layers: Sequence[Any]) -> dict[str, Any]:
        return {
            "use_rslora": bool(layers[0].use_rslora[PEFT_NAME]),
            "use_dora": PEFT_NAME in layers[0].lora_magnitude_vector,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
        }

    def network(self) -> dict[str, str]:
        """Return the ``ss_network_`` metadata of a kohya file, with ``scale * rank`` as its alpha."""
        layers = [layer for _, _, layer in self.modules.values()]
        ranks = {self.rank_in_files(layer) for layer in layers}
        alphas = {plain_number(round(trained_scale(layer) * self.rank_in_files(layer), 6)) for layer in layers}
        arguments = {"dora": "True"} if self.needs_float32 else {}
        arguments |= {"algo": "lora", "train_norm": "True"} if self.norms else {}
        return {
            "ss_network_module": "lycoris.kohya" if self.norms else "networks.lora",
            "ss_network_dim": str(ranks.pop()) if len(ranks) == 1 else "Dynamic",
            "ss_network_alpha": str(alphas.pop()) if len(alphas) == 1 else "Dynamic",
            "ss_network_args": json.dumps(arguments),
        }

    @torch.no_grad()
    def load_constants(self, tensors: Mapping[str, Tensor]) -> None:
        starts = {name for name, (_, _, layer) in self.modules.items() if START in layer.lora_A}
        for name in sorted(starts):
            down, up = tensors.get(f"{name}.start_A"), tensors.get(f"{name}.start_B")
            if down is None or up is None:
                raise AdapterError(
                    "adapter-mismatch",
                    "This checkpoint lacks the initial values of its LoRA, which lora.init needs.",
                    where=name,
                    fix="Use the same lora section as the run that wrote the checkpoint.",
                )
            held = fill_start(self.modules[name][2], down, -up)
            self.constants |= {f"{name}.{role}": tensor for role, tensor in held.items()}

    def entries(self) -> dict[str, Any]:
        found = super().entries()
        held = self.constants
        return {
            name: less_start(entry, {role: held[f"{name}.{role}"] for role in ("start_A", "start_B")})
            if f"{name}.start_A" in held
            else entry
            for name, entry in found.items()
        }

    def rank_in_files(self, layer: Any) -> int:
        return super().rank_in_files(layer) * (2 if START in layer.lora_A else 1)

    def alpha_in_files(self, layer: Any) -> float:
        if START not in layer.lora_A:
            return super().alpha_in_files(layer)
        rank = self.rank_in_files(layer)
        return trained_scale(layer) * (math.sqrt(rank) if layer.use_rslora[PEFT_NAME] else rank)

    def norm_limit(self, lora: AdapterSection) -> NormLimit | None:
        if lora.max_update_norm is None:
            return None
        pairs = [
            ({role: self.parameters[f"{name}.{role}"] for role in ("lora_A", "lora_B")}, trained_scale(layer))
            for name, (_, _, layer) in self.modules.items()
        ]
        return NormLimit(pairs, lora.max_update_norm)

    def entries_in(self, file_format: Form) -> Mapping[str, LoraEntry]:
        entries: dict[str, LoraEntry] = self.entries()
        if file_format != COMFYUI or any(entry.up.is_meta for entry in entries.values()):
            return entries
        return {
            name: entry.of_base_norm(dense_weight(self.modules[name][2].get_base_layer()).cpu())
            for name, entry in entries.items()
        }  # entries are on the CPU, so each weight is copied there

    @property
    def needs_float32(self) -> bool:
        """Whether the layers are DoRAs, which need float32: PEFT computes their norms in the dtype of the input."""
        return any(layer.lora_magnitude_vector for _, _, layer in self.modules.values())

    def narrow(self, lora: AdapterSection) -> int:
        """Return the number of layers with fewer inputs or outputs than the rank."""
        weights = (self.trained(layer, PEFT_NAME) for _, _, layer in self.modules.values())
        return sum(min(found["lora_A"][0].numel(), len(found["lora_B"])) < len(found["lora_A"]) for found in weights)

    def unstarted(self, lora: AdapterSection) -> int:
        """Return the number of layers with more ranks than ``lora.init`` can initialise.

        pissa and olora can initialise min(inputs, outputs) ranks, and eva one rank per input.
        """
        assert isinstance(lora, LoraSection), "a section of this kind"
        if lora.reads_inputs:
            return sum(weight.shape[1] < weight.shape[0] for weight in self.linear_downs().values())
        return self.narrow(lora) if lora.takes_off_start else 0


def config_for(component: str, root: nn.Module, entries: Mapping[str, LoraEntry]) -> LoraConfig | None:
    """Return PEFT's config for a component's layers with ``entries``, at scale 1; None if it has no entries."""
    names = {path: canonical(component, path) for path, _ in adaptable(root)}
    ranks = {path: entries[name].rank for path, name in names.items() if name in entries}
    if not ranks:
        return None
    rank = Counter(ranks.values()).most_common(1)[0][0]
    others = {f"^{re.escape(module)}": r for module, r in ranks.items() if r != rank}
    patterns = {"rank_pattern": others, "alpha_pattern": dict(others)}
    return with_lean_layers(LoraConfig(r=rank, lora_alpha=rank, target_modules=either(ranks), **patterns))


def trained_scale(layer: LoraLayer, name: str = PEFT_NAME) -> float:
    """Return the factor of ``B @ A`` at strength 1: alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
    rank = layer.r[name]
    return float(layer.lora_alpha[name] / (math.sqrt(rank) if layer.use_rslora[name] else rank))


def _scale_inputs(layer: Any, entry: LoraEntry) -> None:
    """Apply the magnitudes of a DoRA that normalises per input; PEFT's layers do not support them.

    Scaling the weight's columns equals scaling the input: W diag(c) x = W (c x). The factors c are registered as a
    buffer, so they move with the layer's weights.
    """
    base = layer.get_base_layer()
    factors = entry.input_scale(dense_weight(base).cpu())
    layer.register_buffer(INPUT_SCALE, factors.view(-1, 1, 1) if isinstance(base, nn.Conv2d) else factors)
    layer.register_forward_pre_hook(_scaled_input)


def _scaled_input(layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    x, *others = args
    factors: Tensor = getattr(layer, INPUT_SCALE)
    return ((x * factors).to(x.dtype), *others)


def _set_magnitude(layer: Any, magnitude_O: Tensor) -> None:
    weight = layer.lora_magnitude_vector[PEFT_NAME].weight
    weight.copy_(magnitude_O.reshape(weight.shape))


def _row_norms(weight: Tensor) -> Tensor:
    """Return the norms of the output rows, float32 [out]. In PEFT's bf16 they would be off by up to 0.4 %."""
    norms: Tensor = weight.float().flatten(1).norm(dim=1)
    return norms
