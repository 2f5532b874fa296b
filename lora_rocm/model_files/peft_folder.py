"""Finds the adapters in a PEFT folder by file name, and reads their configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lora_rocm.errors import AdapterError
from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.foundation.json_text import parse_json

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 22


def read_peft_config(folder: Path) -> dict[str, Any] | None:
    """Return the config of a PEFT folder, or None if the folder has none. The values are not checked.

    Raises:
        AdapterError: lora-unreadable: the config is not a JSON object.
        OSError: the config cannot be read.
    """
    path = folder / PEFT_CONFIG
    if not path.is_file():
        return None
    try:
        found = parse_json(read_plain(path, MAX_CONFIG_BYTES).decode("utf-8"))
    except ValueError as error:
        what = f"{PEFT_CONFIG} of this LoRA cannot be read: {error}."
        raise AdapterError("lora-unreadable", what, where=str(path), fix="Save or download it again.") from error
    if not isinstance(found, dict):
        what = f"{PEFT_CONFIG} of this LoRA is not a JSON object."
        raise AdapterError("lora-unreadable", what, where=str(path), fix="Save or download it again.")
    return found


def peft_folders(path: Path) -> dict[str, Path]:
    """Return PEFT folders, keyed by component ("" for a single adapter). Empty if ``path`` is not a PEFT folder.

    With several components, a folder is included if it has a config or weights. If either is missing, the folder is
    reported as damaged later.

    ``path``: the folder of an adapter, its weight file, or the folder that contains the folders of several components.
    """
    if path.name == PEFT_WEIGHTS and (path.parent / PEFT_CONFIG).is_file():
        path = path.parent
    if (path / PEFT_CONFIG).is_file():
        return {"": path}
    names = (PEFT_CONFIG, PEFT_WEIGHTS) if path.is_dir() else ()
    found = {file.parent for name in names for file in path.glob(f"*/{name}")}
    return {folder.name: folder for folder in sorted(found)}
