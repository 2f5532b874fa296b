"""Control images: a second image for each image of a source, which the model sees beside the noisy one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lora_rocm.dataset.folders import shown
from lora_rocm.dataset.image_io import UnreadableImage, read_header
from lora_rocm.dataset.left_out import counted, few, some
from lora_rocm.dataset.paired_files import PairedFiles
from lora_rocm.errors import DataError, Problem
from lora_rocm.recipe.schema import ResolvedSource
from lora_rocm.recipe.sections import BESIDE

if TYPE_CHECKING:
    from lora_rocm.dataset.image_io import Header
    from lora_rocm.dataset.sample_table import Sample

CONTROL = "control"
CONTROL_FIX = "Repair the control image, or take it away together with its image."


class Controls:
    """The control images of one source: the files of ``control_path`` (see ``PairedFiles``). Each image needs one.

    Args:
        options: options of the source.
        index: index of the source in the recipe.

    Raises:
        DataError: ``control_path`` is the folder of the images.
    """

    def __init__(self, options: ResolvedSource, index: int) -> None:
        self._without, path = few(), options.control_path
        self._files = None if path is None else PairedFiles(options, index, path, "control_path", "control image")
        self.folder = None if path == BESIDE else path
        self._where = self.folder or options.path

    def of(self, sample: Sample) -> Path:
        """The control image of a usable image of this source.

        Raises:
            DataError: it is gone since the source was scanned.
        """
        found = None if self._files is None else self._files.of(sample)
        if found is None:
            raise self._missing([sample.key])
        return found

    def look(self, sample: Sample, header: Header) -> Problem | None:
        """Find the control image of an image and check its header. Returns the reason if the pair cannot be used."""
        if self._files is None:
            return None
        control = self._files.of(sample)
        if control is None:
            self._without.append(sample.key)
            return None
        try:
            read_header(control)
        except UnreadableImage as error:
            return Problem(shown(control), f"The control image of {sample.key} cannot be read: {error}.", CONTROL_FIX)
        return None

    def notices(self) -> list[str]:
        """A notice about control images without an image.

        Raises:
            DataError: an image has no control image, or two files have the same name.
        """
        if self._files is None:
            return []
        if self._without:
            raise self._missing(self._without)
        if doubles := [f"{shown(first.name)} and {shown(second.name)}" for first, second in self._files.doubles]:
            raise DataError(
                "control-ambiguous",
                f"Control images have the same name: {some(doubles)}. Which of them is meant is not clear.",
                where=shown(self._files.doubles[0][1]),
                fix="Take one of each pair away.",
            )
        return self._files.notices()

    def _missing(self, keys: Sequence[str]) -> DataError:
        return DataError(
            "control-missing",
            f"{counted(keys, 'image has', 'images have')} no control image: {some(keys)}.",
            where=shown(self._where),
            fix="Put a control image of the same name there for each, also in the same sub-folder, or take the image "
            "away.",
        )
