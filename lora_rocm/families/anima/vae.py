"""The video VAE of Qwen-Image and Wan 2.1, used for images by encoding each one as a video of one frame.

Dimensions: B batch, C channels, H W height and width in pixels or latents.
"""

from __future__ import annotations

from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage
from diffusers.models.autoencoders.vae import DecoderOutput
from torch import Tensor, nn

from lora_rocm.base_models.conversion import State, own_names

OF_ORIGINAL = "encoder.conv1."  # in the names of Wan's release


class ImageVae(AutoencoderKLQwenImage):
    """The video VAE with inputs and outputs that have no frame axis. Its tiles are 256 pixels wide and high."""

    def _encode(self, x: Tensor) -> Tensor:
        moments_BCHW: Tensor = super()._encode(x[:, :, None])[:, :, 0]
        return moments_BCHW

    def _decode(self, z: Tensor, return_dict: bool = True) -> DecoderOutput:
        return DecoderOutput(sample=super()._decode(z[:, :, None]).sample[:, :, 0])


def vae_of_original(state: State, module: nn.Module) -> State:
    """Convert tensor names of Wan's release to diffusers' names. ComfyUI uses the names of Wan's release, too.

    Tensors with diffusers' names are kept.
    """
    if not any(OF_ORIGINAL in name for name in state):
        return own_names(state, module)
    return dict(convert_wan_vae_to_diffusers(state))
