"""The kinds of adapters: one row each."""

from __future__ import annotations

from collections.abc import Mapping

from lora_rocm.adapters.base import Adapter
from lora_rocm.adapters.entry import FileKind
from lora_rocm.adapters.lokr import LokrAdapter
from lora_rocm.adapters.lora import LoraAdapter
from lora_rocm.recipe.schema import AdapterSection

KINDS: Mapping[str, type[Adapter]] = {"lora": LoraAdapter, "lokr": LokrAdapter}
"""``lora.type`` -> kind. Of a file that holds several, the first is taken, and then the others are too much."""


def kind_for(lora: AdapterSection) -> type[Adapter]:
    """The kind that a recipe's section asks for."""
    return KINDS[lora.type]


def kind_of_file(files: FileKind) -> type[Adapter]:
    """The kind whose files these are."""
    return next(kind for kind in KINDS.values() if kind.files is files)


def file_kinds() -> tuple[FileKind, ...]:
    """How each kind stands in files, in the order of the table."""
    return tuple(kind.files for kind in KINDS.values())
