"""Marks of Stable Diffusion 1.x and 2.x base models, and the prediction type of files without a scheduler config."""

from __future__ import annotations

from lora_rocm.base_models.loading import Source
from lora_rocm.base_models.safetensors_file import read_tensors
from lora_rocm.families.ldm.detect import UNET_PREFIX, Expected

EXPECTED_SD15 = Expected(
    title="Stable Diffusion 1.x",
    with_article="a Stable Diffusion 1.x",
    family="sd15",
    has_sizes=False,
    width=768,
)
EXPECTED_SD2 = Expected(
    title="Stable Diffusion 2.x",
    with_article="a Stable Diffusion 2.x",
    family="sd2",
    has_sizes=False,
    width=1024,
)
TELLING_BIAS = f"{UNET_PREFIX}output_blocks.11.1.transformer_blocks.0.norm1.bias"
V_PREDICTION_DEVIATION = 0.09


def predicts_velocity(source: Source) -> bool:
    """Whether a one-file Stable Diffusion 2.x checkpoint predicts the velocity, which its header does not say.

    The published 768-pixel models predict the velocity and have a larger spread in one bias of the last block (model
    detection of ComfyUI, ``supported_models.SD20``).
    """
    header = source.single_header
    if header is None or TELLING_BIAS not in header.tensors:
        return False
    bias_C = read_tensors(header, lambda name: name == TELLING_BIAS)[TELLING_BIAS]
    return float(bias_C.float().std(unbiased=False)) > V_PREDICTION_DEVIATION
