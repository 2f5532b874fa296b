"""Whether a page may load a model now: training must not notice it."""

from __future__ import annotations

from lora_rocm.errors import UserError
from lora_rocm.rundir.layout import RunDir
from lora_rocm.ui.folders import Folders
from lora_rocm.ui.run_list import newest_runs

NUM_NEWEST = 50


def running_runs(folders: Folders) -> list[RunDir]:
    """Return the runs that train now, of the newest ones in all folders."""
    return [RunDir(run.listed.path) for run in newest_runs(folders, NUM_NEWEST) if run.listed.state == "running"]


def require_room(folders: Folders, wanted: RunDir) -> None:
    """Check that the model of a run can be loaded while others train.

    This is so if no run trains, or if the GPU has room for each training together with the training of ``wanted``.
    Drawing needs less memory than training, because it computes no gradients. On the CPU there is no limit to compare
    with, and training would become slower, so it is refused.

    Raises:
        UserError: no-room-while-training: there is not enough room.
    """
    from lora_rocm.commands.plan import plan

    running = running_runs(folders)
    if not running:
        return
    own = plan(str(wanted.recipe))
    for run_dir in running:
        training = plan(str(run_dir.recipe))
        room = training.room.num_bytes
        if room is None or training.chosen is None or own.chosen is None:
            raise _no_room(run_dir)
        if training.chosen.needed_bytes + own.chosen.needed_bytes > room:
            raise _no_room(run_dir)


def require_no_training(folders: Folders) -> None:
    """Check that no run trains now, because a test of the GPU would slow it down.

    Raises:
        UserError: no-test-while-training: a run does.
    """
    for run_dir in running_runs(folders):
        what = "A run is training, and a test would slow it down."
        fix = "Wait until it ends, or stop it: it continues later from its last checkpoint."
        raise UserError("no-test-while-training", what, where=str(run_dir.path), fix=fix)


def _no_room(run_dir: RunDir) -> UserError:
    what = "A run is training, and there is no room for a second model next to it."
    fix = "Wait until it ends, or stop it: it continues later from its last checkpoint."
    return UserError("no-room-while-training", what, where=str(run_dir.path), fix=fix)
