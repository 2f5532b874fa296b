"""Finds the adapters of a PEFT folder by the names of its files."""

from __future__ import annotations

from pathlib import Path

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def peft_folders(path: Path) -> dict[str, Path]:
    """Component ("" if there is only one adapter) -> PEFT folder; empty if ``path`` is no PEFT folder.

    Of several components each folder counts that has a config or weights: one without its other half is damaged.

    ``path``: the folder of an adapter, its file of weights, or the folder above those of several components.
    """
    if path.name == PEFT_WEIGHTS and (path.parent / PEFT_CONFIG).is_file():
        path = path.parent
    if (path / PEFT_CONFIG).is_file():
        return {"": path}
    names = (PEFT_CONFIG, PEFT_WEIGHTS) if path.is_dir() else ()
    found = {file.parent for name in names for file in path.glob(f"*/{name}")}
    return {folder.name: folder for folder in sorted(found)}
