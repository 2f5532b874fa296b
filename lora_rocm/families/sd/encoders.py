"""Caption entry of Stable Diffusion 1.x and 2.x: the text encoder's last states."""

from __future__ import annotations

from functools import cached_property

import torch

from lora_rocm.base_models.loading import BaseSource
from lora_rocm.dataset.entry_spec import CAPTION, EntrySpec, TensorSpec
from lora_rocm.device.placement.base import Placement
from lora_rocm.families.base import Tensors
from lora_rocm.families.common import clip
from lora_rocm.families.common.caption_encoder import CaptionEncoder, EncodeCaption
from lora_rocm.families.common.tokenizers import tokenizer_identity
from lora_rocm.families.common.vae import CPU, ENCODING_VERSION


class TextEncoder(CaptionEncoder):
    """Encodes captions as in ``StableDiffusionPipeline.encode_prompt``, in float32."""

    entry = EntrySpec("text", (CAPTION,), {"prompt_embeds": TensorSpec("float32", "SD", clip.PAD)})

    def __init__(self, source: BaseSource, max_tokens: int) -> None:
        self._source, self._max_tokens = source, max_tokens

    @cached_property
    def fingerprint(self) -> str:
        weights = self._source.fingerprint("text_encoder")
        identity = tokenizer_identity(self._source, ("tokenizer",))
        return f"text-last{ENCODING_VERSION}-{self._max_tokens}-{weights}-{identity}"

    def opened(self, placement: Placement) -> EncodeCaption:
        tokenizer = clip.tokenizer_of(self._source, "tokenizer")
        encoder = self._source.load("text_encoder", torch.float32, CPU)
        placement.place(encoder, "text_encoder")

        def encode(caption: str) -> Tensors:
            ids_BS = placement.transfer.send_checked(
                clip.chunk_ids(tokenizer, caption, self._max_tokens)[None], "token ids"
            )
            return placement.transfer.receive({"prompt_embeds": clip.last_states(encoder, ids_BS)[0]})

        return encode
