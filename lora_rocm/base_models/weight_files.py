"""Weight files and folders that a recipe names. Only safetensors files are read."""

from __future__ import annotations

import os
from pathlib import Path

from lora_rocm.errors import ModelError
from lora_rocm.model_files.component_folder import weight_files
from lora_rocm.model_files.header import TensorFileHeader, read_header, refuse_gguf, refuse_pickle

MODEL_EDITION = "Use the .safetensors files of the model, which nearly every publisher offers."


def existing_folder(name: str, key: str) -> Path:
    """Return the path of a folder that a recipe names. ``key``: the recipe's key, for the message.

    Raises:
        ModelError: model-missing.
    """
    path = Path(os.path.expanduser(name))
    if not os.path.isdir(path):
        what = "This is a file, not a folder." if os.path.exists(path) else "There is no such folder."
        raise ModelError("model-missing", what, where=f"{key}: {name}", fix="Correct the path, or remove the key.")
    return path


def refuse_other_files(path: Path, key: str) -> None:
    """Refuse a weights file unless it is a safetensors file. ``key``: the recipe's key, for the message."""
    refuse_pickle(path, MODEL_EDITION)
    refuse_gguf(path, f"{key}: {path}")
    if path.suffix.lower() != ".safetensors":
        fix = "Use a .safetensors file."
        raise ModelError("not-a-model", "This is not a .safetensors file.", where=f"{key}: {path}", fix=fix)


def headers_in(folder: Path) -> list[TensorFileHeader]:
    """Return the headers of all weight files in a component's folder."""
    if files := weight_files(folder):
        return [read_header(file) for file in files]
    for path in sorted(folder.glob("*")):
        refuse_pickle(path, MODEL_EDITION)
    raise ModelError(
        "weights-missing",
        "This folder contains no safetensors weights.",
        where=str(folder),
        fix="Download the model again, with its .safetensors files.",
    )
