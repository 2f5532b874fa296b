"""The loss of each image of a folder in a run that trained it, for the grid and the editor."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from lora_rocm.foundation.bounded_read import FileVersion
from lora_rocm.page_parts.charts import Chart, Series
from lora_rocm.page_parts.texts import t
from lora_rocm.recipe.schema import Recipe
from lora_rocm.report.image_hints import with_hints
from lora_rocm.report.image_losses import ImageLoss, RelativeLosses, judged
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.newest import written_s
from lora_rocm.rundir.sample_losses import SampleLosses, read_losses
from lora_rocm.ui.folders import Folders
from lora_rocm.ui.image_set.reading import image_folders, recipe_at
from lora_rocm.ui.run_list import run_dirs

MAX_RUNS, MAX_KEPT = 50, 4
RESOLUTION = re.compile(r"\d+ px/")
"""Begin of a sample's name in a run with several resolutions."""


@dataclass(frozen=True)
class FolderLosses:
    """The losses of a folder's images in one run.

    Attributes:
        run_dir: the run.
        losses: the losses of all its images. Names of this folder's images are relative to it.
    """

    run_dir: RunDir
    losses: RelativeLosses

    @cached_property
    def judged(self) -> Mapping[str, ImageLoss]:
        """The judged images by name. Images with too few visits are missing."""
        return {each.name: each for each in judged(self.losses)}

    @cached_property
    def _visits(self) -> Mapping[str, int]:
        counts = np.bincount(self.losses.sample, minlength=len(self.losses.names))
        return dict(zip(self.losses.names, map(int, counts), strict=True))

    def visits(self, name: str) -> int:
        """Return the number of updates in which an image was trained."""
        return self._visits.get(name, 0)

    def is_outlier(self, name: str) -> bool:
        """Whether an image is never learned. An image with too few visits is not."""
        return name in self.judged and self.judged[name].is_outlier

    def place(self, name: str) -> float:
        """Return a number that orders images by their relative loss, the highest first; not judged images are last."""
        return -self.judged[name].ratio if name in self.judged else 0.0

    def chart(self, name: str) -> Chart:
        """Return the curve of a judged image and the mean of all images."""
        own, usual = self.losses.curve(name)
        lines = [Series(t("images_losses.own"), own, "dots"), Series(t("images_losses.usual"), usual, "second")]
        return Chart(t("images_losses.curve"), t("report.step"), lines)

    def hinted(self, name: str, folder: Path, caption_extensions: Sequence[str]) -> ImageLoss:
        """Return a judged image; if it is never learned, with hints from its files."""
        found = [*self.judged.values()] if self.is_outlier(name) else [self.judged[name]]
        return next(each for each in with_hints(found, folder, caption_extensions) if each.name == name)


def runs_of(folders: Folders, folder: Path) -> Iterator[tuple[RunDir, Recipe]]:
    """Yield the newest runs that trained a folder and recorded losses, the newest first, with their recipes."""
    recorded = [run_dir for run_dir in run_dirs(folders) if run_dir.all_losses()]
    for run_dir in sorted(recorded, key=written_s, reverse=True)[:MAX_RUNS]:
        recipe = recipe_at(run_dir.recipe)
        if recipe is not None and folder in image_folders(recipe):
            yield run_dir, recipe


def losses_of(folders: Folders, folder: Path, run: str = "") -> FolderLosses | None:
    """Return the losses of a folder's images in the newest run that trained it, or in the run with this name.

    None if there is no such run.
    """
    for run_dir, recipe in runs_of(folders, folder):
        if run in ("", folders.name_of(run_dir.path)):
            return _kept.of(run_dir, recipe, folder)
    return None


class _KeptLosses:
    """The newest results. They are computed again if a file of losses has changed."""

    def __init__(self) -> None:
        self._found = OrderedDict[tuple[Path, Path], tuple[list[FileVersion], FolderLosses]]()

    def of(self, run_dir: RunDir, recipe: Recipe, folder: Path) -> FolderLosses:
        key, paths = (run_dir.path, folder), run_dir.all_losses()
        versions = [FileVersion.of(path) for path in paths]
        kept = self._found.get(key)
        if kept is None or kept[0] != versions:
            kept = (versions, FolderLosses(run_dir, RelativeLosses.of(named_in(recipe, folder, read_losses(paths)))))
            self._found[key] = kept
            while len(self._found) > MAX_KEPT:
                self._found.popitem(last=False)
        return kept[1]


_kept = _KeptLosses()


def named_in(recipe: Recipe, folder: Path, losses: SampleLosses) -> SampleLosses:
    """Return the losses with names relative to a folder. An image at several resolutions counts as one."""
    sources = recipe.data.resolved_sources()
    several = {each.index for each in sources if each.is_one_of > 1}
    index = image_folders(recipe).index(folder)
    prefix = f"sources[{index}]/" if sources[-1].index else ""
    numbers = dict[str, int]()

    def renamed(name: str) -> str:
        if not name.startswith(prefix):
            return name  # of another source
        own = name.removeprefix(prefix)
        return RESOLUTION.sub("", own, count=1) if index in several else own

    own = np.array([numbers.setdefault(renamed(name), len(numbers)) for name in losses.names], np.int64)
    return replace(losses, names=tuple(numbers), sample=own[losses.sample])
