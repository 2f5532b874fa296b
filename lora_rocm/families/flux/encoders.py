"""Caption entries of FLUX.1: the pooled embedding of CLIP-L, and the states of T5-XXL including its padding.

Dimensions: B batch, S tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lora_rocm.base_models.loading import BaseSource
from lora_rocm.dataset.entry_spec import CAPTION, EntrySpec, TensorSpec
from lora_rocm.device.placement.base import Placement
from lora_rocm.families.base import Tensors
from lora_rocm.families.common import caption_lm, clip
from lora_rocm.families.common.caption_encoder import CaptionEncoder, EncodeCaption
from lora_rocm.families.common.tokenizers import Limited, digest, tokenizer_identity
from lora_rocm.families.common.vae import CPU
from lora_rocm.kernels.weight_format import WeightFormat
from lora_rocm.model_files.config_file import Config

ENCODING_VERSION = 1  # increase it if the same weights would give other tensors
POOLED, STATES = "pooled_embeds", "prompt_embeds"


@dataclass(frozen=True)
class TextPart:
    """One text encoder and its output.

    Attributes:
        component, tokenizer: names of text encoder and tokenizer in the base.
        output, dims: name and dimensions of the output tensor.
        dtype: dtype of the weights and of the output.
        tokens: number of tokens that captions are padded or truncated to.
        embed: maps (encoder, ids_BS) to the output with a batch dimension.
    """

    component: str
    tokenizer: str
    output: str
    dims: str
    dtype: torch.dtype
    tokens: int
    embed: Callable[[nn.Module, Tensor], Tensor]


def _t5_states(encoder: nn.Module, ids_BS: Tensor) -> Tensor:
    """Return T5's states without an attention mask, because FLUX.1 was trained with the states of the padding."""
    states_BSD: Tensor = encoder(ids_BS).last_hidden_state
    return states_BSD


def require_distances(config: Config) -> None:
    """Refuse a T5 config in which some distance between tokens has no row in the table of distances.

    For each direction, half of the rows are for one distance each. The other rows share all larger distances up to the
    maximum. So the maximum has to be larger than the number of rows for one distance each. T5 looks rows up by number,
    which cannot be checked on the meta device.

    Raises:
        ModelError: config-unreadable.
    """
    rows = config.whole("relative_attention_num_buckets", 32, least=4)
    config.whole("relative_attention_max_distance", 128, least=rows // 4 + 1)


def clip_part() -> TextPart:
    """Return the description of CLIP-L. Only its pooled embedding is used."""
    embed: Callable[[nn.Module, Tensor], Tensor] = lambda encoder, ids_BS: clip.states(encoder, ids_BS)[1]  # noqa: E731
    return TextPart("text_encoder", "tokenizer", POOLED, "D", torch.float32, clip.CLIP_TOKENS, embed)


def t5_part(tokens: int) -> TextPart:
    """Return the description of T5-XXL for captions of ``tokens`` tokens."""
    return TextPart("text_encoder_2", "tokenizer_2", STATES, "SD", caption_lm.DTYPE, tokens, _t5_states)


class TextEncoder(CaptionEncoder):
    """Encodes captions with one text encoder, like ``FluxPipeline.encode_prompt``.

    Args:
        source: the base.
        part: the text encoder and its output.
        weights: storage format of the text encoder's layers.
    """

    def __init__(self, source: BaseSource, part: TextPart, weights: WeightFormat) -> None:
        self._source, self._part, self._weights = source, part, weights
        dtype = str(part.dtype).removeprefix("torch.")
        self.entry = EntrySpec(part.component, (CAPTION,), {part.output: TensorSpec(dtype, part.dims)})

    @cached_property
    def fingerprint(self) -> str:
        weights, tokenizer = self._source.fingerprint(self._part.component), (self._part.tokenizer,)
        parts = [weights, tokenizer_identity(self._source, tokenizer), str(self._part.tokens), self._weights.name]
        return f"flux-text{ENCODING_VERSION}-{digest(parts)}"

    def tokenizer(self) -> Any:
        """Return the tokenizer, set to the text encoder's number of tokens.

        Raises:
            ModelError: the tokenizer is missing or cannot be read.
        """
        return caption_lm.tokenizer_of(self._source, self._part.tokenizer, load=Limited(self._part.tokens))

    def opened(self, placement: Placement) -> EncodeCaption:
        tokenizer, part = self.tokenizer(), self._part
        encoder = self._source.load(part.component, part.dtype, CPU, self._weights)
        placement.place(encoder, part.component)

        def encode(caption: str) -> Tensors:
            ids_BS = placement.transfer.send_checked(clip.token_ids(tokenizer, caption)[None], "token ids")
            return placement.transfer.receive({part.output: part.embed(encoder, ids_BS)[0]})

        return encode
