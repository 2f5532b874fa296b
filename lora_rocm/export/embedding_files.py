"""Writes the vectors of new tokens: one embedding file a token, in a folder beside the LoRA file.

A1111 and ComfyUI read this form: a tensor [N, D] for each text encoder (``FamilySpec.embedding_keys``). The vectors are
not put into the LoRA file ("bundle_emb."): A1111 and OneTrainer would read them there, but diffusers refuses a file
with keys that it does not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lora_rocm.adapters.base import Adapter
from lora_rocm.adapters.new_tokens import NAME, TOKEN_FIELD
from lora_rocm.export.safetensors_writer import TensorFile
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.layout import embeddings_of


def embedding_files(lora: Path, adapter: Adapter, recipe: Recipe) -> Iterator[tuple[Path, TensorFile]]:
    """Yield path and content of each new token's file, in float32.

    Args:
        lora: the LoRA file, or folder of PEFT folders, beside which they belong.
        adapter: holds the vectors.
        recipe: names the tokens.
    """
    tokens = recipe.lora.new_tokens
    if not tokens:
        return
    sizes, state = [token.vectors for token in tokens], adapter.state()
    of_key = {key: state[f"{NAME}.{name}"].float().split(sizes) for name, key in recipe.spec.embedding_keys.items()}
    for number, token in enumerate(tokens):
        metadata = {
            "format": "pt",
            "modelspec.architecture": recipe.spec.metadata.architecture.replace("/lora", "/textual-inversion"),
            "modelspec.title": token.file_stem,
            TOKEN_FIELD: token.token,
        }
        tensors = {key: vectors[number].contiguous() for key, vectors in of_key.items()}
        yield embeddings_of(lora) / f"{token.file_stem}.safetensors", TensorFile(tensors, metadata)
