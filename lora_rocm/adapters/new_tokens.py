"""Trained vectors of new tokens in text encoders (pivotal tuning), and their embedding files.

Tokenizers map the vectors to the ids -1, -2, ... in the order of ``lora.new_tokens``. The vocabulary's embedding table
stays frozen. Suffixes: N vectors, B batch, S tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from lora_rocm.base_models.safetensors_file import read_tensors
from lora_rocm.dataset.captions.caption_length import TokenLimit
from lora_rocm.errors import AdapterError
from lora_rocm.families.base import LoadedModel, ModelFamily
from lora_rocm.model_files.header import read_header
from lora_rocm.recipe.adapter_sections import NewToken
from lora_rocm.rundir.layout import embeddings_of

NAME = "new_tokens"
"""Prefix of the trained tensors' names; the component's name follows."""
TOKEN_FIELD = "modelspec.trigger_phrase"
"""Metadata field of an embedding file that stores the token. The file's name may lack some of the token's letters."""
SHOWN = 4  # tensors of a file that an error names


class NewTokenLayer(nn.Module):
    """Token embedding of a text encoder, extended by the vectors of new tokens.

    Args:
        base_layer: the vocabulary's embedding table.
        num_vectors: number of new vectors (N). They are float32, and zero until ``start`` fills them.
    """

    def __init__(self, base_layer: nn.Embedding, num_vectors: int) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.rows_ND = nn.Parameter(torch.zeros(num_vectors, base_layer.embedding_dim))

    def forward(self, ids_BS: Tensor) -> Tensor:
        known_BSD: Tensor = self.base_layer(ids_BS.clamp(min=0))
        new_BSD = functional.embedding((-1 - ids_BS).clamp(min=0), self.rows_ND).to(known_BSD.dtype)
        return torch.where((ids_BS < 0)[..., None], new_BSD, known_BSD)


def insert(family: ModelFamily, model: LoadedModel, tokens: Sequence[NewToken]) -> None:
    """Add vectors for new tokens to a model's text encoders. Does nothing if there are no new tokens."""
    for component in family.embedding_keys if tokens else ():
        encoder: PreTrainedModel = model.components[component]
        num_vectors = sum(token.vectors for token in tokens)
        encoder.set_input_embeddings(NewTokenLayer(encoder.get_input_embeddings(), num_vectors))


def layers_of(model: LoadedModel) -> dict[str, NewTokenLayer]:
    """Return the layers with new tokens, keyed by component."""
    return {
        component: layer
        for component, root in model.components.items()
        for layer in root.modules()
        if isinstance(layer, NewTokenLayer)
    }


@torch.no_grad()
def start(family: ModelFamily, model: LoadedModel, tokens: Sequence[NewToken]) -> None:
    """Fill the vectors of new tokens from ``init`` or ``init_from``. On the meta device, only check these settings.

    The vectors of a token without either setting stay zero, to be loaded from a checkpoint.

    Raises:
        AdapterError: "token-init-empty", or an error of ``read_vectors``.
        ModelError: an embedding file is missing or damaged.
    """
    layers = layers_of(model)
    texts = family.token_limits() if any(token.init for token in tokens) else [None] * len(layers)
    for (component, key), text in zip(family.embedding_keys.items() if tokens else (), texts, strict=True):
        table_VD, rows_ND = layers[component].base_layer.weight, layers[component].rows_ND
        for token, vectors_ND in zip(tokens, rows_ND.split([token.vectors for token in tokens]), strict=True):
            if token.init_from is not None:
                vectors_ND.copy_(read_vectors(Path(token.init_from).expanduser(), key, vectors_ND.shape))
            elif token.init is not None and text is not None:
                vectors_ND.copy_(table_VD[_ids_of(token, token.init, text, len(table_VD))].float().mean(dim=0))


def _ids_of(token: NewToken, text: str, limit: TokenLimit, vocabulary: int) -> list[int]:
    """Return the vocabulary ids of a text, without the begin and end tokens and without other new tokens."""
    from tokenizers import Tokenizer

    found = Tokenizer.from_str(limit.tokenizer).encode(text, add_special_tokens=False)
    ids = [each for each, counts in zip(found.ids, found.attention_mask, strict=True) if counts and each < vocabulary]
    if not ids:
        raise AdapterError(
            "token-init-empty",
            f"The text {text!r} contains no token of the vocabulary.",
            where=f"lora.new_tokens: {token.token}",
            fix="Set init to a word with the token's meaning, such as creature.",
        )
    return ids


def read_vectors(path: Path, key: str, shape: Sequence[int]) -> Tensor:
    """Read the vectors for one text encoder from an embedding file in the format of A1111, ComfyUI or diffusers.

    Args:
        path: path of a .safetensors file.
        key: name of the tensor. If the file has only one tensor, that tensor is read regardless of its name.
        shape: required shape (N, D). The file's tensor may lack the first axis if N is 1.

    Returns:
        The vectors, of shape [N, D], in the file's dtype.

    Raises:
        ModelError: the file is missing or damaged.
        AdapterError: "embedding-unfit", the file has no such tensor.
    """
    tensors = read_tensors(read_header(path))
    found = next(iter(tensors.values())) if len(tensors) == 1 else tensors.get(key)
    if found is None or tuple(found.shape if found.dim() > 1 else (1, *found.shape)) != tuple(shape):
        seen = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in list(tensors.items())[:SHOWN])
        raise AdapterError(
            "embedding-unfit",
            f"This is not a matching embedding: it must contain {key} {list(shape)}, but it has {seen or 'nothing'}.",
            where=str(path),
            fix="Use an embedding for this model's family, and set vectors to its number of vectors.",
        )
    return found


def tokens_next_to(lora: Path, wanted: Sequence[NewToken] = ()) -> tuple[NewToken, ...]:
    """Return the tokens that have an embedding file next to a LoRA file, with ``init_from`` set to this file.

    Each token of ``wanted`` must have a file. These tokens come first in the result.

    Raises:
        ModelError: a file is damaged.
        AdapterError: "embedding-unfit", a file is not an embedding; "embedding-missing", a wanted token has no file.
    """
    found, folder = dict[str, NewToken](), embeddings_of(lora)
    for path in sorted(folder.glob("*.safetensors")):
        header = read_header(path)
        shape, name = next(iter(header.shapes.values()), (0,)), header.metadata.get(TOKEN_FIELD, path.stem)
        try:
            found[name] = NewToken(token=name, vectors=shape[0] if len(shape) > 1 else 1, init_from=str(path))
        except ValidationError as error:
            what = f"The file is not an embedding of a token: {error.errors()[0]['msg']}."
            raise AdapterError(
                "embedding-unfit", what, where=str(path), fix="Move the file out of the folder."
            ) from error
    for token in wanted:
        if token.token not in found:
            raise AdapterError(
                "embedding-missing",
                f"The embedding file of the token {token.token} is missing next to the LoRA.",
                where=str(folder / f"{token.file_stem}.safetensors"),
                fix="Move the folder back next to the LoRA, or write it again with lora-rocm export.",
            )
    return (*(found.pop(token.token) for token in wanted), *found.values())
