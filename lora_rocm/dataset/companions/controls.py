"""Control images: further images for each image of a source. The model sees them in addition to the noisy image."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_rocm.dataset.companions.paired_files import PairedFiles
from lora_rocm.dataset.images.image_io import UnreadableImage, read_header
from lora_rocm.dataset.rows.hf_datasets import EmptyCell, UnreadableCell, header_in, leads_out, require_column
from lora_rocm.dataset.sample_table import Companion
from lora_rocm.dataset.skipped_files import counted, first_names, some
from lora_rocm.dataset.sources.folders import shown
from lora_rocm.errors import DataError, Problem
from lora_rocm.recipe.schema import ResolvedSource
from lora_rocm.recipe.sections import BESIDE

if TYPE_CHECKING:
    from lora_rocm.dataset.images.image_io import ImageHeader
    from lora_rocm.dataset.rows.hf_datasets import DatasetRow
    from lora_rocm.dataset.sample_table import Sample

CONTROL = "control"
CONTROL_FIX = "Repair the control image, or remove it together with its image."


def control_name(number: int) -> str:
    """Return the input name of an image's control image with this number: control for 0, control_2 for 1, ..."""
    return f"{CONTROL}_{number + 1}" if number else CONTROL


class Controls:
    """The control images of one source. Each image needs a control image from every entry of ``control_places``.

    An entry is a folder of files (see ``PairedFiles``), or a column of the source's rows. If a folder is listed n
    times, each image has n numbered files in it.

    Args:
        options: options of the source.
        index: index of the source in the recipe.

    Raises:
        DataError: ``control_path`` is the folder of the images. Or ``control_column`` is missing from the dataset, or
            is the column of the images.
    """

    def __init__(self, options: ResolvedSource, index: int) -> None:
        self._options, columns = options, options.control_columns
        for column in columns:
            require_column(options, column, "control_column")
            if column == options.image_column:
                raise DataError(
                    "control-column-same",
                    f"The column {column!r} is the column of the images themselves.",
                    where=f"{options.key('control_column')}: {column}",
                    fix="Name the column with the control images.",
                )
        places = () if columns else options.control_places
        self.folders = [place for place in places if place != BESIDE]
        self.path_key = "control_path" if BESIDE in places else ""
        self._files = {place: PairedFiles(options, index, place, "control_path", "control image") for place in places}
        self._places: Sequence[PairedFiles | str] = columns or [self._files[place] for place in places]
        self._without, self._outside = [first_names() for _ in self._places], first_names()

    def check(self, sample: Sample, header: ImageHeader, row: DatasetRow | None) -> Sequence[Companion | Problem]:
        """See ``CompanionInput.check``."""
        found = list[Companion | Problem]()
        for number, (place, without) in enumerate(zip(self._places, self._without, strict=True)):
            where = ""
            try:
                if isinstance(place, PairedFiles):
                    control = place.of(sample, self._places[:number].count(place))
                    if control is None:
                        without.append(sample.key)
                        continue
                    where = shown(control)
                    found.append(Companion(control_name(number), control, *read_header(control).size))
                else:
                    assert row is not None, "a recipe with control_column for a folder of images is refused"
                    where = f"{shown(row)}, column {shown(place)}"
                    control_header, cell = header_in(replace(row, column=place))
                    if isinstance(cell, Path) and leads_out(cell, row.dataset):
                        self._outside.append(f"{sample.key} -> {shown(cell)}")
                    found.append(Companion(control_name(number), cell, *control_header.size))
            except EmptyCell:
                without.append(sample.key)
            except (UnreadableImage, UnreadableCell) as error:
                what = f"The control image of {sample.key} cannot be read: {error}."
                found.append(Problem(where, what, CONTROL_FIX))
        return found

    def notices(self) -> list[str]:
        """Return notices about control images without an image, and about control images outside a dataset's folder.

        Raises:
            DataError: an image has no control image, or two control images have the same name.
        """
        # Refuse missing and ambiguous control images, place by place.
        for place, without in zip(self._places, self._without, strict=True):
            if isinstance(place, str):
                where, fix = (
                    f"{self._options.key('control_column')}: {place}",
                    "Fill these cells, or remove the rows.",
                )
            else:
                where, fix = (
                    shown(place.root),
                    "Add a control image with the name of each of these images, in the same ",
                )
                fix += "sub-folder, or remove the images."
                if place is self._files.get(BESIDE):
                    fix = "Rename the control image of NAME.png to NAME-condlabel.png, and several of them to "
                    fix += "NAME_0-condlabel.png and so on, or remove the image."
            if without:
                what = f"{counted(without, 'image has', 'images have')} no control image: {some(without)}."
                raise DataError("control-missing", what, where=where, fix=fix)
            doubles = place.doubles if isinstance(place, PairedFiles) else []
            if doubles:
                names = [f"{shown(first.name)} and {shown(second.name)}" for first, second in doubles]
                raise DataError(
                    "control-ambiguous",
                    f"Several control images have the same name: {some(names)}. It is ambiguous which one to use.",
                    where=shown(doubles[0][1]),
                    fix="Remove one of each pair.",
                )
        # Report unused files and files outside of the dataset.
        said = [notice for files in self._files.values() for notice in files.notices()]
        if self._outside and os.path.exists(os.path.expanduser(self._options.dataset or "")):
            lie = counted(self._outside, "control image is", "control images are")
            said.append(f"{lie} outside the dataset's folder: {some(self._outside)}.")
        return said
