"""A run's forks and images: forking it from a checkpoint, its parent, its forks, and images that are never learned."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from lora_rocm.errors import RecipeError, UserError
from lora_rocm.rundir.layout import RunDir
from lora_rocm.ui.context import context_of
from lora_rocm.ui.fields import fields_of, query_of
from lora_rocm.ui.rendering import fragment, is_fragment, url
from lora_rocm.ui.run_family import forks_of, parent_of
from lora_rocm.ui.thumbnails import MEDIA_TYPE, SIDES_PX, thumbnail

if TYPE_CHECKING:
    from lora_rocm.recipe.schema import Recipe

TEMPLATE = "run_fork.html.j2"


def family(request: Request) -> Response:
    """The parent of a run with the recipe's differences, and its forks."""
    run_dir = _run(request)
    folders = context_of(request).folders
    parent, forks = parent_of(folders, run_dir), forks_of(folders, run_dir)
    return fragment(request, TEMPLATE, "family", parent=parent, forks=forks)


def fork_fields(request: Request) -> Response:
    """The fields of a fork: the step, and the keys that may change."""
    from lora_rocm.recipe.fork_values import fork_values

    run_dir = _run(request)
    steps = [step for step, _ in reversed(run_dir.list_checkpoints())]
    name, made = context_of(request).folders.name_of(run_dir.path), fork_values(_recipe(run_dir))
    chosen = request.query_params.get("step", "")
    return fragment(request, TEMPLATE, "fork", name=name, steps=steps, values=made, chosen=chosen)


async def fork(request: Request) -> Response:
    """Create a fork and train it."""
    posted = await fields_of(request)
    texts = {key: value for key, value in posted.items() if isinstance(value, str)}
    return await run_in_threadpool(_fork, request, texts)


def _fork(request: Request, texts: Mapping[str, str]) -> Response:
    from lora_rocm.recipe.fork_values import fork_values
    from lora_rocm.supervisor.fork import ForkRequest, create_fork

    ui, run_dir = context_of(request), _run(request)
    step = texts.get("step", "")
    if not (step.isascii() and step.isdigit() and len(step) < 10):
        raise UserError("field-missing", "No step is chosen.", where="step", fix="Choose the step of a checkpoint.")
    others = [line.strip() for line in texts.get("set", "").splitlines() if line.strip()]
    overrides = [*fork_values(_recipe(run_dir)).overrides(texts), *others]
    made = create_fork(ForkRequest(run_dir.path, int(step), overrides))
    ui.launches.resume(made.run_dir, ui.folders.working)
    address = url("/runs/view", dir=ui.folders.name_of(made.run_dir.path))
    if is_fragment(request):
        return Response(headers={"HX-Redirect": address})
    return RedirectResponse(address, 303)


def images(request: Request) -> Response:
    """The images that are never learned, with hints."""
    from lora_rocm.report.image_hints import hinted_losses
    from lora_rocm.rundir.sample_losses import read_losses

    run_dir = _run(request)
    recipe = _recipe_or_none(run_dir)
    losses = read_losses(run_dir.all_losses())
    found = hinted_losses(losses, recipe)
    folder = _folder(request, recipe)
    return fragment(
        request,
        TEMPLATE,
        "images",
        name=context_of(request).folders.name_of(run_dir.path),
        outliers=[each for each in found if each.is_outlier],
        num_judged=len(found),
        lost=losses.lost_after(context_of(request).views.of(run_dir).updates - 1),
        has_folder=folder is not None,
    )


def image(request: Request) -> Response:
    """A training image of a run, reduced. Its folder has to be in one that the user named."""
    folder = _folder(request, _recipe_or_none(_run(request)))
    path = context_of(request).folders.resolve(str(folder / query_of(request, "file"))) if folder is not None else None
    if folder is None or path is None or not path.is_relative_to(folder):
        fix = "Add the folder of the images on the page Machine."
        raise UserError("outside-folders", "This image is in no folder that you named.", where="file", fix=fix)
    content, version = thumbnail(path, SIDES_PX[1])
    headers = {"etag": f'"{version}"', "cache-control": "private, no-cache"}
    return Response(content, media_type=MEDIA_TYPE, headers=headers)


def _run(request: Request) -> RunDir:
    return context_of(request).folders.run(query_of(request, "dir"))


def _recipe(run_dir: RunDir) -> Recipe:
    from lora_rocm.recipe.load import load_recipe  # recipe: only read, for the page

    return load_recipe(run_dir.recipe).recipe


def _recipe_or_none(run_dir: RunDir) -> Recipe | None:
    try:
        return _recipe(run_dir)
    except RecipeError:  # its own section of the page shows it
        return None


def _folder(request: Request, recipe: Recipe | None) -> Path | None:
    """Return the folder of a run's images; None if it has several, or its folder is in none that the user named."""
    if recipe is None or not recipe.data.path:
        return None
    try:
        return context_of(request).folders.resolve(recipe.data.path)
    except UserError:
        return None


ROUTES = [
    Route("/runs/family", family),
    Route("/runs/fork", fork_fields),
    Route("/runs/images", images),
    Route("/runs/image", image),
    Route("/runs/forks", fork, methods=["POST"]),
]
"""The routes of this module, which belong to the part Runs."""
