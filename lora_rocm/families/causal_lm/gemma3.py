"""Gemma 3 from 4B on, whose text model is part of one that reads images. Imported only for such a model."""

from __future__ import annotations

from typing import Any

from transformers import Gemma3ForConditionalGeneration


class Gemma3Text(Gemma3ForConditionalGeneration):  # type: ignore[misc]  # of transformers, untyped
    """The model without the part that reads images. Names of modules are those of the whole model."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.model.vision_tower, self.model.multi_modal_projector
