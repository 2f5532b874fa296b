"""Finds the adapters of a PEFT folder by the names of its files."""

from __future__ import annotations

from pathlib import Path

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def peft_folders(path: Path) -> dict[str, Path]:
    """Component ("" if there is only one adapter) -> PEFT folder; empty if ``path`` is no PEFT folder.

    ``path``: the folder of an adapter, its file of weights, or the folder above those of several components.
    """
    if path.name == PEFT_WEIGHTS and (path.parent / PEFT_CONFIG).is_file():
        path = path.parent
    if (path / PEFT_CONFIG).is_file():
        return {"": path}
    return (
        {folder.parent.name: folder.parent for folder in sorted(path.glob(f"*/{PEFT_CONFIG}"))} if path.is_dir() else {}
    )
