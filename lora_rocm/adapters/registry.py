"""Registry of adapter kinds, with one row per kind.

A new kind needs a class in ``adapters.kinds``, a row here, a section in ``recipe.adapter_sections``, and the names of
its tensors in ``model_files/adapter_parts.toml``. If ComfyUI reads the kind, it also needs a case in
``export.comfyui_check``.
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
"""Maps ``lora.type`` to the class of the adapter kind."""


def kind_for(lora: AdapterSection) -> type[Adapter]:
    """Return the adapter class for a recipe's ``lora`` section."""
    return KINDS[lora.type]


def kind_of_file(files: FileKind) -> type[Adapter]:
    """Return the adapter class that reads and writes this file kind."""
    return next(kind for kind in KINDS.values() if kind.files is files)


def file_kind(parts: KindParts) -> FileKind:
    """Return the file kind that has these tensor names and config values."""
    return next(kind.files for kind in KINDS.values() if kind.files.parts is parts)
