"""Samples that are texts: plain ones, prompts with their completions, conversations, and pairs of answers.

A row of a table is recognised by its columns. A record travels as one string (``written``), which is the caption of its
``Sample``. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from datetime import date, time
from os.path import commonprefix
from typing import Any

MARK = "\x1e"
"""First character of a record that is no plain text (RFC 7464 begins its records with it)."""
ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant", "model": "assistant"}
"""Names of roles in ShareGPT's rows -> names that chat templates know."""
ANSWERS, ASKS = "assistant", "user"
KNOWN_ROLES = ("system", "developer", ASKS, ANSWERS, "tool", "function", "ipython")
"""Roles that chat templates know."""
Cells = Mapping[str, Any]
"""The cells of a row by column, or the fields of a record."""


class UnusableText(Exception):
    """A row or record that cannot be trained on.

    Attributes:
        what, fix: the problem and its remedy, as in ``errors.Problem``.
    """

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.what, self.fix = what, fix


@dataclass(frozen=True)
class Completion:
    """A prompt and the text that the model should write after it."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Conversation:
    """Messages of a chat.

    Attributes:
        messages: each with the keys "role" and "content", and what else the chat template reads ("tool_calls").
        tools: descriptions of functions for the chat template.
        last_only: only the last message is trained on.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Any, ...] = ()
    last_only: bool = False

    @property
    def turns(self) -> tuple[int, ...]:
        """Places of the messages that are trained on."""
        found = tuple(at for at, message in enumerate(self.messages) if message["role"] == ANSWERS)
        return found[-1:] if self.last_only else found

    def up_to(self, turn: int) -> Conversation:
        """The messages up to one that is trained on, which is the only one."""
        return replace(self, messages=self.messages[: turn + 1], last_only=True)


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt: the better one, and the worse one. Both are of one kind."""

    chosen: Completion | Conversation
    rejected: Completion | Conversation


Record = str | Completion | Conversation | Pair


def part(record: Record, number: int) -> Record:
    """One of the samples that a conversation is cut into, one for each message that is trained on."""
    assert isinstance(record, Conversation), "only conversations are cut"
    return record.up_to(record.turns[number])


def written(record: Record) -> str:
    """A record as one string. A plain text is itself, unless it begins with ``MARK``."""
    if isinstance(record, str):
        return record if not record.startswith(MARK) else MARK + json.dumps(record)
    return MARK + json.dumps(record, default=_as_json, ensure_ascii=False, sort_keys=True)


def _as_json(value: Any) -> object:
    """What stands in a record for a value that JSON does not know: of a date, a decimal number or bytes their text."""
    if is_dataclass(value):
        return vars(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", "backslashreplace")
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    return value.tolist() if hasattr(value, "tolist") else str(value)


def read(text: str) -> Record:
    """The record of a string from ``written``."""
    if not text.startswith(MARK):
        return text
    found = json.loads(text[1:])
    if isinstance(found, str):
        return found
    if "chosen" in found:
        return Pair(_answered(found["chosen"]), _answered(found["rejected"]))
    return _answered(found)


def _answered(found: Cells) -> Completion | Conversation:
    if "completion" in found:
        return Completion(**found)
    return Conversation(tuple(found["messages"]), tuple(found["tools"]), found["last_only"])


def encodable(text: str) -> str:
    """A text as it is.

    Raises:
        UnusableText: it holds a lone surrogate, such as half an emoji from JSON that was cut.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise UnusableText(
            f"It holds a lone surrogate ({half}), which is half a character.", "Repair the text, or take the row away."
        ) from error
    return text


def record_of(row: Cells, pairs: bool = False) -> Record:
    """The record of a row, recognised by its columns.

    Args:
        row: the cells by column.
        pairs: read pairs of answers (``pair_of``), and nothing else.

    Raises:
        UnusableText: the columns are not known, or the row has nothing to learn from.
    """
    if pairs:
        return pair_of(row)
    for columns, reader in READERS:
        if columns <= row.keys():
            return reader(row)
    if PAIRED <= row.keys():
        raise UnusableText(
            "It is a pair of answers (columns chosen and rejected), and a text is wanted.",
            "To train on pairs, set objective.loss: dpo. data.watched has texts, also beside pairs.",
        )
    named = "; ".join(", ".join(sorted(columns)) for columns, _ in READERS)
    raise UnusableText(
        f"Its columns are {', '.join(map(str, row)) or 'none'}, and no form of text has these.",
        f"Name them as one of these does: {named}.",
    )


def _of_messages(row: Cells) -> Conversation:
    return _conversation(_mappings(_value_of(row, "messages"), "The column messages"), _tools(row))


def _of_sharegpt(row: Cells) -> Conversation:
    messages = [
        {"role": ROLES.get(str(turn["from"]).lower(), turn["from"]), "content": turn.get("value")}
        if "from" in turn
        else turn
        for turn in _mappings(_value_of(row, "conversations"), "The column conversations")
    ]
    system = row.get("system")
    return _conversation([*([{"role": "system", "content": system}] if system else []), *messages], _tools(row))


def _of_completion(row: Cells) -> Record:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        _require(completion, "The completion")
        return Completion(prompt, completion)
    ends, begin = _listed(completion, "The completion"), _mappings(prompt, "The prompt")
    return replace(_conversation([*begin, *ends], _tools(row)), last_only=True)


def _of_instruction(row: Cells) -> Conversation:
    asked = "\n\n".join(_require(part, "The instruction") for part in (row["instruction"], row.get("input")) if part)
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    return _conversation([*system, {"role": "user", "content": asked}, {"role": ANSWERS, "content": row["output"]}])


def _of_text(row: Cells) -> str:
    return _require(row["text"], "The text")


READERS: tuple[tuple[frozenset[str], Callable[[Cells], Record]], ...] = (
    (frozenset({"messages"}), _of_messages),
    (frozenset({"conversations"}), _of_sharegpt),
    (frozenset({"prompt", "completion"}), _of_completion),
    (frozenset({"instruction", "output"}), _of_instruction),
    (frozenset({"text"}), _of_text),
)
"""Columns -> reader of a row that has them; the first that fits is taken."""
PAIRED = frozenset({"chosen", "rejected"})


def pair_of(row: Cells) -> Pair:
    """The two answers of a row, as TRL reads them: the prompt is a column of its own, or the beginning of both.

    Answers are texts or lists of messages, and so is the prompt. A prompt that is a text before answers that begin with
    the same messages says these once more, and so does a list of messages with which both begin.

    Raises:
        UnusableText: a column is missing, an answer is empty, the answers are the same, or their prompts differ.
    """
    missing = " and ".join(sorted(PAIRED - row.keys()))
    if missing:
        what = f"It has no column {missing}; its columns are {', '.join(map(str, row)) or 'none'}."
        raise UnusableText(what, "objective.loss: dpo takes rows of chosen and rejected, and prompt if they lack it.")
    prompt, answers = row.get("prompt"), (row["chosen"], row["rejected"])
    texts = all(isinstance(answer, str) for answer in answers) and (prompt is None or isinstance(prompt, str))
    pair = _pair_of_texts(prompt, *answers) if texts else _pair_of_messages(prompt, answers, _tools(row))
    if pair.chosen == pair.rejected:
        raise UnusableText("The chosen and the rejected answer are the same.", "Take the row away.")
    return pair


def _pair_of_texts(prompt: str | None, chosen: str, rejected: str) -> Pair:
    _require(chosen, "The chosen answer")
    _require(rejected, "The rejected answer")
    if prompt or chosen == rejected:
        return Pair(Completion(prompt or "", chosen), Completion(prompt or "", rejected))
    shared = commonprefix([chosen, rejected]).removesuffix(" ")  # a space belongs to the word behind it
    if not shared.strip():
        raise UnusableText("Chosen and rejected begin differently, and there is no prompt.", PROMPT_FIX)
    found = [Completion(shared, answer[len(shared) :]) for answer in (chosen, rejected)]
    for name, answer in zip(("chosen", "rejected"), found, strict=True):
        _require(answer.completion, f"Behind the beginning that both answers share, the {name} one")
    return Pair(*found)


def _pair_of_messages(prompt: object, answers: Sequence[object], tools: tuple[Any, ...]) -> Pair:
    begin = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    before = [_message(message) for message in _mappings(begin or [], "The prompt")]
    sides = list[list[dict[str, Any]]]()
    for name, answer in zip(("chosen", "rejected"), answers, strict=True):
        given = [{"role": ANSWERS, "content": answer}] if isinstance(answer, str) else answer
        sides.append([_message(message) for message in _listed(given, f"The {name} answer")])
        last = sides[-1][-1] if sides[-1] else {"content": ""}
        if not last.get("tool_calls"):
            _require(last["content"], f"The {name} answer")
    most = min(map(len, sides)) - 1
    shared = next((n for n in range(most) if sides[0][n] != sides[1][n]), most)
    if shared and (isinstance(prompt, str) or before == sides[0][: len(before)]):
        before = []
    if not before and not shared:
        raise UnusableText("The prompts of chosen and rejected differ, or there is none.", PROMPT_FIX)
    if any(len(side) != shared + 1 or side[-1]["role"] != ANSWERS for side in sides):
        what = "The prompts of chosen and rejected differ, or more than one message of the assistant differs."
        raise UnusableText(what, "Give answers of one message after the same messages.")
    chosen, rejected = (replace(_conversation([*before, *side], tools), last_only=True) for side in sides)
    return Pair(chosen, rejected)


EMPTY_FIX = "Fill it, or take the row away."
MESSAGES_FIX = "Messages are mappings with role and content. Beside a list of them, the other columns are lists too."
PROMPT_FIX = "Let both begin with the same prompt, or give it in the column prompt."


def _conversation(messages: Sequence[Cells], tools: tuple[Any, ...] = ()) -> Conversation:
    found = Conversation(tuple(map(_message, messages)), tools)
    for number, message in enumerate(found.messages, 1):
        role = message["role"]
        if role not in KNOWN_ROLES:
            what = f"Message {number} has the role {role!a:.60}, which chat templates do not know."
            raise UnusableText(what, f"Roles are {', '.join(KNOWN_ROLES)}.")
        if role in (ASKS, ANSWERS) and not message.get("tool_calls"):
            _require(message["content"], f"Message {number} ({role})")
    if not found.turns:
        fix = f"Give a message with the role {ANSWERS}, or take the row away."
        raise UnusableText(f"No message has the role {ANSWERS}, so there is nothing to learn.", fix)
    return found


def _tools(row: Cells) -> tuple[Any, ...]:
    """Descriptions of functions."""
    found = _value_of(row, "tools") or []
    if not isinstance(found, list | tuple):
        raise UnusableText("The column tools is no list.", "Give a list of functions, or its JSON.")
    return tuple(found)


def _value_of(row: Cells, column: str) -> object:
    """The value of a cell that is no text; tables of texts, such as CSV, hold it as JSON. None: it is empty."""
    cell = row.get(column)
    if not isinstance(cell, str) or not cell.strip():
        return None if isinstance(cell, str) else cell
    try:
        return json.loads(cell)
    except (ValueError, RecursionError) as error:
        of = "functions" if column == "tools" else "messages (mappings with role and content)"
        what = f"The column {column} is a text that is no JSON: {error}."
        raise UnusableText(what, f"Give a list of {of}, or its JSON.") from error


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    """A message without empty fields, which tables add, and with its parts of text joined."""
    message = {str(key): value for key, value in given.items() if value is not None}
    if not isinstance(message.get("role"), str):
        raise UnusableText("A message has no role.", "Each message needs role and content.")
    content = message.get("content", "")
    if isinstance(content, list):
        if any(not isinstance(part, Mapping) or part.get("type") != "text" for part in content):
            raise UnusableText("A message holds more than text.", "Take the row away, or leave only its text.")
        parts = ["" if part.get("text") is None else part["text"] for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    if not isinstance(content, str):
        raise UnusableText("A message holds something else than text.", "Give its content as text.")
    return {**message, "content": content}


def _listed(values: object, what: str) -> list[Cells]:
    """``_mappings``, also of one message."""
    return _mappings([values] if isinstance(values, Mapping) else values, what)


def _mappings(values: object, what: str) -> list[Cells]:
    if isinstance(values, Iterable) and not isinstance(values, str | Mapping):
        found = list(values)
        if all(isinstance(value, Mapping) for value in found):
            return found
    if values is None:
        raise UnusableText(f"{what} is empty.", EMPTY_FIX)
    raise UnusableText(f"{what} is no list of messages.", MESSAGES_FIX)


def _require(text: Any, what: str) -> str:
    if not isinstance(text, str) or not text.strip():
        is_empty = text is None or isinstance(text, str)
        raise UnusableText(f"{what} is {'empty' if is_empty else 'no text'}.", EMPTY_FIX)
    return text
