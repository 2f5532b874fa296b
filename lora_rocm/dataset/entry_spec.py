"""Specifies the cache entries of a model family: the inputs and tensors of each entry. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

IMAGE, CAPTION = "image", "caption"
ENTRY_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


@dataclass(frozen=True)
class Pad:
    """The axis of a tensor (a letter of ``TensorSpec.dims``) in which samples may differ, and the padding value.

    repeats: in place of a value, each sample is repeated along the axis, up to the least common multiple of the sizes.
    """

    axis: str
    value: float = 0.0
    repeats: bool = False


@dataclass(frozen=True)
class TensorSpec:
    """One cached tensor.

    dtype: torch's name of the dtype ("float32"). dims: one letter per dimension ("CHW").
    pad: None if all samples of a batch have tensors of the same size.
    if_padded: omitted from a batch without padding. A mask of the padding is such a tensor: attention without a mask
        may use a faster kernel.
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
    """One cached entry of a sample.

    name: unique in a family; also the name of its folder in the cache.
    inputs: the inputs that it encodes: IMAGE, CAPTION, or a companion of the image (``companion_inputs``). There
        is one entry per view (mirrored or not) of an image or companion and per variant of a caption; with both, one
        per pair.
    tensors: the cached tensors by name, without a batch dimension.
    follows_shape: the sample's ``Shape`` determines the size of its tensors. For a text, the tensors determine the
        shape: the number of tokens is the size of their axis S, because only the encoder can count tokens.
    keeps_size: encoded from a companion with its own size, which is a part of the sample's ``Shape``.
    share: name of a tensor; its sum is the sample's share of an update's loss. "": all samples count alike.
    """

    name: str
    inputs: tuple[str, ...]
    tensors: Mapping[str, TensorSpec]
    follows_shape: bool = False
    share: str = ""
    keeps_size: bool = False

    def __post_init__(self) -> None:
        if not self.inputs or not all(ENTRY_NAME.fullmatch(name) for name in (self.name, *self.inputs)):
            raise ValueError(f"not an entry: {self.name!r} of {self.inputs}")

    @property
    def has_views(self) -> bool:
        return set(self.inputs) != {CAPTION}

    @property
    def has_captions(self) -> bool:
        return CAPTION in self.inputs

    @property
    def caption_mask(self) -> str:
        """Name of the mask that a batch of captions of different lengths needs; "" if there is none."""
        masks = (name for name, tensor in self.tensors.items() if tensor.if_padded)
        return next(masks, "") if self.has_captions and not self.has_views else ""
