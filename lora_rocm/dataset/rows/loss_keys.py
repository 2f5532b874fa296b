"""Keys that affect the loss, in rows, messages and message parts (``loss_keys.toml``).

Each key is applied, or its row is refused, or it is reported as having no effect. So none of these keys is ever
ignored silently as an unknown column.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from lora_rocm.dataset.rows.row_cells import RowCells, UnusableText, has_content
from lora_rocm.foundation.tables import read_rows

TRAINED = "trained"
"""Key that is added to a message to override whether it is trained on. It is False if the row excludes the message. It
is True if the row includes a message that is not the assistant's. Other messages do not have the key.
"""
WORDS_OF_FLAGS = frozenset(
    "yes no on off y n t f none all good bad desirable undesirable chosen rejected accepted masked unmasked train skip "
    "ignore keep drop include exclude up down positive negative".split()
)
"""Words that mean yes or no in some format. Under a key listed in ``LossKey.everyday``, any other word is ordinary
data.
"""
ANSWER_COLUMNS = ("messages", "conversations", "completion", "output")


@dataclass(frozen=True)
class LossKey:
    """One kind of key in ``loss_keys.toml``; the file explains the other fields.

    holds: meaning of the key, for messages.
    beside_text: names that have no meaning for the loss if the row is a plain text.
    """

    id: str
    kind: Literal["mask", "refused", "label", "pair", "harmless"]
    names: tuple[str, ...]
    holds: str
    fix: str
    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    everyday: tuple[str, ...] = ()
    beside_text: tuple[str, ...] = ()

    def refusal(self, key: str, value: object, where: str) -> UnusableText:
        return UnusableText(
            f"{where} has {key:.60} {value!a:.40}, which is not supported. The key specifies {self.holds}.", self.fix
        )

    def is_data(self, key: str, value: object) -> bool:
        """Whether a value is ordinary data: a word that does not mean yes or no, under a key listed in ``everyday``."""
        if spelled(key) not in map(spelled, self.everyday) or not isinstance(value, str):
            return False
        return _number(value) is None and flag_of(value) is None and value.strip().lower() not in WORDS_OF_FLAGS


def spelled(key: object) -> str:
    """Return a key in lower case, without the characters that separate its words."""
    return re.sub(r"[\W_]+", "", str(key).casefold())


@lru_cache(maxsize=1)
def _by_name() -> tuple[dict[str, LossKey], list[tuple[str, str, LossKey]]]:
    names, patterns = dict[str, LossKey](), list[tuple[str, str, LossKey]]()
    for each in read_rows(Path(__file__).with_suffix(".toml"), LossKey):
        names |= {spelled(name): each for name in each.names}
        patterns += [(spelled(begin), "", each) for begin in each.begins]
        patterns += [("", spelled(end), each) for end in each.ends]
    return names, patterns


@lru_cache(maxsize=4096)
def meaning_of(key: str) -> LossKey | None:
    """Return the kind of key that a name belongs to; None if a key of this name does not affect the loss."""
    names, patterns = _by_name()
    name = spelled(key)
    if name in names:
        return names[name]
    return next((each for begin, end, each in patterns if name.startswith(begin) and name.endswith(end)), None)


def _number(value: object) -> float | None:
    try:
        return float(value) if isinstance(value, int | float | Decimal | str) else None
    except (ValueError, OverflowError):
        return None


def flag_of(value: object) -> bool | None:
    """Return whether a value means yes or no; None if it means neither."""
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    return {0.0: False, 1.0: True}.get(number) if (number := _number(value)) is not None else None


def carry_out_in_message(message: Mapping[str, Any], where: str, *, is_trained: bool) -> dict[str, Any]:
    """Apply a message's keys that decide whether it is trained on.

    Args:
        message: a message of a row, in the spelling of chat templates.
        where: name of the message in errors ("Message 2").
        is_trained: whether the message is trained on without such keys.

    Returns:
        The message without these keys. ``TRAINED`` is added if the keys change whether it is trained on.

    Raises:
        UnusableText: a key has a value that cannot be applied, or two keys contradict each other.
    """
    kept, said = dict[str, Any](), dict[str, bool]()
    for key, value in message.items():
        meaning = meaning_of(key)
        if meaning is None or meaning.kind == "harmless" or (meaning.kind != "mask" and not has_content(value)):
            kept[key] = value
        elif meaning.kind != "mask":
            if not meaning.is_data(key, value):
                raise meaning.refusal(key, value, where)
            kept[key] = value
        elif has_content(value):
            flag = flag_of(value)
            if flag is None:
                raise meaning.refusal(key, value, where)
            said[key] = flag
    flag = _agreed(said, where)
    return kept if flag is None or (flag and is_trained) else {**kept, TRAINED: flag}


def refuse_in_part(part: Mapping[str, Any], where: str) -> None:
    """Raise UnusableText if a part of a message's content has a key that affects the loss.

    Parts cannot be treated differently, so only a key that includes the part in training is accepted.
    """
    for key, value in part.items():
        meaning = meaning_of(str(key))
        if meaning is None or meaning.kind == "harmless" or not has_content(value) or meaning.is_data(str(key), value):
            continue
        if meaning.kind != "mask" or flag_of(value) is not True:
            raise meaning.refusal(str(key), value, where)


def refuse_in_row(row: RowCells, *, read: Collection[str] = (), next_to_text: bool = False) -> None:
    """Apply a row's columns that affect the loss, and raise UnusableText if a column cannot be applied.

    Applied columns are marked as read. Columns without an effect add a remark to the row.

    Args:
        row: the cells by column.
        read: columns that contain the sample itself, which are not checked.
        next_to_text: whether the row is a plain text.
    """
    said, answers = dict[str, bool](), [row.unread(column) for column in ANSWER_COLUMNS if column in row]
    is_chosen = any(has_content(each) and each == row.unread("chosen") for each in answers)
    # Apply, refuse or report each column about the loss.
    for column in (column for column in row if column not in read):
        meaning, value = meaning_of(str(column)), row.unread(column)
        if meaning is None or (next_to_text and spelled(column) in map(spelled, meaning.beside_text)):
            continue
        name = str(column)
        if not has_content(value):
            if meaning.kind == "label" and not next_to_text:
                what = f"Its column {name:.60} is empty in a table that uses it to mark good answers."
                raise UnusableText(what, "Fill it and keep only good answers, or remove the column from all rows.")
        elif meaning.kind == "harmless":
            row.remarks.add(f"The column {name:.60} ({meaning.holds}) has no effect: all rows have the same weight")
            row[column]
        elif meaning.kind == "mask" and flag_of(value) is not None:
            said[name] = bool(flag_of(value))
            row[column]
        elif meaning.kind == "pair" and is_chosen:
            row.remarks.add(f"The column {name:.60} is not read: the rows are trained on as texts (objective.loss)")
            row[column]
        elif not meaning.is_data(name, value):
            raise meaning.refusal(name, value, "The row")
    # Refuse a row that these columns exclude from training.
    if _agreed(said, "The row") is False:
        column = next(iter(said))
        what = f"Its column {column:.60} is {row.unread(column)!a:.20}, which excludes the row from training."
        raise UnusableText(what, "Remove the row.")


def _agreed(described: Mapping[str, bool], where: str) -> bool | None:
    """Return the value that all keys have in common; None if there are no keys.

    ``described``: for each key, whether it includes the row or message in training. ``where``: its name in errors.

    Raises:
        UnusableText: the keys contradict each other.
    """
    flags = set(described.values())
    if len(flags) == 2:
        yes, no = (next(key for key, flag in described.items() if flag is wanted) for wanted in (True, False))
        what = (
            f"{where} has keys that contradict each other: {yes:.60} includes it in training, and {no:.60} excludes it."
        )
        raise UnusableText(what, f"Keep one of {yes:.60} and {no:.60}.")
    return next(iter(flags), None)
