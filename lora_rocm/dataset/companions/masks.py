"""Loss masks, which weight the pixels of an image in the loss. Finds, checks and decodes masks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lora_rocm.dataset.companions.paired_files import PairedFiles
from lora_rocm.dataset.images.buckets import Geometry, Size
from lora_rocm.dataset.images.image_io import ImageHeader, UnreadableImage, decode_as, read_header
from lora_rocm.dataset.sample_table import Companion, Sample
from lora_rocm.dataset.skipped_files import counted, first_names, some
from lora_rocm.dataset.sources.folders import shown
from lora_rocm.errors import DataError, Problem
from lora_rocm.foundation.units import count_text
from lora_rocm.recipe.schema import ResolvedSource
from lora_rocm.recipe.sections import BESIDE

if TYPE_CHECKING:
    from PIL import Image

    from lora_rocm.dataset.rows.hf_datasets import DatasetRow

MASK = "mask"
MASK_FIX = "Repair the mask, or remove it: without a mask, the loss uses the whole image."


class Masks:
    """The masks of one source: either the files of ``mask_path`` (see ``PairedFiles``), or the images' alpha channels.

    Args:
        options: options of the source.
        index: index of the source in the recipe.

    Raises:
        DataError: ``mask_path`` is the folder of the images.
    """

    def __init__(self, options: ResolvedSource, index: int) -> None:
        self._options = options
        self._with, self._without = 0, first_names()
        path = options.mask_path
        self._files = None if path is None else PairedFiles(options, index, path, "mask_path", "mask")

    @property
    def folders(self) -> Sequence[str]:
        """The folder of masks; empty if the recipe names none, or if the masks are among the images."""
        path = self._options.mask_path
        return () if path is None or path == BESIDE else (path,)

    @property
    def path_key(self) -> str:
        return "mask_path" if self._options.mask_path == BESIDE else ""

    def check(self, sample: Sample, header: ImageHeader, row: DatasetRow | None) -> Sequence[Companion | Problem]:
        """See ``CompanionInput.check``. With ``alpha_mask``, the returned companion is the image file itself."""
        if self._options.alpha_mask:
            if header.transparent:
                self._with += 1
            else:
                self._without.append(sample.key)
            return (Companion(MASK, sample.location, sample.width, sample.height),)
        mask = None if self._files is None else self._files.of(sample)
        if mask is None:
            self._without.append(sample.key)
            return ()
        self._with += 1
        try:
            size = read_header(mask).size
        except UnreadableImage as error:
            return (Problem(shown(mask), f"The mask of {sample.key} cannot be read: {error}.", MASK_FIX),)
        if fits(size, (sample.width, sample.height)):
            return (Companion(MASK, mask, *size),)
        sizes = f"{size[0]}x{size[1]}, but the image is {sample.width}x{sample.height}"
        return (Problem(shown(mask), f"The mask of {sample.key} has other proportions: it is {sizes}.", MASK_FIX),)

    def notices(self) -> list[str]:
        """Return notices about the masks; none if the recipe uses no masks. Call it after all images were checked.

        Raises:
            DataError: no image has a mask.
        """
        if self._options.mask_path is None and not self._options.alpha_mask:
            return []
        where = shown(next(iter(self.folders), self._options.path or self._options.dataset))
        if not self._with and self._without:
            raise DataError(
                "masks-missing",
                f"No image has a mask ({count_text(len(self._without), 'image')} found).",
                where=where,
                fix=self._fix_if_none(),
            )
        said = [f"Images with a mask: {self._with} of {self._with + len(self._without)} ({where})."]
        if self._without:
            have = counted(self._without, "image has none, so its", "images have none, so their")
            said.append(f"{have} whole area is used: {some(self._without)}.")
        if self._files is not None:
            said += self._files.notices()
            if doubles := [shown(second.name) for _, second in self._files.doubles]:
                have = counted(
                    doubles,
                    "mask has the same name as another mask and is",
                    "masks have the same names as other masks and are",
                )
                said.append(f"{have} not used: {some(doubles)}.")
        return [" ".join(said)]

    def _fix_if_none(self) -> str:
        if self._options.mask_path == BESIDE:
            return (
                "Rename the masks to NAME-masklabel.png, or move them into a sub-folder masks. Or set mask_path to "
                "their folder."
            )
        if self._options.mask_path:
            return (
                "Correct mask_path, or remove it. A mask needs the name of its image, in a sub-folder of the same name."
            )
        return "Remove alpha_mask, or set mask_path: none of these files has an alpha channel."


def decode_mask(content: bytes, alpha: bool) -> Image.Image:
    """Decode a mask to greyscale (mode L) and apply its EXIF orientation.

    Pixels with the value 255 have full weight in the loss. Pixels that are 0 or transparent have no weight.

    Args:
        content: the file's bytes.
        alpha: whether to use only the alpha channel; without an alpha channel, all pixels are 255.

    Raises:
        UnreadableImage: see ``image_io.decode``.
    """
    return decode_as(partial(_grey, alpha=alpha), content)


def _grey(image: Image.Image, profile: bytes | None, alpha: bool) -> Image.Image:
    from PIL import Image, ImageChops

    white = Image.new("L", image.size, 255)
    opacity = image.convert("RGBA").getchannel("A") if image.has_transparency_data else white
    return opacity if alpha else ImageChops.multiply(image.convert("L"), opacity)


def fits(mask_wh: Size, image_wh: Size) -> bool:
    """Whether a mask has the same aspect ratio as its image, allowing for one pixel of rounding."""
    (mask_width, mask_height), (width, height) = mask_wh, image_wh
    return abs(mask_height * width - mask_width * height) <= max(width, height)


def mask_on_grid(mask_HW: NDArray[np.uint8], geometry: Geometry, flip: bool, step_hw: Size) -> NDArray[np.float32]:
    """Crop a mask like its image, and average it over cells.

    Like in ``image_io.cut``, the mask is mirrored before it is cropped.

    Args:
        mask_HW: the whole mask, 0 to 255.
        geometry: scaling and crop of the image.
        flip: whether the image is mirrored.
        step_hw: size of a cell in pixels of the scaled image.

    Returns:
        Float32 in [0, 1], with one value per cell.
    """
    (height, width), (top, left) = geometry.resized_hw, geometry.crop_top_left
    (target_height, target_width), (step_y, step_x) = geometry.target_hw, step_hw
    seen_HW = mask_HW[:, ::-1] if flip else mask_HW
    rows_HW = _means(seen_HW, np.arange(top, top + target_height + 1, step_y), height)
    cells_WH = _means(rows_HW.T, np.arange(left, left + target_width + 1, step_x), width)
    return (cells_WH.T / 255.0).astype(np.float32)


def _means(values_NM: NDArray[np.generic], edges: NDArray[np.int64], whole: int) -> NDArray[np.float64]:
    """Return the mean row of each interval between consecutive edges. Shape [len(edges) - 1, M].

    Args:
        values_NM: N rows of M values.
        edges: ascending edges; the edge ``whole`` is the end of all N rows. Edges may cut a row.
        whole: the number of units into which the N rows are divided.
    """
    values = values_NM.astype(np.float64)  # differences of cumulative sums would lose digits in float32
    at = edges * len(values) / whole
    lower = np.minimum(at.astype(np.int64), len(values) - 1)
    sums = np.concatenate([np.zeros((1, values.shape[1])), np.cumsum(values, axis=0)])
    return np.diff(sums[lower] + (at - lower)[:, None] * values[lower], axis=0) / np.diff(at)[:, None]
