"""Names of a family's modules in files of other programs, collected in one object per family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

Rows = Sequence[tuple[str, int, int]]
"""The position of a module's output rows in a file: a list of (tensor name, first row, number of rows), in row order.

A module with its own weight has one item, and a module that is split into several weights has several. Modules that are
merged into one weight have the same name with different first rows.
"""
RowsOf = Callable[[str, str, int], Rows]
"""Maps (component, module, number of the module's rows) to the position in a file, or to () if the file has no name
for the module.
"""


def not_known(component: str, module: str, rows: int) -> Rows:
    """Return no position. Used as ``RowsOf`` for files without known names."""
    return ()


@dataclass(frozen=True)
class LoraFileNames:
    """Names of a family's modules in LoRA files, and diffusers' loader for these files.

    Implementations: ``common.unet.lora_file_names`` for UNets, ``common.dit.family`` for transformers; a family may
    override them.

    prefixes: prefix of modules' names ("lora_unet_") by component, in the one file that other programs read.
    ``form``: the format of that file (``adapters.entry.Form``): "kohya", or "folded" if readers ignore alpha.
    key: maps (component, module) to the module's name in that file, without ``.lora_down.weight``. It begins with the
        component's prefix: "lora_unet_input_blocks_4_1_...", "diffusion_model.layers.0...".
    load_in_diffusers: loads a file into weightless components with diffusers' own loader, as its users do.
    original: positions in files with the original release's names ("double_blocks.0.img_attn.qkv"). Such files are only
        read, but ``scripts_rows`` derives kohya's names from them. Positions are empty if the names equal those from
        ``key`` or are unknown.
    scripts: positions in files for kohya's scripts (sd-scripts, musubi-tuner), or None for the default of
        ``scripts_rows``.
    """

    prefixes: Mapping[str, str]
    form: str
    key: Callable[[str, str], str]
    load_in_diffusers: Callable[[Path, Sequence[str]], dict[str, nn.Module]]
    original: RowsOf = not_known
    scripts: RowsOf | None = None

    def rows(self, component: str, module: str, rows: int) -> Rows:
        """Return a module's position in the one file that other programs read. Each module has its own weight there."""
        return ((self.key(component, module), 0, rows),)

    def scripts_rows(self, component: str, module: str, rows: int) -> Rows:
        """Return a module's position in files for kohya's scripts.

        Its name is derived from the original release's name, or is the name from ``key`` if there is none.
        """
        if self.scripts is not None:
            return self.scripts(component, module, rows)
        original = self.original(component, module, rows)
        named = [(f"lora_unet_{name.replace('.', '_')}", first, count) for name, first, count in original]
        return named or self.rows(component, module, rows)
