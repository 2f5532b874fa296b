"""The base class of caption encoders, which encode one caption at a time and have no tiled mode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from lora_rocm.dataset.entry_spec import CAPTION
from lora_rocm.device.placement.base import Placement
from lora_rocm.families.base import Encode, Inputs, Tensors

EncodeCaption = Callable[[str], Tensors]


class CaptionEncoder(ABC):
    """Implements the part of ``Encoder`` that does not depend on the model."""

    @abstractmethod
    def opened(self, placement: Placement) -> EncodeCaption:
        """Load the weights and return the function ``encode`` for captions (see ``Encoder.load``).

        ``encode`` is called without autograd.
        """

    def in_tiles(self) -> None:
        return None

    def load(self, placement: Placement) -> Encode:
        encode_caption = self.opened(placement)

        @torch.no_grad()
        def encode(inputs: Inputs) -> Tensors:
            caption = inputs[CAPTION]
            assert isinstance(caption, str), "captions are texts"
            return encode_caption(caption)

        return encode
