"""Input images of previews: control images, and masks that mark which part an inpainting model redraws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lora_rocm.dataset.images.image_io import UnreadableImage, read_header
from lora_rocm.errors import Problem, RecipeError

if TYPE_CHECKING:
    from lora_rocm.dataset.images.buckets import Size
    from lora_rocm.recipe.load import LoadedRecipe

READ_FIX = "Name another file, or repair this one."
MISFIT_FIX = "Use a mask with the size of its image, or with the same proportions."


def require_preview_images(loaded: LoadedRecipe) -> None:
    """Check the headers of all input images that a recipe's previews name. The files must exist.

    Raises:
        RecipeError: at least one file cannot be used. It contains one problem per file.
    """
    sample, problems = loaded.recipe.sample, dict[str, Problem]()
    for key, number, preview in sample.numbered():
        for name, what, fix in faults(preview.inputs):
            where = loaded.layers.where(sample.key_of(name, key, number))
            problems.setdefault(where, Problem(where, what, fix))
    if problems:
        raise RecipeError(list(problems.values()))


def faults(inputs: Mapping[str, Path]) -> Iterator[tuple[str, str, str]]:
    """Yield (input name, fault, remedy) for each unusable input image of one preview."""
    sizes: dict[str, Size] = {}
    for name, path in inputs.items():
        try:
            sizes[name] = read_header(path).size
        except UnreadableImage as error:
            yield name, f"the image {path} cannot be read: {error}", READ_FIX
    if sizes.keys() >= {"mask", "control_image"} and (fault := misfit(sizes["mask"], sizes["control_image"])):
        yield "mask", fault, MISFIT_FIX


def misfit(mask_wh: Size, image_wh: Size) -> str:
    """Describe the fault if a mask's proportions differ from its image's proportions; returns "" if they agree."""
    from lora_rocm.dataset.companions.masks import fits  # imports numpy, which most commands do not need

    if fits(mask_wh, image_wh):
        return ""
    mask, image = (f"{width}x{height}" for width, height in (mask_wh, image_wh))
    return f"the mask has different proportions than its image: it is {mask}, but the image is {image}"
