"""The registry of model families. The program uses ``FAMILIES``; tests may build their own registry."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from lora_rocm.errors import ModelError
from lora_rocm.families.anima.spec import SPEC as ANIMA
from lora_rocm.families.causal_lm.spec import SPEC as CAUSAL_LM
from lora_rocm.families.flux.spec import SPEC as FLUX
from lora_rocm.families.sd.spec import SPEC_SD2, SPEC_SD15
from lora_rocm.families.sdxl.spec import SPEC as SDXL
from lora_rocm.families.spec import Evidence, FamilySpec
from lora_rocm.families.z_image.spec import SPEC as Z_IMAGE

RESERVED = (
    "sd3", "chroma", "flux2", "krea2", "qwen-image", "wan", "ltx2",
)  # fmt: skip
"""Names of planned families."""


class FamilyRegistry:
    """Model families by name. The first family is the default of ``model.family``.

    Args:
        specs: the families, at least one, with distinct names.
    """

    def __init__(self, specs: Sequence[FamilySpec]) -> None:
        self._specs = {spec.name: spec for spec in specs}
        if not specs or len(self._specs) != len(specs):
            raise ValueError("a registry needs at least one family, and distinct names")

    def __iter__(self) -> Iterator[FamilySpec]:
        return iter(self._specs.values())

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    def __getitem__(self, name: str) -> FamilySpec:
        return self._specs[name]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._specs)

    def refusal(self, name: str) -> tuple[str, str]:
        """Return (problem, fix) for an unknown family name."""
        known = f"Families that can be trained: {', '.join(self.names)}."
        plain = name.strip().lower()
        coming = [reserved for reserved in RESERVED if reserved not in self]
        if plain in coming:
            return f"{plain} is not supported yet", known
        near = difflib.get_close_matches(plain, [*self.names, *coming], n=1, cutoff=0.7)
        if near and near[0] in coming:
            return "there is no such model family", f"Did you mean {near[0]}? It is not supported yet. {known}"
        return "there is no such model family", f"Did you mean {near[0]}?" if near else known

    def detect(self, seen: Evidence, where: str) -> FamilySpec:
        """Return the family of a base model and a LoRA.

        The LoRA is used only if the base is not recognised or may belong to several families.

        Args:
            seen: evidence from base and LoRA.
            where: the base model, for the error.

        Raises:
            ModelError: family-unclear: no family is recognised, or more than one.
        """
        found = [spec for spec in self if spec.name in seen.base] or [spec for spec in self if spec.name in seen.lora]
        if len(found) > 1:
            found = [spec for spec in found if spec.name in seen.lora] or found
        if len(found) == 1:
            return found[0]
        what = f"could be {' or '.join(spec.title for spec in found)}" if found else "is not recognised"
        raise ModelError(
            "family-unclear",
            f"The model family of this base {what}.",
            where=where,
            fix=f"Specify it: --family {' or --family '.join(self.names)}.",
        )


FAMILIES = FamilyRegistry([SDXL, SPEC_SD15, SPEC_SD2, Z_IMAGE, FLUX, ANIMA, CAUSAL_LM])
"""The families of this program."""
