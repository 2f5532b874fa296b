"""The commands that prepare later runs of a recipe. Like ``cli``, handlers import their modules when called."""

from __future__ import annotations

from lora_rocm.commands.cli_command import printed
from lora_rocm.commands.cli_options import CacheOfRecipe, Overrides, RecipePath, with_folders
from lora_rocm.commands.output import Output


@printed
def prepare(output: Output, recipe: RecipePath, overrides: Overrides = None, cache_dir: CacheOfRecipe = None) -> int:
    """Fill the caches of a recipe, and compile and check the kernels of its step. Nothing is trained."""
    from lora_rocm.commands import prepare
    from lora_rocm.report.progress_bar import make_progress

    with make_progress(output.stream) as progress:
        found = prepare.prepare(
            recipe, with_folders(overrides, cache=cache_dir), notify=progress.notify, on_event=progress.on_event
        )
    output.show(found, prepare.render(found))
    return found.exit_code


@printed
def tune(output: Output, recipe: RecipePath, overrides: Overrides = None) -> int:
    """Tune the matrix products of a recipe (ROCm). Runs with runtime.profile: fast use the fastest correct kernels."""
    from lora_rocm.commands import tune

    found = tune.tune(recipe, overrides or (), notify=output.notify)
    return output.show(found, tune.render(found))
