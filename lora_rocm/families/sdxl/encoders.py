"""Caption entries of SDXL: the states of both text encoders."""

from __future__ import annotations

from functools import cached_property

import torch

from lora_rocm.base_models.loading import BaseSource
from lora_rocm.dataset.entry_spec import CAPTION, EntrySpec, TensorSpec
from lora_rocm.device.placement.base import Placement
from lora_rocm.families.base import Tensors
from lora_rocm.families.common import clip
from lora_rocm.families.common.caption_encoder import CaptionEncoder, EncodeCaption
from lora_rocm.families.common.tokenizers import digest, tokenizer_identity
from lora_rocm.families.common.vae import CPU, ENCODING_VERSION

TEXT_COMPONENTS = ("text_encoder", "text_encoder_2")


class TextEncoder(CaptionEncoder):
    """Encodes captions with one of the two CLIP text encoders, in float32, as ``StableDiffusionXLPipeline`` does.

    The pipeline concatenates the states of both encoders in width. The pooled embedding comes from the second encoder.
    """

    def __init__(self, source: BaseSource, number: int, max_tokens: int) -> None:
        self._source, self._number, self._max_tokens = source, number, max_tokens
        self._component, self._tokenizer = TEXT_COMPONENTS[number - 1], tuple(source.layout.tokenizers)[number - 1]
        tensors = {f"prompt_embeds_{number}": TensorSpec("float32", "SD", clip.PAD)}
        pooled = {"pooled_embeds": TensorSpec("float32", "D")} if number == len(TEXT_COMPONENTS) else {}
        self.entry = EntrySpec(f"text_{number}", (CAPTION,), tensors | pooled)

    @cached_property
    def fingerprint(self) -> str:
        parts = [self._source.fingerprint(self._component), tokenizer_identity(self._source, (self._tokenizer,))]
        return f"text{ENCODING_VERSION}-{self._max_tokens}-{digest(parts)}"

    def opened(self, placement: Placement) -> EncodeCaption:
        tokenizer = clip.tokenizer_of(self._source, self._tokenizer)
        encoder = self._source.load(self._component, torch.float32, CPU)
        placement.place(encoder, self._component)

        def encode(caption: str) -> Tensors:
            ids_BS = placement.transfer.send_checked(
                clip.chunk_ids(tokenizer, caption, self._max_tokens)[None], "token ids"
            )
            states_BSD, pooled_BD = clip.states(encoder, ids_BS)
            made = {f"prompt_embeds_{self._number}": states_BSD[0], "pooled_embeds": pooled_BD[0]}
            return placement.transfer.receive({name: made[name] for name in self.entry.tensors})

        return encode
