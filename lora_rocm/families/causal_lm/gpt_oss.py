"""gpt-oss with experts that stay in MXFP4, as published. Imported only for gpt-oss models.

Dense weights exist for only one expert at a time, in the forward and in the backward pass.

Dimensions: N tokens, D width, I width of an expert, E experts, K experts of a token, G groups of values, R rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GptOssForCausalLM

from lora_rocm.kernels.mxfp4 import BYTES, GROUP, LARGEST_SCALE, product, unpacked


class PackedExperts(nn.Module):
    """The experts of a block. Tensors have the names and shapes of the published files, and all are frozen.

    Args:
        config: the model's config.
        dense: the transformers module that is replaced.
    """

    def __init__(self, config: Any, dense: Any) -> None:
        super().__init__()
        self.num_experts, width, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.alpha, self.limit = dense.alpha, dense.limit  # not in the config of transformers 5.17
        for name, rows, columns in (("gate_up_proj", 2 * inner, width), ("down_proj", width, inner)):
            if columns % GROUP:
                raise ValueError(f"{columns} columns of {name} are not a multiple of {GROUP}")
            shape = (self.num_experts, rows, columns // GROUP)
            self._place(f"{name}_blocks", torch.empty(*shape, BYTES, dtype=torch.uint8))
            self._place(f"{name}_scales", torch.empty(shape, dtype=torch.uint8))
            self._place(f"{name}_bias", torch.empty(self.num_experts, rows))

    def _place(self, name: str, tensor: Tensor) -> None:
        self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def implausible(self) -> list[str]:
        """Implements ``HoldsCodes.implausible``."""
        scales = [f"{name}_scales" for name in ("gate_up_proj", "down_proj")]
        return [name for name in scales if int(self.get_parameter(name).max()) > LARGEST_SCALE]

    def dense(self, name: str, expert: int, dtype: torch.dtype) -> Tensor:
        """Return the weight [O, I] of one expert; ``name`` is gate_up_proj or down_proj."""
        blocks, scales = self.get_parameter(f"{name}_blocks"), self.get_parameter(f"{name}_scales")
        return unpacked(blocks[expert], scales[expert], dtype)

    def forward(self, states_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts.

        It synchronises with the device, because the host has to know the number of tokens per expert.
        """
        each_token = experts_NK.shape[1]
        output_ND, flat_weights = torch.zeros_like(states_ND), weights_NK.flatten()
        rows_of = experts_NK.flatten().argsort(stable=True).split(self._counts(experts_NK))
        for expert, rows_R in enumerate(rows_of):
            if len(rows_R):
                tokens_R = rows_R // each_token
                found_RD = self._computed(expert, states_ND[tokens_R]) * flat_weights[rows_R, None]
                output_ND.index_add_(0, tokens_R, found_RD.to(output_ND.dtype))
        return output_ND

    def _counts(self, experts_NK: Tensor) -> list[int]:
        """Return the number of rows of each expert; on the meta device, an even distribution."""
        if experts_NK.is_meta:
            each, more = divmod(experts_NK.numel(), self.num_experts)
            return [each + (expert < more) for expert in range(self.num_experts)]
        # Synchronises: the sizes of the experts' products have to be known on the host.
        counts: list[int] = torch.bincount(experts_NK.flatten(), minlength=self.num_experts).tolist()
        return counts

    def _computed(self, expert: int, states_RD: Tensor) -> Tensor:
        both = self._product(states_RD, "gate_up_proj", expert)
        gate, up = both[..., ::2].clamp(max=self.limit), both[..., 1::2].clamp(-self.limit, self.limit)
        return self._product((up + 1) * gate * torch.sigmoid(gate * self.alpha), "down_proj", expert)

    def _product(self, x: Tensor, name: str, expert: int) -> Tensor:
        bias = self.get_parameter(f"{name}_bias")[expert]
        return product(x, partial(self.dense, name, expert), bias)


class PackedGptOss(GptOssForCausalLM):  # type: ignore[misc]  # of transformers, untyped
    """gpt-oss with packed experts."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.experts = PackedExperts(config, layer.mlp.experts)
