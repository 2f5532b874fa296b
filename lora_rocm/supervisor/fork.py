"""Creates a fork of a run: a new run that continues from one of its checkpoints with changed values.

The parent is only read. The fork has copies of all files that it needs, so the parent may be deleted afterwards.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lora_rocm.errors import LoraRocmError, ResumeError, UserError, storage_error
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.foundation.bounded_read import check_plain, read_plain
from lora_rocm.foundation.files import is_folder, json_bytes, make_folder, new_folder, write_pieces, write_through
from lora_rocm.foundation.names import name_key
from lora_rocm.foundation.terminal_text import legible
from lora_rocm.foundation.undecodable_names import NOT_TEXT, fix_of_name
from lora_rocm.recipe.comparison import all_differences, fingerprint
from lora_rocm.recipe.fork_keys import fork_problems

# recipe: only read; the fork writes to the user's folders
from lora_rocm.recipe.load import LoadedRecipe, dump_recipe, load_recipe
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rules.mitigations import change_event
from lora_rocm.rundir.checkpoint_record import (
    MAX_PART_BYTES,
    PIECE_BYTES,
    CheckpointRecord,
    checksum_of,
    compare_checksum,
    read_record,
    sealed,
)
from lora_rocm.rundir.events import EventWriter, read_events
from lora_rocm.rundir.fork_origin import ForkOrigin, changed_keys
from lora_rocm.rundir.incidents import trouble_of
from lora_rocm.rundir.layout import CHECKPOINT_NAME, STATE_FILE, SUPERVISOR, RunDir
from lora_rocm.rundir.newest import new_run_path
from lora_rocm.rundir.remains import discard_abandoned
from lora_rocm.rundir.run_name import DEFAULT_NAME
from lora_rocm.supervisor.choose_run_dir import owner_of
from lora_rocm.supervisor.restart_policy import REMEMBERED, changes_of

TIMED = re.compile(r"(?:-fork)?-\d{8}-\d{6}(?:-\d+)?$")
"""End of the name of a run directory that was chosen by this program."""
MAX_TUNED_BYTES = 1 << 24


@dataclass(frozen=True)
class ForkRequest:
    """A request for a fork.

    Attributes:
        source: the parent's run directory, or a checkpoint in it.
        step: step of the checkpoint, or None for the newest one.
        overrides: ``section.key=value`` settings that differ from the parent's.
        run_dir: the fork's run directory, or None for a new one next to the parent.
        registry: the available families.
    """

    source: Path
    step: int | None = None
    overrides: Sequence[str] = ()
    run_dir: Path | None = None
    registry: FamilyRegistry = field(default=FAMILIES)


@dataclass(frozen=True)
class Fork:
    """A fork that was created. origin: its parent."""

    run_dir: RunDir
    origin: ForkOrigin


def create_fork(request: ForkRequest) -> Fork:
    """Create a fork. It can then be continued like any run.

    Raises:
        UserError: there is no such run or checkpoint, a changed key cannot change, or the directory is not empty.
        RecipeError: the parent's recipe is damaged, or a changed value is invalid.
        ResumeError: the recipe of the checkpoint differs from the parent's.
        StorageError: the checkpoint is damaged, or the fork cannot be written.
    """
    # Find the parent's recipe and checkpoint
    parent = owner_of(request.source.absolute())
    if not parent.recipe.is_file():
        fix = "Copy the recipe of the run to this path."
        raise UserError("run-without-recipe", "The recipe of this run is missing.", where=str(parent.recipe), fix=fix)
    old = load_recipe(parent.recipe, registry=request.registry).recipe
    loaded = load_recipe(parent.recipe, request.overrides, request.registry)
    _refuse_fixed(parent, old, loaded)
    record = _newest_record(_checkpoints(parent, request))
    _require_same_recipe(record, old)
    changed = changed_keys(all_differences(old, loaded.recipe))
    if not changed and parent.result.exists():
        _require_steps_left(parent, record)
    # Choose the fork's directory
    target = request.run_dir.absolute() if request.run_dir else _new_directory(parent, old, loaded.recipe)
    _require_free(target)
    discard_abandoned(target)
    # Write it: as a whole or not at all
    origin = ForkOrigin(parent.path, record.position.updates, changed)
    with new_folder(target) as temporary:
        _write(RunDir(temporary), parent, record, loaded.recipe)
        write_through(RunDir(temporary).fork, origin.to_bytes(target))
    return Fork(RunDir(target), origin)


def _refuse_fixed(parent: RunDir, old: Recipe, loaded: LoadedRecipe) -> None:
    problems = fork_problems(old, loaded.recipe)
    if problems:
        lines = "".join(f"\n    {each.where}: {each.what}. {each.fix}" for each in problems)
        raise UserError(
            "fork-keys-fixed",
            f"A fork cannot change these keys:{lines}",
            where=str(parent.path),
            fix="Remove these changes, or start a new run with them.",
        )


def _newest_record(checkpoints: Sequence[Path]) -> CheckpointRecord:
    """Return the record of the newest readable checkpoint. Damaged ones are skipped, as in a resume.

    Raises:
        LoraRocmError: all are damaged; the error is about the newest one.
    """
    first: LoraRocmError | None = None
    for folder in checkpoints:
        try:
            return read_record(folder)
        except LoraRocmError as error:
            first = first or error
    assert first is not None, "there is a checkpoint"
    raise first


def _checkpoints(parent: RunDir, request: ForkRequest) -> list[Path]:
    """Return the folder of the checkpoint that the request names; without a step, all of them, the newest first.

    Raises:
        UserError: "fork-no-checkpoint", there is none.
    """
    there = dict(parent.list_checkpoints())
    named = CHECKPOINT_NAME.match(request.source.name)
    step = int(named.group(1)) if named and request.source.absolute() != parent.path else request.step
    if request.step is not None and request.step != step:
        fix = "Remove --step, or name the run directory."
        raise UserError(
            "fork-two-steps", "The path and --step name different checkpoints.", where=str(request.source), fix=fix
        )
    if there and (step is None or step in there):
        return [there[step]] if step is not None else [there[each] for each in sorted(there, reverse=True)]
    if not there:
        fix = "Train until the first checkpoint is written, or train a new run with the changed values."
        raise UserError("fork-no-checkpoint", "This run has no checkpoint.", where=str(parent.path), fix=fix)
    steps = ", ".join(map(str, there))
    fix = f"Checkpoints with a training state: {steps}. output.keep_last sets how many are kept."
    raise UserError("fork-no-checkpoint", "There is no checkpoint at this step.", where=f"--step {step}", fix=fix)


def _require_same_recipe(record: CheckpointRecord, old: Recipe) -> None:
    if record.facts.get("recipe") != fingerprint(old):
        raise ResumeError(
            "resume-recipe-changed",
            "The recipe of this run changed after this checkpoint, in a key that may not change.",
            where=str(record.path),
            fix="Choose a newer checkpoint of the run.",
        )


def _require_steps_left(parent: RunDir, record: CheckpointRecord) -> None:
    """Refuse a copy of a finished run from its last checkpoint: it would train nothing."""
    there = [step for step, _ in parent.list_checkpoints()]
    if record.position.updates == max(there):
        steps = ", ".join(map(str, there))
        fix = f"Change a value with --set, or choose an earlier checkpoint with --step. Checkpoints: {steps}."
        what = "A fork of a finished run trains nothing without a changed value."
        raise UserError("fork-unchanged", what, where=str(parent.path), fix=fix)


def _new_directory(parent: RunDir, old: Recipe, new: Recipe) -> Path:
    """Return the path ``<name of the parent>-fork-<time>``, next to the parent or in a changed ``output.dir``."""
    folder = parent.path.parent if old.output.dir == new.output.dir else Path(new.output.dir)
    return new_run_path(folder, f"{TIMED.sub('', parent.path.name)}-fork")


def _require_free(target: Path) -> None:
    if (fix := fix_of_name(target)) is not None:
        raise ResumeError("run-dir-name", NOT_TEXT, where=legible(str(target)), fix=fix)
    is_free = not os.path.lexists(target) or (is_folder(target) and not any(target.iterdir()))
    if not is_free:
        fix = "Choose another --run-dir."
        raise UserError("fork-dir-taken", "This directory is not empty.", where=str(target), fix=fix)


def _write(fork: RunDir, parent: RunDir, record: CheckpointRecord, recipe: Recipe) -> None:
    """Write the files of a fork into a temporary folder."""
    # The checkpoint: its files are copied, and its recipe is the fork's
    folder = fork.checkpoint(record.position.updates)
    make_folder(folder)
    for name in sorted(record.checksums):
        _copy(record, name, folder / name)
    facts = {**record.facts, "recipe": fingerprint(recipe)}
    state = {"position": asdict(record.position), "facts": facts, "sha256": record.checksums}
    write_through(folder / STATE_FILE, sealed(state))
    # Choices and changes that the parent computes with
    if parent.tuned.is_file() and parent.holds(parent.tuned):
        try:
            write_through(fork.tuned, read_plain(parent.tuned, MAX_TUNED_BYTES))
        except OSError as error:
            raise storage_error(error, parent.tuned) from error
    changes = changes_of(trouble_of(parent, read_events(parent.events())))
    if changes:
        writer = EventWriter(fork.events(SUPERVISOR), 1)
        for change in changes:
            writer.write(change_event(change, REMEMBERED))
        writer.close()
    # Name and recipe
    name = name_key(recipe.output.name)
    if name != DEFAULT_NAME:
        write_through(fork.names, json_bytes({"name": name}))
    write_through(fork.recipe, dump_recipe(recipe).encode("utf-8"))


def _copy(record: CheckpointRecord, name: str, target: Path) -> None:
    """Copy a file of a checkpoint, and compare the copy with the recorded checksum.

    Raises:
        StorageError: the file is damaged, or was removed by the running parent.
    """
    found = hashlib.sha256()

    def pieces() -> Iterator[bytes]:
        check_plain(record.path / name, MAX_PART_BYTES)
        with (record.path / name).open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                found.update(piece)
                yield piece

    write_pieces(target, pieces())
    compare_checksum(record, name, found.hexdigest())
    compare_checksum(record, name, checksum_of(target))
