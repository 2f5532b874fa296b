"""Registry of adapter kinds, one row each.

A new kind needs, in addition to its class in ``adapters.kinds`` and a row here: its section in
``recipe.adapter_sections``, the parts of its files in
``model_files/adapter_parts.toml``, and a case of ``export.comfyui_check`` if ComfyUI reads it.
"""

from __future__ import annotations

from collections.abc import Mapping

from lora_rocm.adapters.base import Adapter
from lora_rocm.adapters.entry import FileKind
from lora_rocm.adapters.kinds.ia3 import Ia3Adapter
from lora_rocm.adapters.kinds.loha import LohaAdapter
from lora_rocm.adapters.kinds.lokr import LokrAdapter
from lora_rocm.adapters.kinds.lora import LoraAdapter
from lora_rocm.adapters.kinds.oft import OftAdapter
from lora_rocm.model_files.adapter_parts import KindParts
from lora_rocm.recipe.adapter_sections import AdapterSection

KINDS: Mapping[str, type[Adapter]] = {
    "lora": LoraAdapter,
    "lokr": LokrAdapter,
    "loha": LohaAdapter,
    "oft": OftAdapter,
    "ia3": Ia3Adapter,
}
"""``lora.type`` -> kind."""


def kind_for(lora: AdapterSection) -> type[Adapter]:
    """Return the adapter kind of a recipe's section."""
    return KINDS[lora.type]


def kind_of_file(files: FileKind) -> type[Adapter]:
    """Return the adapter kind that uses this file kind."""
    return next(kind for kind in KINDS.values() if kind.files is files)


def file_kind(parts: KindParts) -> FileKind:
    """Return the file kind with these parts."""
    return next(kind.files for kind in KINDS.values() if kind.files.parts is parts)
