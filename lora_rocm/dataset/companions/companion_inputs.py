"""Companion inputs: files or channels, such as masks, that belong to a source's images and are read with them."""

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
    """All companions of one kind (masks or control images) for the images of one source."""

    @property
    def folders(self) -> Sequence[str]:
        """Folders that contain companion files. They are not searched for training images."""

    @property
    def path_key(self) -> str:
        """The key of ``data`` for companion files that are among the images; "" if they are in another folder."""

    def check(self, sample: Sample, header: ImageHeader, row: DatasetRow | None) -> Sequence[Companion | Problem]:
        """Find the companions of an image and check their headers. Also counts the image for ``notices``.

        Args:
            sample: the image.
            header: the image's header.
            row: the dataset row that names or contains the image; None if the image is not from a dataset.

        Returns:
            The companions. A problem in place of a companion means that the image cannot be used.
        """

    def notices(self) -> list[str]:
        """Return notices about the companions. Call it after all images were checked.

        The list is empty if the recipe uses no companions of this kind.

        Raises:
            DataError: an image lacks a required companion, or no image has one.
        """


COMPANION_INPUTS: tuple[Callable[[ResolvedSource, int], CompanionInput], ...] = (Masks, Controls)
"""The class of each kind of companion. It is called with a source's options and the source's index in the recipe."""
