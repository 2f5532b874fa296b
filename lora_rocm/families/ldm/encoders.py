"""SDXL's cached entries: the VAE's posterior, and text embeddings or token ids (if the text encoders are trained)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_rocm.base_models.loading import Source
from lora_rocm.dataset.entry_spec import CAPTION, IMAGE, EntrySpec, TensorSpec
from lora_rocm.device.backend_settings import plain_attention
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.families import clip
from lora_rocm.families.base import Encode, Inputs, Tensors

ENCODING_VERSION = 1  # increase it if the same weights would give other tensors
TILING_PIXELS = 1_200_000  # larger images use the VAE's own overlapping, blended tiles
CPU = torch.device("cpu")
TEXT_COMPONENTS = ("text_encoder", "text_encoder_2")
SMALL_TILE_PX = 512  # tile side if memory is short; the VAE's default of 1024 saves little


class VaeEncoder:
    """Encodes images to the unscaled mean and standard deviation of the VAE's posterior, in float32.

    Args:
        source: the base model.
        whole: the untiled encoder of the same weights, for an encoder with small tiles.
    """

    entry = EntrySpec(
        "image",
        (IMAGE,),
        {"latent_mean": TensorSpec("float32", "CHW"), "latent_std": TensorSpec("float32", "CHW")},
        follows_shape=True,
    )

    def __init__(self, source: Source, whole: VaeEncoder | None = None) -> None:
        self._source, self._small_tiles, self._whole = source, whole is not None, whole

    @cached_property
    def fingerprint(self) -> str:
        if self._whole is not None:  # same weights, so their digest is reused
            return f"{self._whole.fingerprint}-tiles{SMALL_TILE_PX}"
        return f"vae{ENCODING_VERSION}-{self._source.fingerprint('vae')}"

    def in_tiles(self) -> VaeEncoder:
        return VaeEncoder(self._source, self)

    def load(self, door: DeviceTransfer) -> Encode:
        vae = load_vae(self._source, CPU, self._small_tiles)
        door.send_parameters(vae, "vae")

        @torch.no_grad()
        def encode(inputs: Inputs) -> Tensors:
            pixels_CHW = inputs[IMAGE]
            assert isinstance(pixels_CHW, Tensor), "the VAE encodes images"
            vae.use_tiling = self._small_tiles or pixels_CHW.shape[1] * pixels_CHW.shape[2] > TILING_PIXELS
            pixels_BCHW = door.send_checked(pixels_CHW[None].to(torch.float32), "pixels")
            with plain_attention(door.device):
                posterior = vae.encode(pixels_BCHW).latent_dist
            return door.receive({"latent_mean": posterior.mean[0], "latent_std": posterior.std[0]})

        return encode


class TextEncoder:
    """Encodes captions with one CLIP, its part of ``StableDiffusionXLPipeline.encode_prompt``, in float32.

    The pipeline concatenates the states of both encoders in width; the pooled embedding is the second one's.
    """

    def __init__(self, source: Source, number: int) -> None:
        self._source, self._number = source, number
        self._component, self._tokenizer = TEXT_COMPONENTS[number - 1], tuple(source.layout.tokenizers)[number - 1]
        tensors = {f"prompt_embeds_{number}": TensorSpec("float32", "SD")}
        pooled = {"pooled_embeds": TensorSpec("float32", "D")} if number == len(TEXT_COMPONENTS) else {}
        self.entry = EntrySpec(f"text_{number}", (CAPTION,), tensors | pooled)

    @cached_property
    def fingerprint(self) -> str:
        parts = [self._source.fingerprint(self._component), tokenizer_identity(self._source, (self._tokenizer,))]
        return f"text{ENCODING_VERSION}-{_digest(parts)}"

    def in_tiles(self) -> None:
        return None

    def load(self, door: DeviceTransfer) -> Encode:
        tokenizer = clip.load_tokenizer(self._source.tokenizer_path(self._tokenizer))
        encoder = self._source.load(self._component, torch.float32, CPU)
        door.send_parameters(encoder, self._component)

        @torch.no_grad()
        def encode(inputs: Inputs) -> Tensors:
            caption = inputs[CAPTION]
            assert isinstance(caption, str), "the text encoders encode captions"
            ids_BS = door.send_checked(clip.token_ids(tokenizer, caption)[None], "token ids")
            states_BSD, pooled_BD = clip.states(encoder, ids_BS)
            made = {f"prompt_embeds_{self._number}": states_BSD[0], "pooled_embeds": pooled_BD[0]}
            return door.receive({name: made[name] for name in self.entry.tensors})

        return encode


class TokenEncoder:
    """Encodes captions to token ids, used if the text encoders are trained."""

    entry = EntrySpec(
        "tokens", (CAPTION,), {"input_ids_1": TensorSpec("int64", "S"), "input_ids_2": TensorSpec("int64", "S")}
    )

    def __init__(self, source: Source) -> None:
        self._source = source

    @cached_property
    def fingerprint(self) -> str:
        return f"tokens{ENCODING_VERSION}-{tokenizer_identity(self._source, tuple(self._source.layout.tokenizers))}"

    def in_tiles(self) -> None:
        return None

    def load(self, door: DeviceTransfer) -> Encode:
        names = self._source.layout.tokenizers
        first, second = (clip.load_tokenizer(self._source.tokenizer_path(name)) for name in names)

        def encode(inputs: Inputs) -> Tensors:
            caption = inputs[CAPTION]
            assert isinstance(caption, str), "the tokenizers encode captions"
            return {"input_ids_1": clip.token_ids(first, caption), "input_ids_2": clip.token_ids(second, caption)}

        return encode


def load_vae(source: Source, device: torch.device, small_tiles: bool = False) -> Any:
    """Load the VAE in float32, because SDXL's overflows in half precision.

    ``small_tiles`` sets the tile size that is used if tiling is turned on.
    """
    vae: Any = source.load("vae", torch.float32, device)
    if small_tiles:
        vae.tile_sample_min_size = SMALL_TILE_PX
        vae.tile_latent_min_size = SMALL_TILE_PX // 2 ** (len(vae.config.block_out_channels) - 1)
    return vae


def tokenizer_identity(source: Source, names: Sequence[str]) -> str:
    """SHA-256 over the files of the named tokenizers."""
    folders = [source.tokenizer_path(name) for name in names]
    files = [path for folder in folders for path in sorted(folder.iterdir()) if path.is_file()]
    return _digest([f"{path.parent.name}/{path.name} {_file_digest(path)}" for path in files])


def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode("utf-8")).hexdigest()
