"""What a base model and a LoRA file show of their family, read from configs and headers."""

from __future__ import annotations

from pathlib import Path

from lora_rocm.errors import AdapterError
from lora_rocm.families.hub import download, looks_like_id
from lora_rocm.families.loading import BUILTIN_PREFIX, builtin_folder, read_config
from lora_rocm.families.spec import Evidence
from lora_rocm.families.weightfiles import read_header

INDEX = "model_index.json"


def evidence(base: str, lora: Path) -> Evidence:
    """What can be seen of both without reading weights. Of a hub id its model_index.json is fetched.

    Args:
        base: a folder, a .safetensors file, a hub id, or what ships with the program.
        lora: a .safetensors file; a PEFT folder shows nothing.

    Raises:
        UserError: a file is damaged, or the hub says no.
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
