"""The commands of the group ``lora-rocm queue``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lora_rocm.commands.cli_command import Command, Group, printed, printed_for_files
from lora_rocm.commands.cli_options import CacheOfRecipe, Gpus, NoSupervisor, Overrides, RunsOfRecipe, with_folders
from lora_rocm.commands.output import Output

QUEUE_VARIABLE = "LORA_ROCM_QUEUE_DIR"
DEFAULT_QUEUE = Path("queue")

queue_app = typer.Typer(
    cls=Group,
    help="Train several recipes one after another.",
    epilog="queue add cat.yaml dog.yaml",
    no_args_is_help=True,
    rich_markup_mode=None,
)
QueuePath = Annotated[
    Path, typer.Option("--queue-dir", metavar="DIR", envvar=QUEUE_VARIABLE, help="Folder of the queue.")
]
ItemName = Annotated[
    str, typer.Argument(metavar="NAME", help="Name, number or file name of a recipe (queue list shows them).")
]


@queue_app.command("add", cls=Command, epilog="queue add cat.yaml dog.yaml")
@printed
def queue_add(
    output: Output,
    recipes: Annotated[list[str], typer.Argument(metavar="RECIPE", help="Recipe files, or ones that ship.")],
    folder: QueuePath = DEFAULT_QUEUE,
    overrides: Overrides = None,
    runs_dir: RunsOfRecipe = None,
    cache_dir: CacheOfRecipe = None,
) -> int:
    """Copy recipes to the end of the queue. It may be running."""
    from lora_rocm.commands import queue

    found = queue.add(folder, recipes, with_folders(overrides, runs=runs_dir, cache=cache_dir))
    return output.show(found, queue.render(found))


@queue_app.command("list", cls=Command, epilog="queue list --json")
@printed
def queue_list(output: Output, folder: QueuePath = DEFAULT_QUEUE) -> int:
    """Show the recipes of the queue in order, with their states."""
    from lora_rocm.commands import queue

    found = queue.listed(folder)
    return output.show(found, queue.render(found))


@queue_app.command("run", cls=Command, epilog="queue run")
@printed_for_files
def queue_run(
    output: Output, folder: QueuePath = DEFAULT_QUEUE, gpus: Gpus = None, no_supervisor: NoSupervisor = False
) -> int:
    """Train the recipes of the queue one after another. An interrupted run is resumed.

    A recipe that fails is reported, and the next one follows.
    """
    from lora_rocm.commands import queue_run

    found = queue_run.queue_run(folder, output, gpus=gpus, supervised=not no_supervisor)
    output.show(found, queue_run.queue_text(found))
    return found.exit_code


@queue_app.command("remove", cls=Command, epilog="queue remove cat")
@printed
def queue_remove(
    output: Output,
    names: Annotated[
        list[str], typer.Argument(metavar="NAME", help="Names, numbers or file names of recipes (queue list).")
    ],
    folder: QueuePath = DEFAULT_QUEUE,
) -> int:
    """Remove recipes from the queue. Their runs are kept."""
    from lora_rocm.commands import queue

    found = queue.remove(folder, names)
    return output.show(found, queue.render(found))


@queue_app.command("move", cls=Command, epilog="queue move dog 1")
@printed
def queue_move(
    output: Output,
    name: ItemName,
    place: Annotated[int, typer.Argument(metavar="PLACE", min=1, max=1_000_000, help="Its new place; 1 is the first.")],
    folder: QueuePath = DEFAULT_QUEUE,
) -> int:
    """Move a recipe to another place in the order."""
    from lora_rocm.commands import queue

    found = queue.move(folder, name, place)
    return output.show(found, queue.render(found))
