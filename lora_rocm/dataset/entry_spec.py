"""What a family caches of a sample: entries, what each is made from, and the tensors in it. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

IMAGE, CAPTION, MASK = "image", "caption", "mask"
INPUTS = (IMAGE, CAPTION, MASK)
ENTRY_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


@dataclass(frozen=True)
class Pad:
    """The axis of a tensor (a letter of ``TensorSpec.dims``) along which samples may differ, and what fills it up."""

    axis: str
    value: float = 0.0


@dataclass(frozen=True)
class TensorSpec:
    """One cached tensor.

    dtype: as torch names it ("float32"). dims: one letter a dimension ("CHW").
    pad: None if the tensors of all samples of one batch have the same size.
    """

    dtype: str
    dims: str
    pad: Pad | None = None

    def __post_init__(self) -> None:
        if self.pad is not None and self.dims.count(self.pad.axis) != 1:
            raise ValueError(f"{self.dims} has no axis {self.pad.axis}")


@dataclass(frozen=True)
class EntrySpec:
    """One cached entry of a sample.

    name: unique in a family; the folder of the cache that it lies in.
    inputs: what it is made from, of INPUTS. There is one entry for each view (mirrored or not) of an image or mask and
        for each variant of a caption; with both inputs, one for each pair.
    tensors: what it holds, without a batch dimension.
    follows_shape: the size of its tensors follows from the sample's ``Shape``. Of a text it is the other way round: the
        number of tokens is the size of the axis S of its tensors, for only the encoder can count them.
    """

    name: str
    inputs: tuple[str, ...]
    tensors: Mapping[str, TensorSpec]
    follows_shape: bool = False

    def __post_init__(self) -> None:
        known = bool(self.inputs) and set(self.inputs) <= set(INPUTS)
        if not known or ENTRY_NAME.fullmatch(self.name) is None:
            raise ValueError(f"no entry: {self.name!r} of {self.inputs}")

    @property
    def has_views(self) -> bool:
        return not {IMAGE, MASK}.isdisjoint(self.inputs)

    @property
    def has_captions(self) -> bool:
        return CAPTION in self.inputs
