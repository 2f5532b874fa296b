"""Reads evidence of the model family from the configs and headers of a base model and a LoRA file."""

from __future__ import annotations

from pathlib import Path

from lora_rocm.base_models.hub import download, looks_like_id
from lora_rocm.base_models.loading import BUILTIN_PREFIX, builtin_folder, read_config
from lora_rocm.errors import AdapterError
from lora_rocm.families.spec import Evidence
from lora_rocm.model_files.header import read_header

INDEX = "model_index.json"


def evidence(base: str, lora: Path) -> Evidence:
    """Collect evidence of the family without reading weights. For a hub id, model_index.json is downloaded.

    Args:
        base: a folder, a .safetensors file, a hub id, or a built-in model.
        lora: a .safetensors file. A PEFT folder gives no evidence.

    Raises:
        UserError: a file is damaged, or the hub refuses.
    """
    metadata = read_header(lora, AdapterError).metadata if lora.suffix == ".safetensors" and lora.is_file() else {}
    path = Path(base)
    if base.startswith(BUILTIN_PREFIX):
        folder: Path | None = builtin_folder(base)
    elif path.is_file():
        tensors = read_header(path).tensors if path.suffix == ".safetensors" else ()
        return Evidence(tensors=frozenset(tensors), metadata=metadata)
    elif path.is_dir() or not looks_like_id(base):
        folder = path
    else:
        folder = download(base, None, [INDEX], lambda found: (found / INDEX).is_file())
    index = folder / INDEX if folder is not None else None
    pipeline = str(read_config(index).get("_class_name", "")) if index is not None and index.is_file() else ""
    return Evidence(pipeline=pipeline, metadata=metadata)
