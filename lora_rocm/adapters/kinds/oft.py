"""LyCORIS' diag-oft (arXiv 2306.07280): rotates blocks of each weight's outputs, ``W' = R W``.

``R = (I + Q) (I - Q)^-1`` is orthogonal, because ``Q = B - B^T`` is skew-symmetric. The trained blocks ``B`` start at
zero. LyCORIS limits the norm of ``Q`` to ``constraint`` times the number of outputs, but ComfyUI limits it to the
constraint itself. Files therefore store the already limited blocks and the constraint 0, which every program reads
alike. PEFT's OFT rotates the inputs, so PEFT's files differ.

Dimensions: a weight [K * N, I, ...] has K blocks [N, N].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoHaConfig, LoHaModel, PeftConfig
from peft.tuners.lokr.layer import factorization
from torch import Tensor, nn

from lora_rocm.adapters.adapter_kind import PEFT_NAME
from lora_rocm.adapters.entry import (
    ARITHMETIC,
    CANCELLATION,
    Entry,
    FileKind,
    FileModule,
    Form,
    norm_of,
    other_shape,
    rounded,
)
from lora_rocm.adapters.kinds.lycoris import LycorisAdapter, OutputAdapter, OutputEntry, OutputLayer, alone
from lora_rocm.errors import AdapterError
from lora_rocm.kernels.weight_format import dense_shape
from lora_rocm.model_files.adapter_parts import kind_named
from lora_rocm.recipe.adapter_sections import AdapterSection, OftSection

BLOCKS = "oft_blocks"


def _skew(blocks_KNN: Tensor) -> Tensor:
    return blocks_KNN - blocks_KNN.transpose(1, 2)


def _limited(blocks_KNN: Tensor, limit: float) -> Tensor:
    """Return the blocks, scaled so that the norm of ``Q`` is at most ``limit``. A limit of 0 means no limit."""
    if not limit:
        return blocks_KNN
    norm: Tensor = torch.linalg.vector_norm(_skew(blocks_KNN)) + 1e-8  # blocks start at zero
    return blocks_KNN * (limit / norm).clamp(max=1.0)


def _turn(blocks_KNN: Tensor) -> Tensor:
    """Return ``R - I`` of each block, float32 [K, N, N]. The two factors of R commute, so their order is irrelevant."""
    q_KNN, eye_NN = _skew(blocks_KNN), torch.eye(blocks_KNN.shape[1], device=blocks_KNN.device)
    turn: Tensor = torch.linalg.solve_ex(eye_NN - q_KNN, 2 * q_KNN)[0]  # (I + Q) - (I - Q)
    return turn


@dataclass
class OftEntry(OutputEntry):
    """One module's change ``scale * (R - I) W``: float32 on the CPU.

    blocks: the trained blocks ``B``, of shape [K, N, N].
    scale: factor of the change (1: as trained).
    shape: shape of the weight.
    """

    blocks: Tensor
    scale: float
    shape: tuple[int, ...]

    def effect(self, weight: Tensor) -> Tensor:
        rows_KNI = weight.reshape(*self.blocks.shape[:2], -1)
        change: Tensor = (self.scale * _turn(self.blocks).transpose(1, 2) @ rows_KNI).reshape(self.shape)
        return change

    def allowance(self, dtype: torch.dtype, weight: Tensor | None = None) -> float:
        """Return an error bound.

        R's error is at most four times B's error: Q doubles it, and R's derivative is at most 2.
        """
        if weight is None:
            return 0.0
        size, off = rounded(self.blocks, dtype)
        largest = float(weight.reshape(len(self.blocks), -1).norm(dim=1).max())
        return 4 * abs(self.scale) * (off + ARITHMETIC * size) * largest + CANCELLATION * norm_of(weight)

    def named(self) -> dict[str, Tensor]:
        """Return the trained tensor, keyed by its name in the layer."""
        return {BLOCKS: self.blocks}

    def tensors(self, file_format: Form, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of a file, keyed by name.

        LyCORIS stores the constraint under the name "alpha"; lora-rocm writes 0.
        """
        return {BLOCKS: self.blocks.to(dtype), "alpha": torch.tensor(0.0)}

    def rows(self, first: int, count: int) -> OftEntry:
        height = self.blocks.shape[1]
        if first % height or count % height:
            raise ValueError("an OFT of a fused weight can be split into modules only between blocks")
        part = slice(first // height, (first + count) // height)
        return replace(self, blocks=self.blocks[part], shape=(count, *self.shape[1:]))

    def joined(self, parts: Sequence[tuple[int, Entry]], rows: int) -> Entry:
        return alone(self, parts, self.shape[0] == rows, "OFT")


def _entry(name: str, module: FileModule, shape: tuple[int, ...], path: Path) -> OftEntry:
    """Build the entry of one module.

    Raises:
        AdapterError: the blocks do not fit this layer.
    """
    blocks = module.parts[BLOCKS].float()
    rows = blocks.shape[0] * blocks.shape[1]
    if rows != shape[0]:
        raise other_shape(name, (rows, math.prod(shape[1:])), shape, path)
    return OftEntry(blocks, 1.0, shape)


OFT = FileKind(kind_named("OFT"), _entry)


class OftLayer(OutputLayer):
    """A layer that rotates its outputs block by block.

    constraint: limit of the norm of ``Q`` (see the module), divided by the number of outputs; 0 means no limit.
    """

    adapter_layer_names = (BLOCKS,)
    constraint = 0.0

    @classmethod
    def sizes(cls, rows: int, r: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of the blocks by LyCORIS' rule.

        A block has at most ``r`` rows, and there are at least as many blocks as rows in a block.
        """
        height, count = sorted(factorization(rows, r))
        return {BLOCKS: (count, height, height)}

    def blocks(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the blocks in float32, limited by the constraint."""
        blocks = tensors[BLOCKS].float()
        return _limited(blocks, self.constraint * blocks.shape[0] * blocks.shape[1])

    def changed(self, y: Tensor) -> Tensor:
        turn_KNN = _turn(self.blocks(LycorisAdapter.trained(self, PEFT_NAME))).to(y.dtype)
        return torch.einsum("knm,...kn->...km", turn_KNN, y.unflatten(-1, turn_KNN.shape[:2])).flatten(-2)


class _OftModel(LoHaModel):
    """PEFT's LoHa model, but with ``OftLayer`` as its layer. LoHa's config has all the fields that OFT needs."""

    prefix = "oft_"
    tuner_layer_cls = OftLayer
    layers_mapping = {nn.Linear: OftLayer, nn.Conv2d: OftLayer}


class OftAdapter(OutputAdapter):
    """The OFT layers of a model, with one trained tensor each, in the role "oft_blocks"."""

    algorithm = "diag-oft"
    layer_type = OftLayer
    tuner = _OftModel
    files = OFT

    @classmethod
    def config(cls, lora: AdapterSection, pattern: str) -> LoHaConfig:
        assert isinstance(lora, OftSection), "a section of this kind"
        config = LoHaConfig(r=lora.rank, alpha=0, target_modules=pattern)
        config.input_dropout, config.constraint = lora.dropout, lora.constraint
        return config

    @classmethod
    def insert_layers(cls, component: nn.Module, config: PeftConfig) -> None:
        super().insert_layers(component, config)
        for layer in component.modules():
            if isinstance(layer, OftLayer):
                layer.constraint = vars(config).get("constraint", 0.0)

    @classmethod
    def weights_of(cls, lora: AdapterSection, shape: Sequence[int]) -> int:
        return math.prod(OftLayer.sizes(shape[0], lora.rank)[BLOCKS])

    @staticmethod
    def entry_of(layer: Any, name: str, tensors: Mapping[str, Tensor]) -> OftEntry:
        return OftEntry(layer.blocks(tensors), float(layer.scaling[name]), dense_shape(layer.get_base_layer()))

    def unfit(self, lora: AdapterSection, entries: Mapping[str, Any], path: Path) -> list[tuple[str, str]]:
        def fits(rank: int | None) -> bool:
            """Return whether the layers, at this rank or (None) at their own ranks, have the file's block sizes."""
            return all(
                entry.blocks.shape == OftLayer.sizes(entry.shape[0], rank or ranks.get(name, lora.rank))[BLOCKS]
                for name, entry in entries.items()
            )

        ranks = {name: int(layer.r[PEFT_NAME]) for name, (_, _, layer) in self.modules.items()}
        size = max(entry.blocks.shape[1] for entry in entries.values())
        if fits(None):
            return []
        if lora.overrides or not fits(size):
            raise AdapterError(
                "init-from-unfit",
                "The file does not fit the recipe: no lora.rank results in its block sizes.",
                where=f"lora.init_from: {path}",
                fix="Remove lora.init_from. lora-rocm sample can use the file unchanged.",
            )
        return [(f"its blocks have up to {size} rows", f"lora.rank to {size}")]

    def arguments(self) -> dict[str, str]:
        return {"constraint": "0"}
