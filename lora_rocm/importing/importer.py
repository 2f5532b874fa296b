"""Translates another trainer's files into a recipe that lora-rocm accepts, and reports the outcome of every setting."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.errors import RecipeError, UserError
from lora_rocm.importing.config_files import ConfigFiles
from lora_rocm.importing.recipe_text import recipe_text
from lora_rocm.importing.registry import MODULES, trainer_of
from lora_rocm.importing.rows import table_of
from lora_rocm.importing.setting import UnreadText
from lora_rocm.importing.translator import Outcome, RecipeValue, Translated, Translator
from lora_rocm.recipe.foreign import trainer_in
from lora_rocm.recipe.load import load_text

ORIGIN = Path("recipe")
MAX_IN_HEAD = 30
KEY = re.compile(r"[a-z]\w*(?:\.\w+)+")
PLACEHOLDER = "FILL-THIS-IN"
IDLE = re.compile(
    r"\bhas no effect\b|\bis not read (?:with|by)\b|\bdoes nothing without\b|averages in place of a schedule"
)
"""Matches messages in which lora-rocm refuses a key because it has no effect with the other keys."""


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
    notices = _accepted(translator)
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
        (*missing, *notices),
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
    translator = Translator(table, files, content.settings, [*content.unread])
    trainer.prepare(translator)
    translator.run_table(trainer.functions)
    trainer.finish(translator)
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
            refused: dict[str, str] = {}
            for problem in error.problems:
                found = re.match(rf"{ORIGIN}(?::\d+)?(?::\d+)? (\S+)", problem.where)
                key = _key_of(found[1], translator.values) if found is not None else ""
                if key := key or _key_named(f"{problem.fix} {problem.what}", translator.values):
                    refused[key] = problem.what
            if not refused:
                problem = error.problems[0]
                what = f"The configuration gives no recipe that lora-rocm accepts: {problem.what}."
                where = translator.files.given[0].file
                raise UserError("import-refused", what, where=where, fix=problem.fix) from None
        for key, why in refused.items():
            is_idle = IDLE.search(why) is not None
            translator.withdraw(key, why if is_idle else f"lora-rocm refuses it: {why}", is_lost=not is_idle)
        _fill_in(translator)


def _key_of(named: str, values: Mapping[str, RecipeValue]) -> str:
    """Return the key in ``values`` that a problem is about: the named key or one above it; empty if there is none."""
    own = named.removesuffix(":")
    above = [own[: found.start()] for found in re.finditer(r"[.\[]", own)]
    return next((key for key in [own, *above[::-1]] if "." in key and _holds(key, values)), "")


def _key_named(text: str, values: Mapping[str, RecipeValue]) -> str:
    """Return the first key in ``values`` that the text of a problem names; empty if there is none.

    Used for problems about a whole section.
    """
    return next((key for key in KEY.findall(text) if _holds(key, values)), "")


def _holds(key: str, values: Mapping[str, RecipeValue]) -> bool:
    return any(each == key or each.startswith((f"{key}.", f"{key}[")) for each in values)
