"""Chooses the run directory and checks that the user's request fits its content.

Only ``settle``, ``settle_rank`` and ``accept`` write files. If a request is refused, the run's recipe and result stay
unchanged.
"""

from __future__ import annotations

import errno
import json
import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from lora_rocm.errors import RecipeError, ResumeError, UserError
from lora_rocm.families.registry import FamilyRegistry
from lora_rocm.foundation.files import write_atomic
from lora_rocm.foundation.names import name_key
from lora_rocm.foundation.terminal_text import legible, quoted
from lora_rocm.foundation.undecodable_names import NOT_TEXT, fix_of_name
from lora_rocm.recipe.comparison import fixed_values, resume_differences
from lora_rocm.recipe.load import LoadedRecipe, dump_recipe, load_recipe  # recipe: the user names it
from lora_rocm.recipe.schema import Recipe
from lora_rocm.recipe.standard_input import INPUT_NAME
from lora_rocm.rundir.layout import CHECKPOINT_NAME, RunDir
from lora_rocm.rundir.made_from import keep_made
from lora_rocm.rundir.newest import is_run, new_run_path
from lora_rocm.rundir.recipe_file import withdraw
from lora_rocm.rundir.result_file import read_result_file
from lora_rocm.supervisor.run_recipe import recipe_of_run

LATEST = "latest"
MAX_RUNS = 1000
"""Maximum number of folders that are searched for runs to suggest to the user."""


@dataclass(frozen=True)
class Chosen:
    """The chosen run directory.

    Attributes:
        resume: whether the directory may already contain a run.
        checkpoint: checkpoint from which to resume, or None for the newest one.
    """

    run_dir: RunDir
    resume: bool
    checkpoint: Path | None = None


def choose(loaded: LoadedRecipe, run_dir: Path | None, resume: str | None) -> Chosen:
    """Choose the run directory from the command's options.

    Args:
        loaded: the recipe. The default directory is built from its name and ``output.dir``.
        run_dir: value of --run-dir, or None.
        resume: value of --resume: None, "latest", a run directory, or a checkpoint folder in one.

    Raises:
        ResumeError: there is nothing to resume, the two options disagree, the directory contains something else than a
            run, or its name is not valid text.
        StorageError: the run directory contains a link in place of a file or folder that the run writes.
    """
    if resume is None:
        return _own(
            Chosen(
                RunDir(run_dir.absolute() if run_dir else new_run_path(Path(loaded.recipe.output.dir), loaded.name)),
                resume=False,
            )
        )
    if resume == LATEST:
        found = run_dir.absolute() if run_dir else newest_run(Path(loaded.recipe.output.dir), loaded.name)
        return _own(Chosen(RunDir(found or new_run_path(Path(loaded.recipe.output.dir), loaded.name)), resume=True))
    # --resume names a run or a checkpoint in one
    path = Path(resume).absolute()
    checkpoint = path if _is_checkpoint(path) else None
    found = path.parent.parent if checkpoint else path
    if not path.is_dir() or not holds_run(RunDir(found)):
        raise ResumeError(
            "nothing-to-resume",
            "There is no run to resume here.",
            where=f"--resume {resume}",
            fix=_run_meant(path) or "Use a run directory, a checkpoint in one (checkpoints/step-...), or latest.",
        )
    if run_dir is not None and run_dir.absolute() != found:
        raise ResumeError(
            "two-run-dirs",
            "--run-dir and --resume name different directories.",
            where=f"--run-dir {run_dir} --resume {resume}",
            fix="Remove --run-dir.",
        )
    return _own(Chosen(RunDir(found), resume=True, checkpoint=checkpoint))


def _own(chosen: Chosen) -> Chosen:
    """Check the name of the chosen directory, and its content with ``RunDir.require_own``; return ``chosen``."""
    if (fix := fix_of_name(chosen.run_dir.path)) is not None:
        raise ResumeError("run-dir-name", NOT_TEXT, where=legible(str(chosen.run_dir.path)), fix=fix)
    chosen.run_dir.require_own()
    return chosen


def newest_run(folder: Path, name: str) -> Path | None:
    """Return the newest run directory of the recipe ``name`` in ``folder``, by the time in the directory's name.

    It is None if there is no such directory.
    """
    pattern = re.compile(re.escape(name) + r"-(\d{8}-\d{6})(?:-(\d+))?")
    if not folder.is_dir():
        return None
    found = [
        (match.group(1), int(match.group(2) or 1), path)
        for path in folder.iterdir()
        if path.is_dir()
        if (match := pattern.fullmatch(path.name))
    ]
    return max(found)[2] if found else None


def holds_run(run_dir: RunDir) -> bool:
    """Whether a run was started in this directory."""
    return run_dir.holds_run()


def settle(chosen: Chosen, loaded: LoadedRecipe, accept_changes: bool) -> bool:
    """Prepare the run directory for the worker; return whether there is anything left to train.

    Nothing is left if the run is complete and the recipe asks for no further steps. The caller must have the
    directory's lock. The recipe is written to ``recipe_asked`` if the worker could still refuse it because of existing
    checkpoints, and otherwise to recipe.yaml.

    Raises:
        ResumeError: the directory contains a run and --resume was not given, or the recipe does not fit the run.
    """
    run_dir, recipe = chosen.run_dir, loaded.recipe
    if holds_run(run_dir) and not chosen.resume:
        raise ResumeError(
            "run-dir-taken",
            "This directory already contains a run.",
            where=str(run_dir.path),
            fix="Continue it with --resume latest, or choose another --run-dir.",
        )
    # Remove what an earlier start left
    run_dir.discard_unfinished(of_parent=True)
    run_dir.discard_unfinished_exports()
    withdraw(run_dir)
    # A run with checkpoints: the worker still has to accept the recipe
    started = run_dir.result.exists() or bool(run_dir.list_checkpoints())
    if started and run_dir.recipe.exists():  # before the first checkpoint, a change is harmless
        old = _old_recipe(run_dir, loaded.registry)
        _refuse_differences(run_dir, old, loaded, accept_changes)
        run_dir.keep_name()
        if run_dir.result.exists() and _is_complete(run_dir, old, recipe):
            return False
        write_atomic(run_dir.recipe_asked, dump_recipe(recipe).encode("utf-8"), run_dir.path)
        return True
    # A new run, or one that lost its recipe
    keep_made(run_dir)
    run_dir.result.unlink(missing_ok=True)  # writes: removes the link, where there is one
    if not started:
        run_dir.set_name(name_key(recipe.output.name))  # before the recipe: without it, the files have the usual name
    write_atomic(run_dir.recipe, dump_recipe(recipe).encode("utf-8"), run_dir.path)
    if started:  # its recipe was lost, and perhaps its name too
        run_dir.keep_name()
    return True


def settle_rank(chosen: Chosen, loaded: LoadedRecipe, rank: int) -> bool:
    """Prepare one rank that ``torchrun`` started: write its own recipe. Return whether there is anything left to train.

    Unlike ``settle``, it leaves the rest of the run directory to rank 0.

    Raises:
        ResumeError: the saved recipe cannot be read.
        StorageError: the run directory cannot be written.
    """
    run_dir, recipe = chosen.run_dir, loaded.recipe
    if run_dir.result.exists() and _is_complete(run_dir, _old_recipe(run_dir, loaded.registry), recipe):
        return False
    run_dir.discard_unfinished_recipe(rank)
    write_atomic(run_dir.recipe_of(rank), dump_recipe(recipe).encode("utf-8"), run_dir.path)
    return True


def _old_recipe(run_dir: RunDir, registry: FamilyRegistry) -> Recipe:
    try:
        return load_recipe(run_dir.recipe, registry=registry).recipe
    except RecipeError as error:
        raise ResumeError(
            "run-recipe-damaged",
            f"The recipe stored in this run cannot be read: {error.problems[0].what}",
            where=error.problems[0].where,
            fix="Restore the recipe of this run there, or start a new run.",
        ) from None


def _refuse_differences(run_dir: RunDir, old: Recipe, loaded: LoadedRecipe, accept_changes: bool) -> None:
    differences = resume_differences(old, loaded.recipe)
    if differences and not accept_changes:
        fix = "Undo the changes, start a new run, or continue anyway with --accept-changes."
        if command := _command_without(run_dir, old, loaded):
            fix += f" With the values of the run:\n  {command}"
        lines = "".join(f"\n    {problem.where}: {problem.what}" for problem in differences)
        raise ResumeError(
            "resume-recipe-changed",
            f"The recipe differs from the run's recipe in keys that may not change:{lines}",
            where=str(run_dir.path),
            fix=fix,
        )


def _command_without(run_dir: RunDir, old: Recipe, loaded: LoadedRecipe) -> str:
    """Return the command that resumes with the run's own values in place of the changed ones; empty if there is none.

    The changed values may come from --set or from the recipe file. Standard input cannot be read again.
    """
    if str(loaded.path) == INPUT_NAME:
        return ""
    values = fixed_values(old)
    different = [problem.where for problem in resume_differences(old, loaded.recipe)]
    given = [each for each in loaded.overrides if each.partition("=")[0].strip() not in different]
    sets = [*given, *(f"{key}={json.dumps(values[key], ensure_ascii=False)}" for key in different)]
    try:
        meant = load_recipe(loaded.path, sets, loaded.registry).recipe
    except RecipeError:  # keys of another kind, with different rules
        return ""
    if resume_differences(old, meant):
        return ""
    words = [word for each in sets for word in ("--set", each)]
    return quoted(["lora-rocm", "train", str(loaded.path), *words, "--run-dir", str(run_dir.path), "--resume", LATEST])


def _is_complete(run_dir: RunDir, old: Recipe, new: Recipe) -> bool:
    """Whether the finished run has everything that the new recipe asks for."""
    same_length = (old.train.max_train_steps, old.train.epochs) == (new.train.max_train_steps, new.train.epochs)
    if not same_length or resume_differences(old, new):
        return False
    try:
        read_result_file(run_dir.result)
    except OSError as error:  # with several processes, rank 0 may remove it at any time
        if error.errno not in (errno.ENOENT, errno.EINVAL, errno.EFBIG):  # EINVAL, EFBIG: not a result of this program
            raise
        return False
    except ValueError:
        return False
    return True


def open_run(path: Path) -> RunDir:
    """Return the run directory at ``path``.

    Raises:
        UserError: there is no run there.
    """
    run_dir = RunDir(path.absolute())
    if run_dir.path.is_dir() and holds_run(run_dir):
        return run_dir
    fix = _run_meant(run_dir.path) or "Use a run directory (runs/...)."
    raise UserError("no-run", "There is no run here.", where=str(path), fix=fix)


def owner_of(path: Path) -> RunDir:
    """Return the run at ``path``, which is a run directory or a checkpoint in one.

    Raises:
        UserError: there is no run there.
    """
    return open_run(path.parent.parent if _is_checkpoint(path) else path)


def _is_checkpoint(path: Path) -> bool:
    return bool(CHECKPOINT_NAME.match(path.name)) and path.parent.name == "checkpoints"


def _run_meant(path: Path) -> str:
    """Return advice that names the run that contains a path, or the newest runs below it; empty if there are none."""
    for folder in path.parents[:3]:
        if is_run(folder):
            return f"Use the run directory that contains it: {folder}."
    inside = filter(is_run, islice(path.iterdir(), MAX_RUNS) if path.is_dir() else ())
    newest = sorted(inside, key=lambda run: run.stat().st_mtime, reverse=True)[:3]
    return f"Runs in this folder: {', '.join(map(str, newest))}." if newest else ""


def open_recipe(path: Path, registry: FamilyRegistry) -> tuple[RunDir, Recipe]:
    """Return the run directory at ``path`` and its recipe.

    Raises:
        UserError: there is no run at ``path``, or its recipe is missing.
        RecipeError: its recipe is damaged.
    """
    run_dir = open_run(path)
    return run_dir, recipe_of_run(run_dir.recipe, registry)
