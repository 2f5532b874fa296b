"""Control images: a second image for each image of a source, which the model sees beside the noisy one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lora_rocm.dataset.companions.paired_files import PairedFiles
from lora_rocm.dataset.images.image_io import UnreadableImage, read_header
from lora_rocm.dataset.left_out import counted, few, some
from lora_rocm.dataset.sample_table import Companion
from lora_rocm.dataset.sources.folders import shown
from lora_rocm.errors import DataError, Problem
from lora_rocm.recipe.schema import ResolvedSource
from lora_rocm.recipe.sections import BESIDE

if TYPE_CHECKING:
    from lora_rocm.dataset.images.image_io import Header
    from lora_rocm.dataset.rows.hf_datasets import DatasetRow
    from lora_rocm.dataset.sample_table import Sample

CONTROL = "control"
CONTROL_FIX = "Repair the control image, or take it away together with its image."


def control_name(number: int) -> str:
    """The input that a control image is, by its number among those of its image, from 0: control, control_2, ..."""
    return f"{CONTROL}_{number + 1}" if number else CONTROL


class Controls:
    """The control images of one source: files of each place in ``control_path`` (see ``PairedFiles``).

    Each image needs one of each place.

    Args:
        options: options of the source.
        index: index of the source in the recipe.

    Raises:
        DataError: ``control_path`` is the folder of the images.
    """

    def __init__(self, options: ResolvedSource, index: int) -> None:
        self.folders = [place for place in options.control_places if place != BESIDE]
        self.beside = "control_path" if BESIDE in options.control_places else ""
        places = options.control_places
        self._files = [PairedFiles(options, index, place, "control_path", "control image") for place in places]
        self._without = [few() for _ in self._files]

    def look(self, sample: Sample, header: Header, row: DatasetRow | None) -> Sequence[Companion | Problem]:
        """As ``CompanionInput.look``."""
        found = list[Companion | Problem]()
        for number, (files, without) in enumerate(zip(self._files, self._without, strict=True)):
            control = files.of(sample)
            if control is None:
                without.append(sample.key)
                continue
            try:
                found.append(Companion(control_name(number), control, *read_header(control).size))
            except UnreadableImage as error:
                what = f"The control image of {sample.key} cannot be read: {error}."
                found.append(Problem(shown(control), what, CONTROL_FIX))
        return found

    def notices(self) -> list[str]:
        """A notice about control images without an image.

        Raises:
            DataError: an image has no control image, or two files have the same name.
        """
        for files, without in zip(self._files, self._without, strict=True):
            if without:
                raise DataError(
                    "control-missing",
                    f"{counted(without, 'image has', 'images have')} no control image: {some(without)}.",
                    where=shown(files.root),
                    fix="Put a control image of the same name there for each, also in the same sub-folder, or take the "
                    "image away.",
                )
            if doubles := [f"{shown(first.name)} and {shown(second.name)}" for first, second in files.doubles]:
                raise DataError(
                    "control-ambiguous",
                    f"Control images have the same name: {some(doubles)}. Which of them is meant is not clear.",
                    where=shown(files.doubles[0][1]),
                    fix="Take one of each pair away.",
                )
        return [notice for files in self._files for notice in files.notices()]
