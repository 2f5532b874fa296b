"""The parent and the forks of a run, as its page shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lora_rocm.rundir.fork_origin import ForkOrigin, fork_origin
from lora_rocm.rundir.layout import RunDir
from lora_rocm.ui.folders import Folders
from lora_rocm.ui.queue_view import run_name
from lora_rocm.ui.run_list import run_dirs

MAX_FORKS = 50


@dataclass(frozen=True)
class ShownFork:
    """A run and the checkpoint from which it began. name: what requests call the other run; None if it is gone."""

    origin: ForkOrigin
    name: str | None
    title: str


def parent_of(folders: Folders, run_dir: RunDir) -> ShownFork | None:
    """Return the parent of a run; None if it is not a fork."""
    origin = fork_origin(run_dir)
    return ShownFork(origin, run_name(folders, origin.run), origin.run.name) if origin is not None else None


def forks_of(folders: Folders, run_dir: RunDir) -> Sequence[ShownFork]:
    """Return the forks of a run in the folders of runs, in the order of their steps."""
    origins = ((each, fork_origin(each)) for each in run_dirs(folders))
    found = [
        ShownFork(origin, folders.name_of(each.path), each.path.name)
        for each, origin in origins
        if origin is not None and origin.run == run_dir.path
    ]
    return sorted(found, key=lambda fork: (fork.origin.step, fork.title))[:MAX_FORKS]
