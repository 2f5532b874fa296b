"""Which programs read an adapter file, by its family, spelling and kind (``readers.toml``)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from lora_rocm.foundation.tables import read_table
from lora_rocm.model_files.adapter_sizes import alphas_of, ranks_of
from lora_rocm.model_files.adapters import kind_of
from lora_rocm.model_files.header import TensorFileHeader

UNKNOWN = "not known"
ANY, PLAIN = "any", "LoRA"
NORMS = " and trained norms"
VLLM_RANKS = (16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's --max-lora-rank, the default first (vllm/config/lora.py)."""
READ = ("reads it", "read it")
REFUSES_LARGE_FACTOR = "refuses it: lora.factor is above the square root of a side"
EXACTLY = "reads it exactly"
"""Starts the text of a program that reads the file, before a remark."""
PROGRAMS = {
    "diffusers": "diffusers",
    "comfyui": "ComfyUI",
    "kohya": "kohya's tools",
    "vllm": "vLLM",
    "llama_cpp": "llama.cpp's convert_lora_to_gguf.py",
    "forge": "Forge",
    "a1111": "A1111",
    "lycoris": "LyCORIS",
    "peft": "PEFT",
}
"""Field -> program."""


def is_read(text: str) -> bool:
    """Whether a program reads a file exactly, according to its text in ``Readers``."""
    return text in READ or text.startswith(EXACTLY)


@dataclass(frozen=True)
class Spelling:
    """A spelling of module names, by a regular expression that is found in the names of a file's tensors."""

    name: str
    pattern: str


@dataclass(frozen=True)
class Readers:
    """Compatibility of an adapter file with programs.

    families: values of ``model.family``. kinds: kinds of adapter as ``kind_of`` names them, without trained norms;
    none: all. spelling: the file's spelling; empty: one without a name. pattern: found in the names of tensors, with
    dots as ``_``.
    alpha: the file has alphas. unlike_alphas: its alphas differ. metadata: a field of its metadata, or any if it
    is empty. The other fields describe what each program does; empty: the file is not meant for it.
    """

    families: tuple[str, ...]
    kinds: tuple[str, ...] = (PLAIN,)
    spelling: str = ""
    pattern: str = ""
    alpha: bool = False
    unlike_alphas: bool = False
    metadata: str = ""
    diffusers: str = UNKNOWN
    comfyui: str = UNKNOWN
    kohya: str = "load nothing from it"
    vllm: str = ""
    llama_cpp: str = ""
    forge: str = ""
    a1111: str = ""
    lycoris: str = ""
    peft: str = ""

    @property
    def with_norms(self) -> Readers:
        """The same for a file that holds trained norms, too."""
        kohya = "leave the norms out in networks.lora; LyCORIS reads it" if self.kohya in READ else self.kohya
        return replace(self, diffusers="refuses it", kohya=kohya)

    def of_rank(self, rank: int) -> Readers:
        """The same for a file of this rank, which vLLM may need as an option."""
        if self.vllm not in READ or rank <= VLLM_RANKS[0]:
            return self
        fits = next((limit for limit in VLLM_RANKS if rank <= limit), None)
        told = f"only if it is started with --max-lora-rank {fits}" if fits else f"reads ranks up to {VLLM_RANKS[-1]}"
        return replace(self, vllm=told)

    def differing(self, share: float) -> Readers:
        """The same if ComfyUI's rule for a DoRA, which Forge uses too, alters this share of the trained change."""
        more = f"; {share:.1%} of the change differs"
        return replace(
            self, **{field: getattr(self, field) + more for field in ("comfyui", "forge") if field in self.by_program}
        )

    @property
    def by_program(self) -> dict[str, str]:
        """Field of a program -> what it does with the file; without programs that such files are not meant for."""
        return {field: text for field in PROGRAMS if (text := str(getattr(self, field)))}

    @property
    def cannot_read(self) -> tuple[str, ...]:
        """The programs that do not read the file, or not exactly, as text."""
        return tuple(f"{PROGRAMS[field]} ({text})" for field, text in self.by_program.items() if not is_read(text))

    @property
    def can_read(self) -> tuple[str, ...]:
        """The programs that read the file, with a remark where there is one."""
        read = {PROGRAMS[field]: text for field, text in self.by_program.items() if is_read(text)}
        return tuple(program if text in READ else f"{program} ({text})" for program, text in read.items())


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


def readers_of(
    names: Collection[str], families: Collection[str], metadata: Collection[str] = (), *, unlike_alphas: bool = False
) -> Readers | None:
    """Return the compatibility of an adapter file; None: not known.

    Args:
        names: names of its tensors.
        families: the families it may be of.
        metadata: the fields of its metadata.
        unlike_alphas: whether its alphas differ.
    """
    spelling, text, kind = spelling_of(names), "\n".join(name.replace(".", "_") for name in names), kind_of(names)
    has_alpha = any(name.endswith(".alpha") for name in names)
    for row in _table().readers:
        of_family = bool(families) and set(families) <= set(row.families)
        of_kind = not row.kinds or kind.removesuffix(NORMS) in row.kinds
        fits = of_family and of_kind and row.spelling in (spelling, ANY) and row.alpha <= has_alpha
        fits = fits and row.unlike_alphas <= unlike_alphas
        if fits and row.metadata in ("", *metadata) and re.search(row.pattern, text):
            return row.with_norms if kind.endswith(NORMS) else row
    return None


def readers_line(can_read: Collection[str], cannot_read: Collection[str]) -> str:
    """Return one line about the programs that read a file, from the texts of ``Readers``; empty if nothing is known."""
    if not cannot_read:
        return f"Read by {', '.join(can_read)}" if can_read else ""
    read = f"Read by {', '.join(can_read)}; not" if can_read else "Not"
    return f"{read}, or not exactly, by {', '.join(cannot_read)}"


def is_cut_above_root(shapes: Mapping[str, Sequence[int]]) -> bool:
    """Whether a first matrix of a LoKr file has a larger side than the second one.

    LyCORIS gives the first matrix the smaller of a side's two divisors (``factorization``), and refuses other files.
    """
    for name, shape in shapes.items():
        module, _, role = name.rpartition(".")
        if role in ("lokr_w1", "lokr_w1_a"):
            whole, first, last = (f"{module}.lokr_w2{ending}" for ending in ("", "_a", "_b"))
            second = shapes.get(whole) or (*shapes.get(first, ())[:1], *shapes.get(last, ())[1:2])
            sides = shape if role == "lokr_w1" else (*shape[:1], *shapes.get(f"{module}.lokr_w1_b", ())[1:2])
            if any(mine > theirs for mine, theirs in zip(sides, second, strict=False)):
                return True
    return False


def readers_of_file(header: TensorFileHeader, families: Collection[str]) -> Readers | None:
    """Return ``readers_of`` for the adapter file with this header, adjusted for its ranks."""
    unlike = len({round(alpha, 4) for alpha in alphas_of(header).values()}) > 1
    row = readers_of(header.tensors, families, header.metadata, unlike_alphas=unlike)
    if row is not None and row.lycoris in READ and is_cut_above_root(header.shapes):
        row = replace(row, lycoris=REFUSES_LARGE_FACTOR)
    return row and row.of_rank(max(ranks_of(header), default=0))
