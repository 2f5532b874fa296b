"""Translates another trainer's files into a recipe that lora-rocm accepts, and reports the outcome of every setting."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.errors import Problem, RecipeError, UserError
from lora_rocm.importing.config_files import ConfigFiles
from lora_rocm.importing.known_secrets import KnownSecrets
from lora_rocm.importing.recipe_text import recipe_text
from lora_rocm.importing.registry import MODULES, trainer_of
from lora_rocm.importing.rows import table_of
from lora_rocm.importing.setting import UnreadText
from lora_rocm.importing.translator import Outcome, RecipeValue, Translated, Translator
from lora_rocm.recipe.foreign import trainer_in
from lora_rocm.recipe.load import load_text

ORIGIN = Path("recipe")
MAX_IN_HEAD = 30
PLACEHOLDER = "FILL-THIS-IN"
OTHER_SYSTEM = {True: ("Linux or macOS", re.compile(r"/[^/\s]")), False: ("Windows", re.compile(r"[A-Za-z]:/|//\w"))}
"""Whether this is Windows -> the name of the other system, and the begin of its absolute paths in recipes."""
WARMUPS = ("optim.lr_warmup_steps", "optim.lr_warmup_ratio")


@dataclass(frozen=True)
class ImportedRecipe:
    """A translated configuration.

    Attributes:
        trainer: name of the other trainer.
        version: version of the other trainer's source on which the table is based.
        text: the recipe as YAML; it passes ``check --schema-only``.
        outcomes: outcome of each setting, in the order of the files.
        unread: parts of the files that could not be read.
        notices: sentences for the user, about the recipe.
    """

    trainer: str
    version: str
    text: str
    outcomes: tuple[Translated, ...]
    unread: tuple[UnreadText, ...]
    notices: tuple[str, ...]

    @property
    def counts(self) -> Counter[Outcome]:
        """Number of settings with each outcome."""
        return Counter(row.outcome for row in self.outcomes if not row.setting.is_default)

    @property
    def loses_something(self) -> bool:
        """Whether a lost setting changes the trained weights, or an unreadable part may change them."""
        lost = (row.changes_weights for row in self.outcomes if row.outcome == "unsupported")
        return any(lost) or any(part.changes_weights for part in self.unread)


def import_files(paths: Sequence[Path], options: Sequence[str] = ()) -> ImportedRecipe:
    """Translate the files of another trainer.

    Args:
        paths: paths of the files, the main file first.
        options: further options of the other trainer's command line.

    Raises:
        UserError: a file cannot be read, the trainer is not known, or the file names no base that lora-rocm trains.
    """
    translator = translated(paths, options)
    # write a recipe that lora-rocm accepts
    missing = _fill_in(translator)
    with translator.secrets.hidden_in_errors():
        notices = _accepted(translator)
    translator.hide_secrets()  # again: reasons of lora-rocm contain values
    given, table = translator.files.given, translator.table
    head = [
        f"Imported from {', '.join(each.file for each in given)}, a configuration of {table.name}.",
        "The comment of each line is the origin of its value.",
        *missing,
    ]
    lost = [row for row in translator.outcomes if row.outcome == "unsupported"]
    head += [f"Not taken over: {row.setting.key} = {row.setting.shown} ({row.note})" for row in lost[:MAX_IN_HEAD]]
    if len(lost) > MAX_IN_HEAD:
        head.append(f"and {len(lost) - MAX_IN_HEAD} more; lora-rocm import lists them.")
    # list the outcomes in the order of the files
    order = {id(setting): number for number, setting in enumerate(translator.settings)}
    outcomes = sorted(translator.outcomes, key=lambda row: order.get(id(row.setting), -1))
    return ImportedRecipe(
        table.name,
        table.version,
        recipe_text(translator.values, head),
        tuple(outcomes),
        (*translator.unread, *translator.files.unread),
        tuple(map(translator.secrets.hidden, (*missing, *notices, *_paths_of_others(translator.values)))),
    )


def translated(paths: Sequence[Path], options: Sequence[str] = ()) -> Translator:
    """Read the files and translate each setting; see ``import_files``.

    Raises:
        UserError: see ``import_files``.
    """
    files = ConfigFiles.given_by(tuple(paths))
    main = files.given[0]
    known = next((found for each in files.given if (found := trainer_in(each.text)) is not None), None)
    if known is None or known not in MODULES:
        names = ", ".join(table_of(each).name for each in MODULES)
        fix = f"Give the main configuration of one of these: {names}. For a recipe of lora-rocm: lora-rocm check FILE."
        raise UserError(
            "import-unknown", "This is not a configuration of a supported trainer.", where=main.file, fix=fix
        )
    trainer, table = trainer_of(known), table_of(known)
    content = trainer.read(files, [f"--{option}" for option in options])
    if not content.settings and not content.unread:
        fix = "Give the whole file that you pass to the other trainer."
        raise UserError("import-unreadable", "No setting in the file can be read.", where=main.file, fix=fix)
    # translate; a value that reaches a secret key is hidden under the other keys too
    secrets = KnownSecrets.of(content)
    settings = [secrets.hidden_in(each) for each in content.settings]
    translator = Translator(table, files, settings, secrets.hidden_of(content.unread), secrets=secrets)
    with secrets.hidden_in_errors():
        trainer.prepare(translator)
        translator.run_table(trainer.functions)
        trainer.finish(translator)
    translator.hide_secrets()
    if table.warmup_from_zero and any(key in translator.values for key in WARMUPS):
        translator.take("optim.lr_warmup_from_zero", True, note=f"the first update has the rate 0 in {table.name}")
    return translator


def _fill_in(translator: Translator) -> list[str]:
    """Write placeholders for values that every recipe needs. Return a sentence about each placeholder."""
    values, found = translator.values, []
    if "model.name_or_path" not in values:
        translator.take("model.name_or_path", PLACEHOLDER, note="write the base model's name or path")
        found.append(f"The configuration names no base model: replace {PLACEHOLDER} in model.name_or_path.")
    if not any(key in ("data.path", "data.dataset") or key.startswith("data.sources[") for key in values):
        is_text = "model.family" in values and values["model.family"].value == "causal-lm"
        key, what = ("data.sources[0].dataset", "table") if is_text else ("data.path", "folder of the data")
        translator.take(key, PLACEHOLDER, note=f"write the name of the {what}")
        found.append(f"The configuration names no data: replace {PLACEHOLDER} in {key}.")
    if "train.epochs" not in values and "train.max_train_steps" not in values:
        translator.take("train.epochs", 1, note="choose the length of the run")
        found.append("The configuration does not set the length of the run: set train.epochs.")
    return found


def _paths_of_others(values: Mapping[str, RecipeValue]) -> Iterator[str]:
    """Yield a sentence about the paths that only another system has: a run would make a folder of such a name."""
    name, begin = OTHER_SYSTEM[sys.platform == "win32"]
    keys = [key for key, each in values.items() if isinstance(each.value, str) and begin.match(each.value)]
    if keys:
        yield f"These paths are from {name}, so this system does not find them: {', '.join(keys)}. Write your own."


def _accepted(translator: Translator) -> tuple[str, ...]:
    """Remove keys that lora-rocm refuses, until it accepts the recipe. Return lora-rocm's notices about the recipe.

    Raises:
        UserError: the recipe has problems that do not concern a removable key.
    """
    while True:
        text = recipe_text(translator.values)
        try:
            return load_text(text, ORIGIN).notices
        except RecipeError as error:
            refused: dict[str, Problem] = {}
            for problem in error.problems:
                key = _given_key(problem, translator.values)
                if key and (key not in refused or refused[key].is_idle):
                    refused[key] = problem
            if not refused:
                problem = error.problems[0]
                what = f"The configuration gives no recipe that lora-rocm accepts: {problem.what}."
                where = translator.files.given[0].file
                raise UserError("import-refused", what, where=where, fix=problem.fix) from None
        for key, problem in refused.items():
            why = problem.what if problem.is_idle else f"lora-rocm refuses it: {problem.what}"
            translator.withdraw(key, why, is_lost=not problem.is_idle)
        _fill_in(translator)


def _given_key(problem: Problem, values: Mapping[str, RecipeValue]) -> str:
    """The first given key that a problem is about: one of its keys or one above it; empty if there is none."""
    for key in problem.keys:
        above = [key[: found.start()] for found in re.finditer(r"[.\[]", key)]
        if given := next((each for each in [key, *above[::-1]] if "." in each and _holds(each, values)), ""):
            return given
    return ""


def _holds(key: str, values: Mapping[str, RecipeValue]) -> bool:
    return any(each == key or each.startswith((f"{key}.", f"{key}[")) for each in values)
