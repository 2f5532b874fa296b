"""A subclass of PEFT's linear LoRA layer that uses ``lora_linear`` where possible.

PEFT's registration of custom modules (``LoraConfig._register_custom_module``) installs it. This function is not public,
so a test checks that it still works. PEFT still defines the layer's names, scaling and disabling.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear, LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from lora_rocm.errors import AdapterError
from lora_rocm.kernels.adapter_dropout import AdapterDropout
from lora_rocm.kernels.fused_lora import lora_linear
from lora_rocm.kernels.weight_format import PackedLinear, is_packed, product_of


class LoraLinear(Linear):
    """A linear layer with LoRA. It computes with ``lora_linear``, or with PEFT's forward if ``plain`` returns None."""

    def plain(self, x: Tensor) -> tuple[Tensor, Tensor, float] | None:
        """Return (A, B, scale) if ``lora_linear`` can compute the layer for ``x``, else None.

        This requires plain LoRAs and a dense base layer in the dtype of ``x``, or a packed one. Several active adapters
        with the same scale are returned as one adapter with concatenated ranks.
        """
        if self._disable_adapters or self.merged_adapters or _under_autocast(x):
            return None
        names = [self._active_adapter] if isinstance(self._active_adapter, str) else self._active_adapter
        packed = is_packed(self.base_layer)
        known = packed or type(self.base_layer) is nn.Linear
        if not known or len({self.scaling.get(name) for name in names}) != 1:
            return None
        if not packed and self.base_layer.weight.dtype != x.dtype:
            return None
        if not all(self._is_plain(name, x) for name in names):
            return None
        a_RI, b_OR = ([pairs[name].weight for name in names] for pairs in (self.lora_A, self.lora_B))
        scale = self.scaling[names[0]]
        return (a_RI[0], b_OR[0], scale) if len(names) == 1 else (torch.cat(a_RI), torch.cat(b_OR, dim=1), scale)

    def _is_plain(self, name: str, x: Tensor) -> bool:
        if name not in self.lora_A or name in self.lora_variant:
            return False
        a, b = self.lora_A[name], self.lora_B[name]
        kinds = nn.Dropout, AdapterDropout
        dropouts = [part for part in self.lora_dropout.values() if isinstance(part, kinds) and part.p > 0]
        drops = any(dropout.training for dropout in dropouts)
        return b.bias is None and a.weight.dtype == x.dtype and not drops

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = None if args or kwargs or self.base_layer.weight.requires_grad else self.plain(x)
        base = self.base_layer
        if found is None:
            if (
                isinstance(base, PackedLinear) and self.lora_variant
            ):  # PEFT's DoRA would use the packed tensor as the weight
                raise AdapterError(
                    "dora-packed",
                    f"DoRA needs dense weights, but this base is stored as {base.weight_format.name}.",
                    where="lora.use_dora",
                    fix="Train without lora.use_dora, or with a dense base.",
                )
            output: Tensor = super().forward(x, *args, **kwargs)
            return output
        if not isinstance(base, PackedLinear):
            return lora_linear(x, base.weight, base.bias, *found)
        bias = None if base.bias is None else base.bias.to(x.dtype)
        return lora_linear(x, None, bias, *found, product_of([base], x.dtype))


def drop_ranks(layer: LoraLayer, name: str, rank_dropout: float, module_dropout: float) -> None:
    """Apply rank and module dropout to the output of ``A`` of the adapter ``name``.

    The dropout modules are also registered in PEFT's ``lora_dropout``, where ``LoraLinear.plain`` finds them.
    """
    down = layer.lora_A[name]
    axis = 1 if isinstance(down, nn.Conv2d) else -1
    ranks = AdapterDropout(rank_dropout, layer.r[name], axis, per_sample=True)
    for kind, drop in (("ranks", ranks), ("module", AdapterDropout(module_dropout))):
        if drop.p:
            layer.lora_dropout[kind] = drop
            down.register_forward_hook(partial(_dropped, drop))


def _dropped(drop: AdapterDropout, down: nn.Module, args: tuple[Any, ...], h: Tensor) -> Tensor:
    dropped: Tensor = drop(h)
    return dropped


def base_of(layer: nn.Module) -> nn.Module:
    """Return the base layer of an adapted layer. Any other layer is returned unchanged."""
    base: nn.Module = layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer
    return base


def plain_lora(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, float] | None:
    """Return (A, B, scale) if one matrix product can compute this layer's LoRA together with other LoRAs, else None."""
    return layer.plain(x) if isinstance(layer, LoraLinear) else None


def _under_autocast(x: Tensor) -> bool:
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)  # undefined for the meta device


def with_lean_layers(config: LoraConfig) -> LoraConfig:
    """Make PEFT use ``LoraLinear`` for linear layers, and return the config. Call it before PEFT uses the config."""
    config._register_custom_module({nn.Linear: LoraLinear})
    return config
