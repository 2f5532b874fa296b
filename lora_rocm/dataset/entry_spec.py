"""Describes the cache entries of a model family: the inputs and tensors of each entry. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

IMAGE, CAPTION = "image", "caption"
ENTRY_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


@dataclass(frozen=True)
class Pad:
    """Padding that gives tensors of different sizes the same size, so that they can be stacked to a batch.

    axis: the axis in which sizes may differ, as a letter of ``TensorSpec.dims``.
    value: the padding value.
    repeats: whether each tensor is repeated along the axis instead of padded with ``value``. The common size is then
        the least common multiple of all sizes.
    """

    axis: str
    value: float = 0.0
    repeats: bool = False


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a cache entry.

    dtype: torch's name of the dtype ("float32").
    dims: one letter per dimension ("CHW").
    pad: how tensors are padded in a batch; None if all samples of a batch have the same size.
    if_padded: whether a batch without padding omits this tensor. Padding masks are omitted, because attention without a
        mask may use a faster kernel.
    """

    dtype: str
    dims: str
    pad: Pad | None = None
    if_padded: bool = False

    def __post_init__(self) -> None:
        if self.pad is not None and self.dims.count(self.pad.axis) != 1:
            raise ValueError(f"{self.dims} has no axis {self.pad.axis}")


@dataclass(frozen=True)
class EntrySpec:
    """A cache entry that a model family stores for a sample.

    name: unique name within the family, and name of the cache folder.
    inputs: the encoded inputs: IMAGE, CAPTION, or a companion of the image (``companion_inputs``). There is one entry
        per view (mirrored or not) of an image or companion, and one per variant of a caption. With both, there is one
        entry per pair of view and variant.
    tensors: the cached tensors by name, without a batch dimension.
    follows_shape: whether the sample's ``Shape`` determines the tensor sizes. For texts it is reversed: the size of the
        tensors' axis S is the number of tokens, because only the encoder can count tokens.
    keeps_size: whether the entry encodes a companion at the companion's own size, which becomes part of ``Shape``.
    share: name of the tensor that is summed to get the sample's weight in an update's loss; "" if all samples have the
        same weight.
    """

    name: str
    inputs: tuple[str, ...]
    tensors: Mapping[str, TensorSpec]
    follows_shape: bool = False
    share: str = ""
    keeps_size: bool = False

    def __post_init__(self) -> None:
        if not self.inputs or not all(ENTRY_NAME.fullmatch(name) for name in (self.name, *self.inputs)):
            raise ValueError(f"invalid entry: {self.name!r} with the inputs {self.inputs}")

    @property
    def has_views(self) -> bool:
        return set(self.inputs) != {CAPTION}

    @property
    def has_captions(self) -> bool:
        return CAPTION in self.inputs

    @property
    def caption_mask(self) -> str:
        """Name of the mask tensor that a batch needs if its captions differ in length; "" if there is none."""
        masks = (name for name, tensor in self.tensors.items() if tensor.if_padded)
        return next(masks, "") if self.has_captions and not self.has_views else ""
