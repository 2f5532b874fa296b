"""Inputs that a recipe names: files, folders, the images of its previews, the packages of its trackers."""

from __future__ import annotations

from functools import partial

from lora_rocm.dataset.images.preview_images import require_preview_images
from lora_rocm.errors import Problem, RecipeError
from lora_rocm.recipe.excerpt import with_excerpt
from lora_rocm.recipe.load import LoadedRecipe
from lora_rocm.supervisor.trackers import missing_trackers


def require_inputs(loaded: LoadedRecipe, begun: bool = False) -> None:
    """Check all that a recipe names, and report all faults together.

    Args:
        loaded: the recipe.
        begun: whether the run has already started; see ``LoadedRecipe.require_files``.

    Raises:
        RecipeError: with one problem per key.
        UserError: tracker-missing: a package is not installed, and nothing else is wrong.
    """
    problems: dict[str, Problem] = {}
    for check in (partial(loaded.require_files, begun), partial(require_preview_images, loaded)):
        try:
            check()
        except RecipeError as error:
            for problem in error.problems:  # a file that does not exist cannot be read either: the first one counts
                problems.setdefault(problem.where, problem if problem.excerpt else with_excerpt(problem, loaded.layers))
    missing = missing_trackers(loaded.recipe.output)
    if len(missing) == 1 and not problems:
        raise missing[0]
    found = [*problems.values(), *(with_excerpt(loaded.placed(error), loaded.layers) for error in missing)]
    if found:
        raise RecipeError(found)
