"""``lora-rocm import``: a recipe from another trainer's configuration, and a table of what became of each setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.errors import UserError
from lora_rocm.foundation.files import require_place, write_atomic
from lora_rocm.foundation.terminal_text import quoted
from lora_rocm.foundation.units import count_text
from lora_rocm.importing.importer import import_files
from lora_rocm.importing.setting import UnreadText
from lora_rocm.importing.translator import Outcome, Translated

LOST = 2
"""Exit code with --strict if something was lost that changes the weights."""
TITLES: dict[Outcome, str] = {
    "taken": "Taken over",
    "changed": "Taken over with another meaning",
    "not-needed": "Not needed here",
    "unsupported": "Not supported",
}


@dataclass(frozen=True)
class ImportedSetting:
    """The outcome of one setting of the other trainer.

    Attributes:
        key: name of the setting as in its file, dotted.
        value: value of the setting as in its file, shortened; ``***`` for a secret.
        where: file and line; empty for a default of the other trainer, which its file does not mention.
        outcome: taken, changed, not-needed or unsupported.
        ours: the recipe key, or null if there is none.
        note: how the meanings differ, why the setting was not taken, or its effect. Null if the meaning is the same.
        changes_weights: whether losing it changes the trained weights.
    """

    key: str
    value: str
    where: str
    outcome: Outcome
    ours: str | None
    note: str | None
    changes_weights: bool


@dataclass(frozen=True)
class UnreadPart:
    """A part of a file that could not be read.

    Attributes:
        where: file and line.
        why: the reason, as a clause.
    """

    where: str
    why: str


@dataclass(frozen=True)
class ImportResult:
    """An imported configuration.

    Attributes:
        trainer: the other trainer.
        recipe: the recipe as YAML.
        output: the file to which the recipe was written, or null if it was not.
        settings: what became of every setting, in the order of the files; defaults of the other trainer come first.
        unread: parts of the files that could not be read.
        notices: sentences about the recipe.
        is_complete: whether nothing was lost that changes the trained weights.
    """

    trainer: str
    recipe: str
    output: Path | None
    settings: tuple[ImportedSetting, ...]
    unread: tuple[UnreadPart, ...]
    notices: tuple[str, ...]
    is_complete: bool


def import_config(paths: Sequence[Path], options: Sequence[str], output: Path | None) -> ImportResult:
    """Translate the files of another trainer, and write the recipe if ``output`` is given.

    Raises:
        UserError: ``output`` exists, or see ``import_files``.
    """
    if output is not None and output.exists():
        fix = "Choose another name, or remove the file."
        raise UserError("file-exists", "The recipe would replace a file.", where=str(output), fix=fix)
    require_place(output, "--output")
    found = import_files(paths, options)
    if output is not None:
        write_atomic(output, found.text.encode("utf-8"))
    return ImportResult(
        found.trainer,
        found.text,
        output,
        tuple(map(_setting, found.outcomes)),
        tuple(map(_unread, found.unread)),
        found.notices,
        not found.loses_something,
    )


def _setting(row: Translated) -> ImportedSetting:
    setting = row.setting
    return ImportedSetting(
        setting.key, setting.shown, setting.where, row.outcome, row.ours or None, row.note or None, row.changes_weights
    )


def _unread(part: UnreadText) -> UnreadPart:
    return UnreadPart(f"{part.file}:{part.line}" if part.line else part.file, part.why)


def outcomes_text(result: ImportResult) -> str:
    """Return the table of settings, and how to go on."""
    lines = [f"A configuration of {result.trainer}: {_counts(result)}."]
    for outcome, title in TITLES.items():
        rows = [row for row in result.settings if row.outcome == outcome and (row.where or outcome != "not-needed")]
        if not rows:
            continue
        lines += ["", f"{title} ({_number(rows)})"]
        lines += [f"  {_row(row)}" for row in rows]
    if result.unread:
        lines += ["", f"Not read ({len(result.unread)})"]
        lines += [f"  {part.where}: {part.why}" for part in result.unread]
    lines += ["", *result.notices] if result.notices else []
    if result.output is not None:
        lines += ["", f"Written: {result.output}", f"next: {quoted(['lora-rocm', 'check', str(result.output)])}"]
    else:
        lines += ["", "To write the recipe to a file, add: --output my-recipe.yaml"]  # options may be secrets
    return "\n".join(lines)


def _number(rows: Sequence[ImportedSetting]) -> str:
    """Return the number of settings, and of defaults among them, as in the line above the table."""
    defaults = sum(not row.where for row in rows)
    given = [str(len(rows) - defaults)] if defaults < len(rows) else []
    return " and ".join([*given, *([count_text(defaults, "default")] if defaults else [])])


def _counts(result: ImportResult) -> str:
    given = [row for row in result.settings if row.where]
    defaults = len(result.settings) - len(given)
    parts = [f"{sum(row.outcome == outcome for row in given)} {title.lower()}" for outcome, title in TITLES.items()]
    told = f", and {count_text(defaults, 'default')} written down" if defaults else ""
    return f"{count_text(len(given), 'setting')}: {', '.join(parts)}{told}"


def _row(row: ImportedSetting) -> str:
    place = f"{row.where} " if row.where else "its default: "
    arrow = f" -> {row.ours}" if row.ours and row.outcome in ("taken", "changed") else ""
    return f"{place}{row.key} = {row.value}{arrow}{f': {row.note}' if row.note else ''}"
