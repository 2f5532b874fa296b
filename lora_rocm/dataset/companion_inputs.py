"""Companion inputs: files or channels, such as masks, that belong to the images of a source and are read with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from lora_rocm.dataset.controls import Controls
from lora_rocm.dataset.masks import Masks

if TYPE_CHECKING:
    from lora_rocm.dataset.image_io import Header
    from lora_rocm.dataset.sample_table import Sample
    from lora_rocm.errors import Problem
    from lora_rocm.recipe.schema import ResolvedSource


class CompanionInput(Protocol):
    """The companions of one kind of the images of one source."""

    @property
    def folder(self) -> str | None:
        """The folder of their files, which is not searched for images; None if there is none."""
        ...

    def look(self, sample: Sample, header: Header) -> Problem | None:
        """Count an image and check the header of its companion. Returns the reason if the pair cannot be used."""
        ...

    def notices(self) -> list[str]:
        """Notices about the companions; none if the recipe uses none.

        Raises:
            DataError: images lack a companion that they need, or all of them lack it.
        """
        ...


COMPANION_INPUTS: tuple[Callable[[ResolvedSource, int], CompanionInput], ...] = (Masks, Controls)
"""One class a kind, made from the options of a source and its index in the recipe."""
