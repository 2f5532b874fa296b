"""The VAE of a latent diffusion model: encodes images for the cache, and decodes latents for previews."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from diffusers.image_processor import VaeImageProcessor
from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint
from PIL import Image
from torch import Tensor, nn

from lora_rocm.base_models.conversion import State, own_names
from lora_rocm.base_models.loading import BaseSource, ComponentLayout
from lora_rocm.dataset.entry_spec import IMAGE, EntrySpec, TensorSpec
from lora_rocm.dataset.images.buckets import Size, covering
from lora_rocm.dataset.images.image_io import MAX_IMAGE_BYTES, UnreadableImage, resized_crop
from lora_rocm.dataset.images.image_io import decode as decode_image
from lora_rocm.dataset.images.preview_images import READ_FIX
from lora_rocm.device.backend_settings import plain_attention
from lora_rocm.device.placement.base import Placement
from lora_rocm.errors import DataError
from lora_rocm.families.base import Encode, Inputs, Tensors
from lora_rocm.families.objectives.base import MEAN, STD, LatentSpace
from lora_rocm.foundation.bounded_read import read_plain

OLD_ATTENTION = {".query.": ".to_q.", ".key.": ".to_k.", ".value.": ".to_v.", ".proj_attn.": ".to_out.0."}
"""Maps tensor names in a VAE saved by diffusers 0.18 or older to current names."""
OF_ORIGINAL = ".mid.block_1."  # in the original release's names; diffusers has mid_block
OF_TRAINING = ("loss.", "discriminator.", "model_ema.")
"""Name parts of tensors that are left in a VAE's file by its training."""


def _present_names(state: State, module: nn.Module) -> State:
    """Convert from any diffusers version's names to the current names."""
    expected, renamed = module.state_dict(keep_vars=True).keys(), {}
    for name, tensor in state.items():
        renewed = reduce(lambda text, old: text.replace(old, OLD_ATTENTION[old]), OLD_ATTENTION, name)
        renamed[renewed if name not in expected and renewed in expected else name] = tensor
    return own_names(renamed, module)


def _of_original(state: State, module: nn.Module) -> State:
    """Convert from the original release's names, or from any diffusers version's names."""
    if not any(OF_ORIGINAL in name for name in state):
        return _present_names(state, module)
    config: Any = module.config
    return dict(convert_ldm_vae_checkpoint(state, dict(config)))


VAE = ComponentLayout(
    AutoencoderKL,
    "first_stage_model.",
    _of_original,
    other_prefixes=("vae.",),
    from_folder=_present_names,
    ignored=OF_TRAINING,
)
"""The VAE of Stable Diffusion, FLUX.1 and Z-Image."""
ENCODING_VERSION = 1  # increase it if the same weights would give other tensors
TILING_PIXELS = 1_200_000  # larger images use the VAE's own overlapping, blended tiles
CPU = torch.device("cpu")
CONTROL_UNUSABLE = "control-unusable"  # error code
SMALL_TILE_PX = 512  # tile side if memory is short; the VAE's default of 1024 saves little


class VaeEncoder:
    """Encodes images as the unnormalised mean and standard deviation of the VAE's posterior, in float32.

    Args:
        source: the base model.
        whole: the untiled encoder with the same weights, to create an encoder with small tiles; otherwise None.
    """

    entry = EntrySpec(
        "image",
        (IMAGE,),
        {MEAN: TensorSpec("float32", "CHW"), STD: TensorSpec("float32", "CHW")},
        follows_shape=True,
    )

    def __init__(self, source: BaseSource, whole: VaeEncoder | None = None) -> None:
        self._source, self._small_tiles, self._whole = source, whole is not None, whole

    @cached_property
    def fingerprint(self) -> str:
        if self._whole is not None:  # same weights, so their digest is reused
            return f"{self._whole.fingerprint}-tiles{SMALL_TILE_PX}"
        return f"vae{ENCODING_VERSION}-{self._source.fingerprint('vae')}"

    def in_tiles(self) -> VaeEncoder:
        return VaeEncoder(self._source, self)

    def load(self, placement: Placement) -> Encode:
        vae = load_vae(self._source, CPU, self._small_tiles)
        placement.place(vae, "vae")

        @torch.no_grad()
        def encode(inputs: Inputs) -> Tensors:
            pixels_CHW = inputs[IMAGE]
            assert isinstance(pixels_CHW, Tensor), "the VAE encodes images"
            vae.use_tiling = self._small_tiles or pixels_CHW.shape[1] * pixels_CHW.shape[2] > TILING_PIXELS
            pixels_BCHW = placement.transfer.send_checked(pixels_CHW[None].to(torch.float32), "pixels")
            with plain_attention(placement.transfer.device):
                posterior = vae.encode(pixels_BCHW).latent_dist
            return placement.transfer.receive({MEAN: posterior.mean[0], STD: posterior.std[0]})

        return encode


def load_vae(source: BaseSource, device: torch.device, small_tiles: bool = False) -> Any:
    """Load the VAE in float32, because some VAEs overflow in half precision.

    With ``small_tiles``, tiles are small whenever tiling is enabled.
    """
    vae: Any = source.load("vae", torch.float32, device)
    if small_tiles:
        vae.tile_sample_min_size = SMALL_TILE_PX
        vae.tile_latent_min_size = SMALL_TILE_PX // pixels_per_latent(source)
    return vae


@torch.no_grad()
def encode_control(
    source: BaseSource, device: torch.device, path: Path, size_hw: Size, space: LatentSpace, in_tiles: bool
) -> Tensor:
    """Return normalised latents [1, C, H, W] of a preview's control image.

    The image is cropped to ``size_hw``, in the same way as control images in training. The float32 VAE is freed at the
    end. ``in_tiles``: as in ``decode``.

    Raises:
        DataError: the file cannot be read.
    """
    image = read_image(path, "control image", decode_image)
    seen = resized_crop(image, covering((image.height, image.width), size_hw), flip=False)
    return encode(source, device, VaeImageProcessor(vae_scale_factor=1).preprocess(seen), space, in_tiles)


def read_image(path: Path, noun: str, decoded: Callable[[bytes], Image.Image]) -> Image.Image:
    """Read an image that is an input of a preview. ``noun``: the kind of image, for the error.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        return decoded(read_plain(path, MAX_IMAGE_BYTES))
    except (OSError, UnreadableImage) as error:
        what = f"The {noun} of a preview cannot be read: {error}."
        raise DataError(CONTROL_UNUSABLE, what, where=str(path), fix=READ_FIX) from error


@torch.no_grad()
def encode(source: BaseSource, device: torch.device, pixels_BCHW: Tensor, space: LatentSpace, in_tiles: bool) -> Tensor:
    """Encode pixels in [-1, 1] as normalised latents [B, C, H, W]. The float32 VAE is freed at the end.

    ``in_tiles``: encode images of any size in small tiles.
    """
    vae = load_vae(source, device, in_tiles)
    vae.use_tiling = in_tiles or pixels_BCHW.shape[2] * pixels_BCHW.shape[3] > TILING_PIXELS
    with plain_attention(device):
        mean_BCHW = vae.encode(pixels_BCHW.to(device)).latent_dist.mean
    shift, scale = (values_C.to(device)[:, None, None] for values_C in (space.shift_C, space.scale_C))
    latents_BCHW: Tensor = (mean_BCHW - shift) * scale
    return latents_BCHW


def decode(
    source: BaseSource,
    device: torch.device,
    latents: Sequence[Tensor],
    space: LatentSpace,
    in_tiles: bool,
) -> list[Image.Image]:
    """Decode normalised latents [C, H, W] to images. The float32 VAE is freed at the end.

    ``in_tiles``: decode images of any size in small tiles.
    """
    vae = load_vae(source, device, in_tiles)
    processor = VaeImageProcessor(vae_scale_factor=1)
    shift, scale = (values_C.to(device)[:, None, None] for values_C in (space.shift_C, space.scale_C))
    ratio = pixels_per_latent(source)
    images: list[Image.Image] = []
    for latents_CHW in latents:
        vae.use_tiling = in_tiles or latents_CHW.shape[1] * latents_CHW.shape[2] * ratio**2 > TILING_PIXELS
        with plain_attention(device):
            pixels_BCHW = vae.decode((latents_CHW / scale + shift)[None], return_dict=False)[0]
        images += processor.postprocess(pixels_BCHW, output_type="pil")
    return images


def pixels_per_latent(source: BaseSource) -> int:
    """Return the number of pixels per latent along a side (8 in SDXL and in Stable Diffusion 1.x and 2.x)."""
    config = source.config("vae")
    levels = "dim_mult" if config.values.keys() & {"dim_mult", "z_dim"} else "block_out_channels"
    return int(2 ** (config.length(levels) - 1))
