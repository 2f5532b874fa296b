"""Which model families there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lora_rocm.families.sd.spec import SPEC_SD2, SPEC_SD15
from lora_rocm.families.sdxl.spec import SPEC as SDXL
from lora_rocm.families.spec import FamilySpec


class Registry:
    """Model families by name. The first one is that of a recipe that names none.

    Args:
        specs: one or more, each with its own name.
    """

    def __init__(self, specs: Sequence[FamilySpec]) -> None:
        self._specs = {spec.name: spec for spec in specs}
        assert self._specs and len(self._specs) == len(specs)

    def __iter__(self) -> Iterator[FamilySpec]:
        return iter(self._specs.values())

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    def __getitem__(self, name: str) -> FamilySpec:
        return self._specs[name]

    @property
    def default(self) -> FamilySpec:
        return next(iter(self))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._specs)


PRODUCT = Registry([SDXL, SPEC_SD15, SPEC_SD2])
"""The families of this program."""
