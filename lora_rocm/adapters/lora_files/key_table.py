"""Names of adapted modules: stable names used here, and the names in files of other programs.

A module is named ``component.path`` ("unet.mid_block...to_q"), but a file may name it differently. One weight of a file
may cover several modules (query, key and value as one ``qkv``), or several weights of a file may form one module.
``KeyTable`` describes both cases as ranges of rows. The names themselves are ``families.lora_file_names``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from lora_rocm.adapters.entry import Entry
from lora_rocm.families.base import ModelFamily
from lora_rocm.families.lora_file_names import RowsOf
from lora_rocm.kernels.weight_format import dense_shape

TEXT_LEVEL = "text_model."
"""Level in a text encoder's module paths. transformers 5 dropped it from one of SDXL's two text encoders."""

SD_SCRIPTS = "sd-scripts"
COMFYUI = "comfyui"
"""File format: kohya's names, with DoRA magnitudes converted for ComfyUI (``LoraEntry.of_base_norm``)."""


def canonical(component: str, module: str) -> str:
    """Return the stable name of a module, which is the same for every version of transformers."""
    return f"{component}.{module.removeprefix(TEXT_LEVEL)}"


def adaptable(component: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, base layer) for every Linear and Conv2d that can have an adapter or already has one."""
    injected: tuple[str, ...] = ()
    for path, module in component.named_modules():
        if isinstance(module, BaseTunerLayer):
            injected = (*injected[-1:], path + ".")
            yield path, module.get_base_layer()
        elif isinstance(module, nn.Linear | nn.Conv2d) and not path.startswith(injected):
            yield path, module


def main_component(family: ModelFamily) -> str:
    """Return the name of the family's main adapted component: its UNet or transformer."""
    return next(name for name in family.lora_file_names.prefixes if name not in family.text_components)


@dataclass(frozen=True)
class WeightSlice:
    """A range of rows that a module's weight and a key's weight share.

    module: name of the module.
    first: first row in the module's weight.
    at: first row in the key's weight.
    count: number of rows.
    """

    module: str
    first: int
    at: int
    count: int


class KeyTable:
    """Maps each key of a file to rows of modules.

    Args:
        components: the model's components.
        rows_of: function of the file format that names the keys of a module (see ``LoraFileNames``).

    Attributes:
        parts: maps a key to its slices, ordered by their rows in the key's weight.
        rows: maps a module name to the number of rows (outputs) of its weight.
        shapes: maps a key to the shape of its weight.

    Raises:
        ValueError: two modules claim the same rows of a key, or some rows of a module have no key.
    """

    def __init__(self, components: Mapping[str, nn.Module], rows_of: RowsOf) -> None:
        self.parts: dict[str, list[WeightSlice]] = {}
        self.rows: dict[str, int] = {}
        inputs: dict[str, tuple[int, ...]] = {}
        for component, root in components.items():
            for path, base in adaptable(root):
                name, (rows, *rest) = canonical(component, path), dense_shape(base)
                self.rows[name], first = rows, 0
                placed = rows_of(component, path, rows)
                for key, at, count in placed:
                    self.parts.setdefault(key, []).append(WeightSlice(name, first, at, count))
                    inputs[key], first = tuple(rest), first + count
                if placed and first != rows:
                    raise ValueError(f"{name} has {rows} rows, but its keys cover only {first} of them")
        self.shapes: dict[str, tuple[int, ...]] = {}
        for key, parts in self.parts.items():
            parts.sort(key=lambda part: part.at)
            end = 0
            for part in parts:
                if part.at < end:
                    raise ValueError(f"{part.module} and another module claim the same rows of {key}")
                end = part.at + part.count
            self.shapes[key] = (end, *inputs[key])

    def whole(self, key: str) -> str | None:
        """Return the module that a key names completely; None if the key covers several modules or part of one."""
        (part, *others) = self.parts[key]
        alone = not others and part.count == self.rows[part.module]
        return part.module if alone else None

    def of_modules(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        """Convert entries keyed by file key to entries keyed by module. Entries already keyed by module are kept.

        A module gets no entry if the shared weight does not change its rows.

        Raises:
            ValueError: an entry cannot be split by rows, or the entries of a module cannot be joined.
        """
        found: dict[str, Entry] = {name: entry for name, entry in entries.items() if name not in self.parts}
        pieces: dict[str, list[tuple[int, Entry]]] = {}
        for key in entries.keys() & self.parts.keys():
            for part in self.parts[key]:
                piece = entries[key].rows(part.at, part.count)
                if len(self.parts[key]) == 1 or piece.needs_weight or piece.norm():
                    pieces.setdefault(part.module, []).append((part.first, piece))
        for name, several in pieces.items():
            several.sort(key=lambda piece: piece[0])
            if name in found:
                raise ValueError(f"the file contains the module {name} twice, under two names")
            found[name] = several[0][1].joined(several, self.rows[name])
        return found

    def of_keys(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        """Convert entries keyed by module to entries keyed by file key.

        Raises:
            ValueError: an entry cannot be split by rows, or the entries of a key cannot be joined. The message names
                the keys.
        """
        found, unfit = dict[str, Entry](), dict[str, str]()
        for key, parts in self.parts.items():
            ours = [part for part in parts if part.module in entries]
            try:
                pieces = [(part.at, entries[part.module].rows(part.first, part.count)) for part in ours]
                if pieces:
                    found[key] = pieces[0][1].joined(pieces, self.shapes[key][0])
            except ValueError as error:
                unfit[key] = f"{error} ({', '.join(part.module for part in ours)})"
        if unfit:
            raise ValueError(
                f"{len(unfit)} weights are affected, for example {next(iter(unfit))}: {next(iter(unfit.values()))}"
            )
        return found
