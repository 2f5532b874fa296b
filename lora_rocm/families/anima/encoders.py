"""Encodes captions for Anima: text conditioner output, computed from Qwen3 hidden states and T5 token ids.

The conditioner is frozen, so its output is cached. The transformer has no text mask: it also attends to the zeros after
a caption, so their number changes its output. Therefore each entry is padded to 512 tokens, as in the published model,
and all batches have the same shape.

Dimensions: B batch, S tokens, D width.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lora_rocm.base_models.loading import BaseSource
from lora_rocm.dataset.entry_spec import CAPTION, EntrySpec, TensorSpec
from lora_rocm.device.placement.base import Placement
from lora_rocm.families.base import Tensors
from lora_rocm.families.common.caption_encoder import CaptionEncoder, EncodeCaption
from lora_rocm.families.common.caption_lm import DTYPE, tokenizer_of
from lora_rocm.families.common.tokenizers import digest, tokenizer_identity
from lora_rocm.families.common.vae import CPU
from lora_rocm.kernels.weight_format import DENSE, WeightFormat

ENCODING_VERSION = 1  # increase it if the same weights would give other tensors
STATES = "prompt_embeds"
MAX_TOKENS = 512  # of Qwen3, of T5, and of the states with their zeros
TOKENIZERS = ("tokenizer", "t5_tokenizer")


class TextEncoder(CaptionEncoder):
    """Encodes captions one at a time, like diffusers' ``AnimaTextEncoderStep`` and ``AnimaTextConditioningStep``.

    Args:
        source: the base model.
        weights: storage format of Qwen3's layers.
    """

    entry = EntrySpec("text", (CAPTION,), {STATES: TensorSpec("bfloat16", "SD")})

    def __init__(self, source: BaseSource, weights: WeightFormat) -> None:
        self._source, self._weights = source, weights

    @cached_property
    def fingerprint(self) -> str:
        weights = [self._source.fingerprint(name) for name in ("text_encoder", "text_conditioner")]
        parts = [*weights, tokenizer_identity(self._source, TOKENIZERS), self._weights.name]
        return f"anima-text{ENCODING_VERSION}-{digest(parts)}"

    def opened(self, placement: Placement) -> EncodeCaption:
        tokenizers = load_tokenizers(self._source)
        parts: list[Any] = []
        for name, weights in (("text_encoder", self._weights), ("text_conditioner", DENSE)):
            parts.append(self._source.load(name, DTYPE, CPU, weights))
            placement.place(parts[-1], name)
        encoder, conditioner = parts

        def encode(caption: str) -> Tensors:
            ids_BS, t5_ids_BS = (_ids(tokenizer, caption) for tokenizer in tokenizers)
            t5_ids_BS = placement.transfer.send_checked(t5_ids_BS, "token ids")
            if ids_BS.shape[1]:
                ids_BS = placement.transfer.send_checked(ids_BS, "token ids")
                states_BSD = encoder(input_ids=ids_BS, use_cache=False).last_hidden_state
            else:  # an empty caption: a zero state has no effect on the conditioner, like a mask that hides it
                states_BSD = encoder.embed_tokens.weight.new_zeros(1, 1, encoder.config.hidden_size)
            return placement.transfer.receive({STATES: conditioner(states_BSD, t5_ids_BS)[0]})

        return encode


def load_tokenizers(source: BaseSource) -> list[Any]:
    """Return the tokenizers of Qwen3 and T5, in this order.

    Raises:
        ModelError: a tokenizer is missing or cannot be read.
    """
    return [tokenizer_of(source, name) for name in TOKENIZERS]


def _ids(tokenizer: Any, caption: str) -> Tensor:
    """Token ids of a caption, int64 [1, S]. Qwen3's tokenizer returns shape [1, 0] for an empty caption."""
    ids: list[int] = tokenizer(caption, truncation=True, max_length=MAX_TOKENS).input_ids
    return torch.tensor([ids], dtype=torch.int64)
