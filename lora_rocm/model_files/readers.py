"""Which programs read a LoRA file, by its family and spelling (``readers.toml``)."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from lora_rocm.foundation.tables import read_table

UNKNOWN, PEFT = "not known", "peft"
VLLM_RANKS = (16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's --max-lora-rank, the default first (vllm/config/lora.py)."""
READ = ("reads it", "read it")
PROGRAMS = {
    "diffusers": "diffusers",
    "comfyui": "ComfyUI",
    "kohya": "kohya's tools",
    "vllm": "vLLM",
    "llama_cpp": "llama.cpp's convert_lora_to_gguf.py",
    "forge": "Forge and A1111",
    "peft": "PEFT",
}
"""Field -> program."""


@dataclass(frozen=True)
class Spelling:
    """A way of naming modules, by a regular expression that is found in the names of a file's tensors."""

    name: str
    pattern: str


@dataclass(frozen=True)
class Readers:
    """What programs do with a LoRA file.

    families: values of ``model.family``. spelling: of the file; empty: none that has a name. pattern: found in the
    names of tensors, with dots as ``_``. alpha: the file has alphas. The others are what each program does; empty: the
    file is not meant for it.
    """

    families: tuple[str, ...]
    spelling: str = ""
    pattern: str = ""
    alpha: bool = False
    diffusers: str = UNKNOWN
    comfyui: str = UNKNOWN
    kohya: str = "read nothing of it"
    vllm: str = ""
    llama_cpp: str = ""
    forge: str = ""
    peft: str = ""

    def of_rank(self, rank: int) -> Readers:
        """The same for a file of this rank, which vLLM may have to be told."""
        if self.vllm not in READ or rank <= VLLM_RANKS[0]:
            return self
        fits = next((limit for limit in VLLM_RANKS if rank <= limit), None)
        told = f"only if it is started with --max-lora-rank {fits}" if fits else f"reads ranks up to {VLLM_RANKS[-1]}"
        return replace(self, vllm=told)

    @property
    def told(self) -> dict[str, str]:
        """Field of a program -> what it does with the file; without programs that such files are not meant for."""
        return {field: text for field in PROGRAMS if (text := str(getattr(self, field)))}

    @property
    def cannot_read(self) -> tuple[str, ...]:
        """The programs that do not read the file, or not exactly, in words."""
        return tuple(f"{PROGRAMS[field]} ({text})" for field, text in self.told.items() if text not in READ)


@dataclass(frozen=True)
class ReaderTable:
    """The file."""

    spellings: tuple[Spelling, ...]
    readers: tuple[Readers, ...]


@cache
def _table() -> ReaderTable:
    return read_table(Path(__file__).with_name("readers.toml"), ReaderTable)


def spelling_of(names: Collection[str]) -> str:
    """Return the spelling of a file's tensor names; empty if it has no name."""
    return next((row.name for row in _table().spellings if any(re.match(row.pattern, name) for name in names)), "")


def readers_of(names: Collection[str], families: Collection[str]) -> Readers | None:
    """Return what programs do with a LoRA that has these tensors and is of one of these families; None: not known."""
    spelling, text = spelling_of(names), "\n".join(name.replace(".", "_") for name in names)
    has_alpha = any(name.endswith(".alpha") for name in names)
    for row in _table().readers:
        of_family = bool(families) and set(families) <= set(row.families)
        if of_family and row.spelling == spelling and row.alpha <= has_alpha and re.search(row.pattern, text):
            return row
    return None
