"""CLIP text encoding as in the diffusers pipelines, one caption at a time. Suffixes: S tokens, D width, B batch.

A caption that is longer than CLIP's sequence is split into chunks of 75 tokens, each with its own begin and end token.
The chunks' states are concatenated, and the pooled embedding comes from the first chunk, as in ComfyUI and A1111.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, normalizers
from torch import Tensor, nn
from transformers import CLIPTokenizer

from lora_rocm.base_models.loading import BaseSource
from lora_rocm.dataset.captions.caption_length import TokenLimit
from lora_rocm.dataset.entry_spec import CAPTION, EntrySpec, Pad, TensorSpec
from lora_rocm.device.placement.base import Placement
from lora_rocm.errors import UserError
from lora_rocm.families.base import Tensors
from lora_rocm.families.common.caption_encoder import CaptionEncoder, EncodeCaption
from lora_rocm.families.common.tokenizers import (
    Explained,
    digest,
    require_rows,
    shared_tokenizer,
    tokenizer_identity,
    unreadable,
)
from lora_rocm.families.common.vae import ENCODING_VERSION
from lora_rocm.recipe.adapter_sections import NewToken, normalised

CLIP_TOKENS = 77  # sequence length of every CLIP text encoder (arXiv 2103.00020)
CHUNK_TOKENS = CLIP_TOKENS - 2  # tokens of a caption between begin and end
PAD = Pad("S", repeats=True)
"""Padding in a batch: a caption with fewer chunks is repeated, because attention over repetitions gives the same
result.
"""
MAX_TOKENS = 1000  # transformers reports 1e30 if the config has no limit; CLIP's is 77
FIRST_MARK = 0x100000  # private use: no caption has it


def tokenizer_of(source: BaseSource, name: str, new_tokens: Sequence[NewToken] = ()) -> CLIPTokenizer:
    """Load a CLIP tokenizer of a base, check that the text encoder knows its ids, and add new tokens to it.

    Callers without new tokens share the tokenizer (``shared_tokenizer``).

    Raises:
        ModelError: tokenizer-missing, tokenizer-unreadable, tokenizer-unfit.
        UserError: token-known.
    """
    path = source.tokenizer_path(name)
    tokenizer: CLIPTokenizer = load_tokenizer(path) if new_tokens else shared_tokenizer(load_tokenizer, path)
    require_rows(tokenizer, source, name)
    if new_tokens:
        _add(tokenizer, new_tokens)
    return tokenizer


def load_tokenizer(folder: Path) -> CLIPTokenizer:
    """Load a CLIP tokenizer from a local folder.

    Raises:
        ModelError: tokenizer-unreadable.
    """
    with Explained(folder):
        tokenizer: CLIPTokenizer = CLIPTokenizer.from_pretrained(str(folder), local_files_only=True)
    if tokenizer.model_max_length > MAX_TOKENS:
        raise unreadable(folder / "tokenizer_config.json", "The file has no model_max_length.")
    with Explained(folder):
        token_ids(tokenizer, "a")
    return tokenizer


def _add(tokenizer: CLIPTokenizer, new_tokens: Sequence[NewToken]) -> None:
    """Make a tokenizer encode each new token as several added tokens, one per embedding vector.

    The added tokens are private-use characters, which no caption contains. The normaliser replaces a new token with
    them.
    """
    backend, marks, count = tokenizer.backend_tokenizer, dict[str, str](), 0
    for new in new_tokens:
        if len(tokenizer(new.token, add_special_tokens=False).input_ids) == 1:
            raise UserError(
                "token-known",
                f"The vocabulary of the text encoder already has the token {new.token}.",
                where="lora.new_tokens",
                fix=f"Choose a word that is not in the vocabulary, such as <{new.file_stem}>.",
            )
        marks[new.pattern] = "".join(chr(FIRST_MARK + count + vector) for vector in range(new.vectors))
        count += new.vectors
    longest_first = sorted(marks.items(), key=lambda item: -len(item[0]))
    replaced = [normalizers.Replace(Regex(pattern), mark) for pattern, mark in longest_first]
    backend.normalizer = normalizers.Sequence([backend.normalizer, *replaced])
    tokenizer.add_tokens([AddedToken(mark, normalized=True) for mark in "".join(marks.values())])


class TokenEncoder(CaptionEncoder):
    """Encodes captions as token ids. Used if the text encoders run in every step.

    Args:
        source: the base.
        outputs: names of the entry's tensors, one for each tokenizer of the base.
        max_tokens: maximum number of tokens that are read, as in ``chunk_ids``.
        new_tokens: see ``tokenizer_of``.
    """

    def __init__(
        self, source: BaseSource, outputs: Sequence[str], max_tokens: int, new_tokens: Sequence[NewToken] = ()
    ) -> None:
        self._source, self._max_tokens, self._new_tokens = source, max_tokens, new_tokens
        self.entry = EntrySpec("tokens", (CAPTION,), {name: TensorSpec("int64", "S", PAD) for name in outputs})

    @cached_property
    def fingerprint(self) -> str:
        """Identity of everything that determines the token ids: all tokenizers, and the new tokens."""
        added = [f"{new.vectors} {normalised(new.token)}" for new in self._new_tokens]
        identity = digest([tokenizer_identity(self._source, tuple(self._source.layout.tokenizers)), *added])
        return f"tokens{ENCODING_VERSION}-{self._max_tokens}-{identity}"

    def opened(self, placement: Placement) -> EncodeCaption:
        tokenizers = [tokenizer_of(self._source, name, self._new_tokens) for name in self._source.layout.tokenizers]

        def encode(caption: str) -> Tensors:
            found = [chunk_ids(tokenizer, caption, self._max_tokens) for tokenizer in tokenizers]
            return dict(zip(self.entry.tensors, found, strict=True))

        return encode


def token_ids(tokenizer: CLIPTokenizer, caption: str) -> Tensor:
    """Return a caption's token ids, int64 [S], padded or truncated to the tokenizer's length.

    Vectors of new tokens have negative ids (see ``_with_negative``).
    """
    encoded = tokenizer(
        caption, padding="max_length", max_length=tokenizer.model_max_length, truncation=True, return_tensors="pt"
    )
    ids_S: Tensor = encoded.input_ids[0]
    return _with_negative(tokenizer, ids_S)


def _with_negative(tokenizer: CLIPTokenizer, ids: Tensor) -> Tensor:
    """Replace the ids of new tokens' vectors with -1, -2, ...

    So the end token, at which CLIP pools, still has the largest id. ``ids`` may have any shape.
    """
    first = tokenizer.get_added_vocab().get(chr(FIRST_MARK), len(tokenizer))
    return torch.where(ids < first, ids, first - 1 - ids)


def chunk_ids(tokenizer: CLIPTokenizer, caption: str, max_tokens: int) -> Tensor:
    """Return a caption's token ids in chunks, int64 [S], where S is a multiple of CLIP_TOKENS.

    Args:
        tokenizer: the tokenizer.
        caption: the caption.
        max_tokens: maximum number of tokens that are read, a multiple of CHUNK_TOKENS.
    """
    encoded = tokenizer(
        caption,
        padding="max_length",
        max_length=CLIP_TOKENS,
        truncation=True,
        return_overflowing_tokens=True,
        return_tensors="pt",
    )
    ids_KS: Tensor = encoded.input_ids[: max_tokens // CHUNK_TOKENS]
    return _with_negative(tokenizer, ids_KS.flatten())


def token_limit(tokenizer: CLIPTokenizer, max_tokens: int) -> TokenLimit:
    """Return the tokenizer and the limit including begin and end token, usable without torch or transformers."""
    return TokenLimit(tokenizer.backend_tokenizer.to_str(), max_tokens)


def embed(encoders: Sequence[nn.Module], ids_BS: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Compute prompt embeddings with several CLIP encoders, like ``StableDiffusionXLPipeline.encode_prompt``.

    Args:
        encoders: the encoders.
        ids_BS: token ids for each encoder.

    Returns:
        (penultimate hidden states of all encoders, concatenated in width [B, S, D]; the last encoder's pooled embedding
            [B, D]).
    """
    outputs = [states(encoder, ids) for encoder, ids in zip(encoders, ids_BS, strict=True)]
    return torch.cat([hidden for hidden, _ in outputs], dim=-1), outputs[-1][1]


def states(encoder: nn.Module, ids_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Return one CLIP encoder's penultimate hidden states [B, S, D] and pooled embedding of the first chunk [B, D]."""
    ids_NS = _chunks(ids_BS)
    output = encoder(ids_NS, attention_mask=_causal(ids_NS), output_hidden_states=True)
    pooled_ND = output.text_embeds if hasattr(output, "text_embeds") else output.pooler_output
    return _joined(output.hidden_states[-2], ids_BS), pooled_ND[:: len(ids_NS) // len(ids_BS)]


def last_states(encoder: nn.Module, ids_BS: Tensor) -> Tensor:
    """Return one CLIP encoder's last hidden states [B, S, D] after its final norm.

    They are the same as in ``StableDiffusionPipeline.encode_prompt``.
    """
    ids_NS = _chunks(ids_BS)
    return _joined(encoder(ids_NS, attention_mask=_causal(ids_NS)).last_hidden_state, ids_BS)


def _chunks(ids_BS: Tensor) -> Tensor:
    """Return the chunks of several captions as separate rows."""
    return ids_BS.reshape(-1, min(ids_BS.shape[1], CLIP_TOKENS))


def _joined(states_NSD: Tensor, ids_BS: Tensor) -> Tensor:
    """Return each caption's states [B, S, D], concatenated from its chunks' states."""
    return states_NSD.reshape(*ids_BS.shape, -1)


def _causal(ids_BS: Tensor) -> Tensor:
    """Return CLIP's causal mask, bool [1, 1, S, S].

    CLIP would build it, but some versions of transformers (5.17) omit this mask except during graph capture. Attention
    with a mask uses another kernel with different rounding. So the mask is always passed explicitly.
    """
    length = ids_BS.shape[-1]
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=ids_BS.device).tril()
