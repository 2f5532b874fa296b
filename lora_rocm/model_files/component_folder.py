"""Finds the weight files of one component of a diffusers model, or of a transformers model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PureWindowsPath

from lora_rocm.model_files.config_file import read_config
from lora_rocm.model_files.header import damaged

COMPONENT_CONFIG = "config.json"
STEMS = ("diffusion_pytorch_model", "model")
VARIANTS = ("", ".fp16", ".bf16")


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a component's folder; float32 is preferred over fp16 and bf16.

    Empty if there are none.

    Raises:
        ModelError: config-unreadable or weights-damaged: the index that lists the files is faulty.
    """
    for stem in STEMS:
        for variant in VARIANTS:
            index, file = folder / f"{stem}.safetensors.index{variant}.json", folder / f"{stem}{variant}.safetensors"
            if index.is_file():
                return [folder / name for name in indexed(read_config(index), index)]
            if file.is_file():
                return [file]
    return []


def indexed(index: Mapping[str, object], path: Path) -> list[str]:
    """Return the file names in an index of weight files. Files outside the index's folder do not belong to the model.

    Raises:
        ModelError: weights-damaged: the index lists anything but files in its own folder.
    """
    named = index.get("weight_map")
    names = list(named.values()) if isinstance(named, dict) else []
    if not names or not all(
        isinstance(name, str) and PureWindowsPath(name).name == name not in ("", "..") for name in names
    ):
        raise damaged(path, "it does not list files in its own folder")
    return sorted(set(names))
