"""Conversion between a trained adapter and its files: entries per module, the keys of a file, and PEFT's config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from lora_rocm.adapters import trained_norms
from lora_rocm.adapters.adapter_kind import PEFT_NAME, AdapterKind
from lora_rocm.adapters.entry import Entry, Form
from lora_rocm.adapters.lora_files.key_table import SD_SCRIPTS, KeyTable


class AdapterInFiles(AdapterKind):
    """The adapter methods used by code that writes, reads or checks adapter files."""

    def state(self) -> dict[str, Tensor]:
        """Return copies of all trained tensors and ``constants`` on the CPU, keyed by tensor name."""
        return {**self.read(self.parameters), **self.constants}

    def peft_config(self, component: str) -> dict[str, Any]:
        """Return the PEFT config of one component, limited to the fields that every version of PEFT knows.

        Module names omit ``text_model``. PEFT compares only the ends of names, so it finds the modules with every
        version of transformers.
        """
        layers = {n.removeprefix(component + "."): layer for n, (c, _, layer) in self.modules.items() if c == component}
        field = self.files.parts.config_alpha
        ranks = {name: self.rank_in_files(layer) for name, layer in layers.items()}
        alphas = {name: plain_number(self.alpha_in_files(layer)) for name, layer in layers.items()}
        rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
        return {
            "peft_type": self.files.parts.peft_type,
            "r": rank,
            field: alpha,
            "rank_pattern": {name: value for name, value in ranks.items() if value != rank},
            "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
            "target_modules": sorted(layers),
            **self.config_fields(list(layers.values())),
            "inference_mode": True,
        }

    def key_table(self, file_format: Form) -> KeyTable:
        """Return the key table of a file format ("kohya" or "sd-scripts"). Each table is built only once."""
        files, for_scripts = self.family.lora_file_names, file_format == SD_SCRIPTS
        if for_scripts not in self._key_tables:
            rows_of = files.scripts_rows if for_scripts else files.rows
            self._key_tables[for_scripts] = KeyTable(self.components_in_model, rows_of)
        return self._key_tables[for_scripts]

    def entries(self) -> dict[str, Any]:
        """Return the adapter at strength 1 as entries on the CPU, keyed by module name."""
        state = {name: tensor.float() for name, tensor in self.state().items()}
        return {
            name: self.entry_of(
                layer, PEFT_NAME, {role: state[f"{name}.{role}"] for role in self.trained(layer, PEFT_NAME)}
            )
            for name, (_, _, layer) in self.modules.items()
        }

    def entries_in(self, file_format: Form) -> Mapping[str, Entry]:
        """Return ``entries``, converted to the conventions of this file format."""
        return self.entries()

    def norm_tensors(self) -> dict[str, Tensor]:
        """Return the trained differences of the norms as a file stores them: float32 on the CPU.

        Each is keyed by "<name of the norm in the file>.<role>".
        """
        keys = trained_norms.names_in_files(self.family, self.model) if self.norms else {}
        state = self.state() if self.norms else {}
        return {
            f"{keys[name]}.{role}": state[f"{name}.{role}"].float()
            for name, norm in self.norms.items()
            for role in norm.trained()
        }

    @torch.no_grad()
    def start_from(self, entries: Mapping[str, Entry]) -> None:
        """Load entries into their layers, with the same effect. Modules without an entry keep their initial values."""
        for name, entry in entries.items():
            self.fill(self.modules[name][2], entry)

    @contextmanager
    def shapes_only(self) -> Iterator[None]:
        """Within this context, ``state()`` and everything derived from it are meta tensors: shapes and dtypes only."""
        before = self.read, self.constants
        self.read, self.constants = _on_meta, _on_meta(self.constants)
        try:
            yield
        finally:
            self.read, self.constants = before


def plain_number(value: float) -> int | float:
    """Return a whole number as int, so that it is written without ".0"; any other number as float."""
    return int(value) if float(value).is_integer() else float(value)


def loaded_entry(kind: type[AdapterKind], layer: BaseTunerLayer) -> Entry:
    """Return the entry that another program's loader wrote into a layer of this kind.

    Raises:
        ValueError: the loader created the layer but did not load its tensors.
    """
    (active,) = layer.active_adapters
    tensors = kind.trained(layer, active)
    if any(tensor.is_meta for tensor in tensors.values()):
        raise ValueError("the loader created a layer but did not load its tensors")
    return kind.entry_of(layer, active, {role: tensor.detach().float() for role, tensor in tensors.items()})


def _on_meta(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
