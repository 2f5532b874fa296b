"""The commands of the groups ``lora-rocm bench`` and ``lora-rocm cache``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from lora_rocm.commands.cli_command import BenchCommand, Command, Group, printed
from lora_rocm.commands.cli_options import CachePath, FiguresPath, Overrides, RecipePath
from lora_rocm.commands.output import Output

cache_app = typer.Typer(
    cls=Group,
    help="Examine and clean the caches of encoded images and captions.",
    epilog="cache stats",
    no_args_is_help=True,
    rich_markup_mode=None,
)
bench_app = typer.Typer(
    cls=Group,
    help="Measure this machine.",
    epilog="bench transfer",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@bench_app.command("transfer", cls=BenchCommand, epilog="bench transfer --json")
@printed
def bench_transfer(output: Output, file: FiguresPath = None) -> int:
    """Measure copies between host and GPU. They are compared with the limit of the bus."""
    from lora_rocm.commands import bench

    return bench.finish(output, bench.transfer, file)


@bench_app.command("compute", cls=BenchCommand, epilog="bench compute my.yaml")
@printed
def bench_compute(output: Output, recipe: RecipePath, overrides: Overrides = None, file: FiguresPath = None) -> int:
    """Measure the calculations of a training step: matrix products, attention and convolutions."""
    from lora_rocm.commands import bench

    return bench.finish(output, lambda: bench.compute(recipe, overrides or ()), file)


@bench_app.command("loader", cls=BenchCommand, epilog="bench loader my.yaml")
@printed
def bench_loader(output: Output, recipe: RecipePath, overrides: Overrides = None, file: FiguresPath = None) -> int:
    """Measure the rate of batches.

    They come from the cache and from the images, without and with loader workers.
    """
    from lora_rocm.commands import bench

    return bench.finish(output, lambda: bench.loader(recipe, overrides or (), notify=output.notify), file)


@bench_app.command("step", cls=BenchCommand, epilog="bench step my.yaml --random-weights")
@printed
def bench_step(
    output: Output,
    recipe: RecipePath,
    overrides: Overrides = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Use random weights and images; nothing is read.")
    ] = False,
    steps: Annotated[int, typer.Option(min=2, max=100_000, metavar="N", help="Steps to time, after a warm-up.")] = 30,
    file: FiguresPath = None,
) -> int:
    """Measure training steps: time, memory, and the trainer's own parts."""
    from lora_rocm.commands import bench

    measure = partial(bench.step, steps=steps, random_weights=random_weights, output=output)
    return bench.finish(output, lambda: measure(recipe, overrides or ()), file)


@cache_app.command("stats", cls=Command, epilog="cache stats")
@printed
def cache_stats(output: Output, folder: CachePath = Path("cache")) -> int:
    """Show the contents of the caches."""
    from lora_rocm.cache_store import maintenance
    from lora_rocm.commands.cache_report import stats_text

    found = maintenance.stats(folder)
    return output.show(found, stats_text(found))


@cache_app.command("verify", cls=Command, epilog="cache verify --dir cache")
@printed
def cache_verify(output: Output, folder: CachePath = Path("cache")) -> int:
    """Read every entry and list damaged ones. The exit code is 3 if there are any."""
    from lora_rocm.cache_store import maintenance
    from lora_rocm.commands.cache_report import verified_text

    found = maintenance.verify(folder, output.notify)
    output.show(found, verified_text(found))
    return found.exit_code


@cache_app.command("prune", cls=Command, epilog="cache prune --older-than 30 --dry-run")
@printed
def cache_prune(
    output: Output,
    folder: CachePath = Path("cache"),
    older_than: Annotated[
        float | None,
        typer.Option(
            min=1, max=100_000, metavar="DAYS", help="Also delete entries that no run has used for this long."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be deleted.")] = False,
) -> int:
    """Delete entries that no run can use.

    They are damaged entries, duplicates, entries of older versions, and leftovers of killed runs.
    """
    from lora_rocm.cache_store import maintenance
    from lora_rocm.commands.cache_report import pruned_text

    found = maintenance.prune(folder, output.notify, older_than_days=older_than, dry_run=dry_run)
    return output.show(found, pruned_text(found))
