"""Companion inputs: files or channels, such as masks, that belong to the images of a source and are read with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from lora_rocm.dataset.companions.controls import Controls
from lora_rocm.dataset.companions.masks import Masks

if TYPE_CHECKING:
    from lora_rocm.dataset.images.image_io import ImageHeader
    from lora_rocm.dataset.rows.hf_datasets import DatasetRow
    from lora_rocm.dataset.sample_table import Companion, Sample
    from lora_rocm.errors import Problem
    from lora_rocm.recipe.schema import ResolvedSource


class CompanionInput(Protocol):
    """The companions of one kind of the images of one source."""

    @property
    def folders(self) -> Sequence[str]:
        """The folders of their files, which are not searched for images."""

    @property
    def path_key(self) -> str:
        """The key of ``data``, if their files are among the images; empty if not."""

    def check(self, sample: Sample, header: ImageHeader, row: DatasetRow | None) -> Sequence[Companion | Problem]:
        """Count an image, find its companions and check their headers; a problem: the image cannot be used.

        ``row``: the row that names or contains the image; None if it is not from a dataset.
        """

    def notices(self) -> list[str]:
        """Notices about the companions; none if the recipe uses none.

        Raises:
            DataError: images lack a companion that they need, or all of them lack it.
        """


COMPANION_INPUTS: tuple[Callable[[ResolvedSource, int], CompanionInput], ...] = (Masks, Controls)
"""One class per kind, built from the options of a source and its index in the recipe."""
