"""A model that edits an image: as ``flux_like``, with the tokens of control images after the image's tokens.

Each control image has its own size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import avg_pool2d

from lora_rocm.dataset.companions.controls import control_name
from lora_rocm.dataset.entry_spec import IMAGE, EntrySpec, TensorSpec
from lora_rocm.dataset.images.buckets import covering
from lora_rocm.dataset.images.image_io import resized_crop
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.encoded_cache.controls import control_latents
from lora_rocm.encoded_cache.image_preprocess import pixels_of
from lora_rocm.families.base import Encoder, Inputs, LoadedModel, PreviewRequest, Tensors
from lora_rocm.families.objectives.base import MEAN
from tests.families.toys.base import ToyEncoder
from tests.families.toys.flux_like import CHANNELS, STRIDE_PX, FluxLike, packed, places

MULTIPLE_PX = 16


class EditLike(FluxLike):
    """Implements ``ModelFamily``."""

    name = "toy-edit"
    latents = MEAN

    def encoders(self) -> Sequence[Encoder]:
        _, words = super().encoders()
        latents = EntrySpec("latents", (IMAGE,), {MEAN: TensorSpec("float32", "CHW")}, follows_shape=True)
        return [ToyEncoder(latents, self._mean), words]

    def _mean(self, inputs: Inputs) -> Tensors:
        pixels_CHW = inputs[IMAGE]
        assert isinstance(pixels_CHW, Tensor)
        return {MEAN: avg_pool2d(pixels_CHW[None], STRIDE_PX)[0]}

    @property
    def _controls(self) -> range:
        return range(self.recipe.data.num_controls)

    def example(self, shape: SampleShape, rows: int) -> Tensors:
        example = super().example(shape, rows)
        example[MEAN] = example.pop("latents")
        for number in self._controls:
            sides = (shape[f"{control_name(number)}_{side}"] // STRIDE_PX for side in "hw")
            example[control_latents(number)] = torch.zeros(rows, CHANNELS, *sides)
        return example

    def given(self, request: PreviewRequest) -> Tensors:
        paths = [path for name, path in request.inputs.items() if name.startswith("control_image")]
        return {control_latents(number): self._of_file(path) for number, path in enumerate(paths)}

    def _of_file(self, path: Path) -> Tensor:
        with Image.open(path) as file:
            image = file.convert("RGB")
        size_hw = image.height // MULTIPLE_PX * MULTIPLE_PX, image.width // MULTIPLE_PX * MULTIPLE_PX
        pixels_CHW = pixels_of(resized_crop(image, covering((image.height, image.width), size_hw), flip=False))
        return self._mean({IMAGE: pixels_CHW})[MEAN]

    def velocity(self, model: LoadedModel, x: Tensor, sigma_B: Tensor, batch: Tensors) -> Tensor:
        controls = [batch[control_latents(number)] for number in self._controls if control_latents(number) in batch]
        tokens_BSC = torch.cat([packed(each) for each in controls], dim=1) if controls else None
        places_SA = [places(each, number) for number, each in enumerate(controls, start=1)]
        return self.with_more(model, x, sigma_B, batch, tokens_BSC, places_SA)
