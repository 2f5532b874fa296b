"""Caption entries of Stable Diffusion 1.x and 2.x: the text encoder's last states, or token ids alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from lora_rocm.base_models.loading import Source
from lora_rocm.dataset.entry_spec import CAPTION, EntrySpec, TensorSpec
from lora_rocm.device.placement.base import Placement
from lora_rocm.families.base import Encode, Inputs, Tensors
from lora_rocm.families.common import clip
from lora_rocm.families.common.tokenizers import tokenizer_identity
from lora_rocm.families.common.vae import CPU, ENCODING_VERSION
from lora_rocm.recipe.adapter_sections import NewToken


class TextEncoder:
    """Encodes captions to the embeddings of ``StableDiffusionPipeline.encode_prompt``, in float32."""

    entry = EntrySpec("text", (CAPTION,), {"prompt_embeds": TensorSpec("float32", "SD", clip.PAD)})

    def __init__(self, source: Source, max_tokens: int) -> None:
        self._source, self._max_tokens = source, max_tokens

    @cached_property
    def fingerprint(self) -> str:
        weights = self._source.fingerprint("text_encoder")
        identity = tokenizer_identity(self._source, ("tokenizer",))
        return f"text-last{ENCODING_VERSION}-{self._max_tokens}-{weights}-{identity}"

    def in_tiles(self) -> None:
        return None

    def load(self, door: Placement) -> Encode:
        tokenizer = clip.tokenizer_of(self._source, "tokenizer")
        encoder = self._source.load("text_encoder", torch.float32, CPU)
        door.place(encoder, "text_encoder")

        @torch.no_grad()
        def encode(inputs: Inputs) -> Tensors:
            caption = inputs[CAPTION]
            assert isinstance(caption, str), "the text encoder encodes captions"
            ids_BS = door.transfer.send_checked(clip.chunk_ids(tokenizer, caption, self._max_tokens)[None], "token ids")
            return door.transfer.receive({"prompt_embeds": clip.last_states(encoder, ids_BS)[0]})

        return encode


class TokenEncoder:
    """Encodes captions to token ids, used if the text encoder runs in every step."""

    entry = EntrySpec("tokens", (CAPTION,), {"input_ids": TensorSpec("int64", "S", clip.PAD)})

    def __init__(self, source: Source, max_tokens: int, new_tokens: Sequence[NewToken] = ()) -> None:
        self._source, self._max_tokens, self._new_tokens = source, max_tokens, new_tokens

    @cached_property
    def fingerprint(self) -> str:
        identity = clip.identity_of_tokens(self._source, self._new_tokens)
        return f"tokens{ENCODING_VERSION}-{self._max_tokens}-{identity}"

    def in_tiles(self) -> None:
        return None

    def load(self, door: Placement) -> Encode:
        tokenizer = clip.tokenizer_of(self._source, "tokenizer", self._new_tokens)

        def encode(inputs: Inputs) -> Tensors:
            caption = inputs[CAPTION]
            assert isinstance(caption, str), "the tokenizer encodes captions"
            return {"input_ids": clip.chunk_ids(tokenizer, caption, self._max_tokens)}

        return encode
