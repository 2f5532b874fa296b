"""Encodes captions with a language model, one at a time and without padding. Suffixes: S tokens, D width."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lora_rocm.base_models.loading import BaseSource
from lora_rocm.dataset.entry_spec import CAPTION, EntrySpec, Pad, TensorSpec
from lora_rocm.device.placement.base import Placement
from lora_rocm.families.base import Tensors
from lora_rocm.families.common.caption_encoder import CaptionEncoder, EncodeCaption
from lora_rocm.families.common.tokenizers import (
    LoadTokenizer,
    digest,
    load_tokenizer,
    require_rows,
    shared_tokenizer,
    token_ids,
    tokenizer_identity,
)
from lora_rocm.kernels.weight_format import WeightFormat

ENCODING_VERSION = 1  # increase it if the same weights would give other tensors
CPU = torch.device("cpu")
DTYPE = torch.bfloat16  # of weights and states
STATES, REAL, OWN = "prompt_embeds", "prompt_real", "prompt_mask"


class LanguageModelEncoder(CaptionEncoder):
    """Encodes captions as hidden states of a language model before its final norm, in bf16.

    A caption's states are padded with zeros to a multiple of ``multiple`` tokens, so that batches have few different
    lengths.

    Args:
        source: the base, with the components "text_encoder" and "tokenizer".
        template: the prompt, with {} in place of the caption.
        max_tokens: number of tokens after which a caption is cut off.
        skipped: number of layers at the end that are not computed.
        multiple: every length is a multiple of this number of tokens.
        weights: storage format of the encoder's layers.
    """

    entry = EntrySpec(
        "text",
        (CAPTION,),
        {
            STATES: TensorSpec("bfloat16", "SD", Pad("S")),
            REAL: TensorSpec("bool", "S", Pad("S")),
            OWN: TensorSpec("bool", "S", Pad("S"), if_padded=True),
        },
    )

    def __init__(
        self, source: BaseSource, template: str, max_tokens: int, skipped: int, multiple: int, weights: WeightFormat
    ) -> None:
        self._source, self._template, self._max_tokens = source, template, max_tokens
        self._skipped, self._multiple, self._weights = skipped, multiple, weights

    @cached_property
    def fingerprint(self) -> str:
        parts = [
            self._source.fingerprint("text_encoder"),
            tokenizer_identity(self._source, ("tokenizer",)),
            f"{self._template} {self._max_tokens} {self._skipped} {self._multiple} {self._weights.name}",
        ]
        return f"language-model{ENCODING_VERSION}-{digest(parts)}"

    def opened(self, placement: Placement) -> EncodeCaption:
        tokenizer = tokenizer_of(self._source, "tokenizer")
        encoder: Any = self._source.load("text_encoder", DTYPE, CPU, self._weights)
        encoder.layers, encoder.norm = encoder.layers[: len(encoder.layers) - self._skipped], nn.Identity()
        placement.place(encoder, "text_encoder")

        def encode(caption: str) -> Tensors:
            ids_S = token_ids(tokenizer, self._template.format(caption))[: self._max_tokens]
            ids_BS = placement.transfer.send_checked(ids_S[None], "token ids")
            states_SD = encoder(input_ids=ids_BS, use_cache=False).last_hidden_state[0]
            return filled(placement.transfer.receive({STATES: states_SD})[STATES], self._multiple)

        return encode


def filled(states_SD: Tensor, multiple: int) -> Tensors:
    """Return an entry's tensors: states padded with zeros, the mask of real tokens, and a mask of all its tokens.

    When entries are padded to a batch's length, the last mask marks the tokens of the sample's own entry.
    """
    real = len(states_SD)
    count = -(-real // multiple) * multiple
    states = states_SD.new_zeros(count, states_SD.shape[1])
    states[:real] = states_SD
    return {STATES: states, REAL: torch.arange(count) < real, OWN: torch.ones(count, dtype=torch.bool)}


def zeros(rows: int, tokens: int, width: int) -> Tensors:
    """Return the text tensors of a batch of zeros. With several rows they include the mask that padding needs."""
    masks = {REAL: torch.ones(rows, tokens, dtype=torch.bool), OWN: torch.ones(rows, tokens, dtype=torch.bool)}
    if rows == 1:
        del masks[OWN]
    return {STATES: torch.zeros(rows, tokens, width, dtype=torch.bfloat16), **masks}


def tokenizer_of(
    source: BaseSource, name: str, spare_unwritten: bool = False, load: LoadTokenizer = load_tokenizer
) -> Any:
    """Load a tokenizer of a base, and check that the model knows its ids.

    Callers with the same ``load`` share the tokenizer (``shared_tokenizer``).

    Args:
        source: the base.
        name: the tokenizer's name in it.
        spare_unwritten: see ``require_rows``.
        load: loads the tokenizer from its folder.

    Raises:
        ModelError: tokenizer-missing, tokenizer-unreadable, tokenizer-unfit, custom-code.
    """
    tokenizer = shared_tokenizer(load, source.tokenizer_path(name))
    require_rows(tokenizer, source, name, spare_unwritten)
    return tokenizer
