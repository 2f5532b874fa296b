"""The names of a family's modules in files of other programs, as one value per family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

Rows = Sequence[tuple[str, int, int]]
"""The position of a module's output rows in a file, in the order of the rows: (name, first row, number of rows) each.

A module that keeps its own weight gives one entry, a module split into several weights gives several, and modules
merged into one weight give the same name with different first rows.
"""
RowsOf = Callable[[str, str, int], Rows]
"""(component, module, its number of rows) -> its position in a file; empty: the file has no name for it."""


def not_known(component: str, module: str, rows: int) -> Rows:
    """No name: a ``RowsOf``."""
    return ()


@dataclass(frozen=True)
class FileNames:
    """Names of a family's modules in LoRA files, and diffusers' loader of these files.

    prefixes: component -> prefix of its modules' names in the one file that other programs read ("lora_unet_").
    ``form``: the format of that file (``adapters.entry.Form``): "kohya", or "folded" if readers ignore alpha.
    key: (component, module) -> name of a module in that file, without ``.lora_down.weight``. It begins with the
        component's prefix: "lora_unet_input_blocks_4_1_...", "diffusion_model.layers.0...".
    load_in_diffusers: loads a file with diffusers' own loader into skeletons of components, as its users do.
    original: in files with the names of the original release ("double_blocks.0.img_attn.qkv"). They are read, never
        written. Empty if these names equal the names of ``key`` or are not known.
    scripts: in files for kohya's scripts (sd-scripts, musubi-tuner), if they differ from ``scripts_rows``' default.
    """

    prefixes: Mapping[str, str]
    form: str
    key: Callable[[str, str], str]
    load_in_diffusers: Callable[[Path, Sequence[str]], dict[str, nn.Module]]
    original: RowsOf = not_known
    scripts: RowsOf | None = None

    def rows(self, component: str, module: str, rows: int) -> Rows:
        """The position in the one file that other programs read: each module keeps its own weight there."""
        return ((self.key(component, module), 0, rows),)

    def scripts_rows(self, component: str, module: str, rows: int) -> Rows:
        """The position in files for kohya's scripts: the original release's names, or else the names of ``key``."""
        if self.scripts is not None:
            return self.scripts(component, module, rows)
        original = self.original(component, module, rows)
        named = [(f"lora_unet_{name.replace('.', '_')}", first, count) for name, first, count in original]
        return named or self.rows(component, module, rows)
