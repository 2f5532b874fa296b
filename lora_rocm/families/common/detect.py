"""Determines possible model families of a base model and a LoRA file from configs and headers."""

from __future__ import annotations

from pathlib import Path

from lora_rocm.base_models.hub import download, resembles_id
from lora_rocm.base_models.loading import builtin_folder
from lora_rocm.errors import AdapterError
from lora_rocm.families.spec import Evidence
from lora_rocm.foundation.names import BUILTIN
from lora_rocm.model_files.config_file import read_config
from lora_rocm.model_files.header import read_header
from lora_rocm.model_files.models import INDEXES, PARTS, index_of, model_of, pipeline_of
from lora_rocm.model_files.recognise_adapter import families_of


def evidence(base: str, lora: Path) -> Evidence:
    """Return evidence of the family without reading weights. For a hub id, the model index is downloaded.

    Args:
        base: a folder, a .safetensors file, a hub id, or a built-in model.
        lora: a .safetensors file. A PEFT folder gives no evidence.

    Raises:
        UserError: a file is damaged, or the download fails.
    """
    of_lora: tuple[str, ...] = ()
    if lora.suffix == ".safetensors" and lora.is_file():
        header = read_header(lora, AdapterError)
        of_lora = families_of(header.shapes, header.metadata)
    path = Path(base)
    if path.is_file():
        found = model_of(read_header(path).shapes) if path.suffix == ".safetensors" else None
        return Evidence((found.family,) if found is not None and found.part in PARTS else (), of_lora)
    folder: Path | None = path
    if base.startswith(BUILTIN):
        folder = builtin_folder(base)
    elif not path.is_dir() and resembles_id(base):
        folder = download(base, None, list(INDEXES), lambda found: index_of(found) is not None)
    return Evidence(_families_of_folder(folder) if folder is not None else (), of_lora)


def _families_of_folder(folder: Path) -> tuple[str, ...]:
    index = index_of(folder)
    known = pipeline_of(str(read_config(index).get("_class_name", ""))) if index is not None else None
    return known.families if known is not None else ()
