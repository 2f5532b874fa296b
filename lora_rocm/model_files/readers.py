"""Lists the programs that can read an adapter file, by its family, spelling and kind (``readers.toml``)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from lora_rocm.foundation.tables import read_table
from lora_rocm.model_files.adapter_sizes import alphas_of, ranks_of
from lora_rocm.model_files.header import TensorFileHeader
from lora_rocm.model_files.recognise_adapter import kind_of

UNKNOWN = "not known"
ANY, PLAIN = "any", "LoRA"
NORMS = " and trained norms"
VLLM_RANKS = (16, 32, 64, 128, 256, 320, 512)
"""Accepted values of vLLM's --max-lora-rank; the first is the default (vllm/config/lora.py)."""
READ = ("reads it", "read it")
REFUSES_LARGE_FACTOR = "refuses it: lora.factor is above the square root of a side"
EXACTLY = "reads it exactly"
"""Start of a program's text in ``Readers`` if the program reads the file exactly, and a remark follows."""
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
"""Display name of the program, for each field of ``Readers``."""


def is_read(text: str) -> bool:
    """Whether a program reads a file exactly. ``text``: the program's field in ``Readers``."""
    return text in READ or text.startswith(EXACTLY)


@dataclass(frozen=True)
class Spelling:
    """A spelling of module names, and the regular expression that identifies it at the start of a tensor name."""

    name: str
    pattern: str


@dataclass(frozen=True)
class Readers:
    """A row of the table: the programs that can read some adapter files. The first fields are conditions on the file.

    families: values of ``model.family``.
    kinds: kinds of adapter as ``kind_of`` names them, without trained norms; empty for all kinds.
    spelling: name of the file's spelling; empty for a spelling without a name, "any" for all spellings.
    pattern: regular expression to find in the tensor names, with dots replaced by "_".
    alpha: whether the file needs alphas.
    unlike_alphas: whether its alphas need to differ.
    metadata: a field that the file's metadata need; empty for any metadata.

    Each other field describes what one program does with the file; it is empty if the file is not meant for the
    program.
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
        """Return this row, adjusted for a file that also contains trained norms."""
        kohya = "leave the norms out in networks.lora; LyCORIS reads it" if self.kohya in READ else self.kohya
        return replace(self, diffusers="refuses it", kohya=kohya)

    def of_rank(self, rank: int) -> Readers:
        """Return this row, adjusted for a file of this rank: vLLM may need an option for it."""
        if self.vllm not in READ or rank <= VLLM_RANKS[0]:
            return self
        fits = next((limit for limit in VLLM_RANKS if rank <= limit), None)
        told = f"only if it is started with --max-lora-rank {fits}" if fits else f"reads ranks up to {VLLM_RANKS[-1]}"
        return replace(self, vllm=told)

    def differing(self, share: float) -> Readers:
        """Return this row with a remark for ComfyUI and Forge: ``share`` of the update differs by their DoRA rule."""
        more = f"; {share:.1%} of the change differs"
        return replace(
            self, **{field: getattr(self, field) + more for field in ("comfyui", "forge") if field in self.by_program}
        )

    @property
    def by_program(self) -> dict[str, str]:
        """The use of the file by each program, keyed by the program's field.

        Programs that the file is not meant for are omitted.
        """
        return {field: text for field in PROGRAMS if (text := str(getattr(self, field)))}

    @property
    def cannot_read(self) -> tuple[str, ...]:
        """Programs that do not read the file exactly, each with the reason in parentheses."""
        return tuple(f"{PROGRAMS[field]} ({text})" for field, text in self.by_program.items() if not is_read(text))

    @property
    def can_read(self) -> tuple[str, ...]:
        """Programs that read the file exactly, some with a remark in parentheses."""
        read = {PROGRAMS[field]: text for field, text in self.by_program.items() if is_read(text)}
        return tuple(program if text in READ else f"{program} ({text})" for program, text in read.items())


@dataclass(frozen=True)
class ReaderTable:
    """The table ``readers.toml``."""

    spellings: tuple[Spelling, ...]
    readers: tuple[Readers, ...]


@cache
def _table() -> ReaderTable:
    return read_table(Path(__file__).with_name("readers.toml"), ReaderTable)


def spelling_of(names: Collection[str]) -> str:
    """Return the spelling of a file's tensor names; empty if it is not in the table."""
    return next((row.name for row in _table().spellings if any(re.match(row.pattern, name) for name in names)), "")


def readers_of(
    names: Collection[str], families: Collection[str], metadata: Collection[str] = (), *, unlike_alphas: bool = False
) -> Readers | None:
    """Return the programs that can read an adapter file, or None if this is unknown.

    Args:
        names: names of the file's tensors.
        families: families to which the file may belong.
        metadata: names of its metadata fields.
        unlike_alphas: whether its alphas differ from each other.
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
    """Return one line that lists the programs that read a file, and those that do not; empty if there are none."""
    if not cannot_read:
        return f"Read by {', '.join(can_read)}" if can_read else ""
    read = f"Read by {', '.join(can_read)}; not" if can_read else "Not"
    return f"{read}, or not exactly, by {', '.join(cannot_read)}"


def is_cut_above_root(shapes: Mapping[str, Sequence[int]]) -> bool:
    """Whether the first matrix of any module in a LoKr file is larger than the second one in some dimension.

    LyCORIS always makes the first matrix the smaller one (``factorization``), and refuses files that differ.
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
    """Return the programs that can read the adapter file with this header, as ``readers_of`` does.

    Its alphas, ranks and shapes are considered, too.
    """
    unlike = len({round(alpha, 4) for alpha in alphas_of(header).values()}) > 1
    row = readers_of(header.tensors, families, header.metadata, unlike_alphas=unlike)
    if row is not None and row.lycoris in READ and is_cut_above_root(header.shapes):
        row = replace(row, lycoris=REFUSES_LARGE_FACTOR)
    return row and row.of_rank(max(ranks_of(header), default=0))
