"""Records: samples that are plain texts, prompts with completions, conversations, or pairs of answers.

The columns of a table's row determine the kind of record. ``written`` converts a record to one string, which is the
caption of its ``Sample``. Needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, time
from functools import partial
from os.path import commonprefix
from typing import Any

from lora_rocm.dataset.rows.json_cells import MESSAGES_FIX, messages_or_text, object_in, parsed
from lora_rocm.dataset.rows.loss_keys import (
    TRAINED,
    carry_out_in_message,
    meaning_of,
    refuse_in_part,
    refuse_in_row,
    spelled,
)
from lora_rocm.dataset.rows.refused_columns import refuse_columns
from lora_rocm.dataset.rows.row_cells import RowCells, has_content, listed
from lora_rocm.dataset.rows.row_cells import UnusableText as UnusableText

MARK = "\x1e"
"""First character of every record that is not a plain text. (RFC 7464 begins its records with the same character.)"""
ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant", "model": "assistant"}
"""Converts role names of ShareGPT's rows to the names that chat templates know."""
ANSWERS, ASKS = "assistant", "user"
KNOWN_ROLES = ("system", "developer", ASKS, ANSWERS, "tool", "function", "ipython")
"""Roles that chat templates know."""
CALLS = ("function_call", "tool_call")
"""Roles of messages that contain the assistant's tool calls as JSON, in the formats of LLaMA-Factory and ms-swift."""
RESULTS = ("observation", "tool_response", "function_response")
"""Roles of messages that contain a tool's result."""
PRINTED = ("tool_calls",)  # keys of a message that chat templates print as JSON
Cells = Mapping[str, Any]
"""The cells of a row by column, or the fields of a record."""


@dataclass(frozen=True)
class Completion:
    """A prompt and the text that the model should write after it."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Conversation:
    """Messages of a chat.

    Attributes:
        messages: messages with the keys "role" and "content", and further keys for the chat template ("tool_calls").
            ``TRAINED`` is False if a message is excluded from training. It is True if a message that is not the
            assistant's is included.
        tools: descriptions of functions for the chat template.
        last_only: whether only the last message is trained on.
        num_completion: number of messages at the end that form a completion. Each of them is trained on, regardless of
            its role. 0 means that all answers of the assistant are trained on.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Any, ...] = ()
    last_only: bool = False
    num_completion: int = 0

    @property
    def turns(self) -> tuple[int, ...]:
        """Indices of the assistant's messages that are trained on.

        With ``last_only``, only the last of these messages is considered. The result is empty if the row excludes it.
        """
        first = len(self.messages) - self.num_completion if self.num_completion else 0
        answers = [at for at, message in enumerate(self.messages) if at >= first and message["role"] == ANSWERS]
        asked = answers[-1:] if self.last_only else answers
        return tuple(at for at in asked if self.messages[at].get(TRAINED, True))

    @property
    def others(self) -> tuple[int, ...]:
        """Indices of a completion's messages that are trained on although they are not the assistant's."""
        places = range(len(self.messages) - (0 if self.last_only else self.num_completion), len(self.messages))
        found = ((at, self.messages[at]) for at in places)
        return tuple(at for at, message in found if message["role"] != ANSWERS and message.get(TRAINED, True))

    @property
    def masked(self) -> tuple[int, ...]:
        """Indices of the messages that the row excludes from training."""
        return tuple(at for at, message in enumerate(self.messages) if not message.get(TRAINED, True))

    def up_to(self, turn: int) -> Conversation:
        """Return the conversation up to the message with index ``turn``, with only this message trained on."""
        return replace(self, messages=self.messages[: turn + 1], last_only=True, num_completion=0)


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt: the preferred one and the rejected one. Both have the same type."""

    chosen: Completion | Conversation
    rejected: Completion | Conversation


Record = str | Completion | Conversation | Pair


def part(record: Record, number: int) -> Record:
    """Return one of the samples into which a conversation is cut: a sample per message that is trained on."""
    assert isinstance(record, Conversation), "only conversations are cut"
    return record.up_to(record.turns[number])


def written(record: Record) -> str:
    """Convert a record to one string. A plain text stays as it is, unless it begins with ``MARK``.

    The keys of ``tools`` and of tool calls keep the row's order, because chat templates print them in that order
    (``tool | tojson``). All other keys are sorted, because they are read by name.
    """
    if isinstance(record, str):
        return record if not record.startswith(MARK) else MARK + json.dumps(record)
    return MARK + json.dumps(_in_order(record), default=_as_json, ensure_ascii=False)


def _in_order(record: Completion | Conversation | Pair) -> dict[str, Any]:
    if isinstance(record, Pair):
        return {"chosen": _in_order(record.chosen), "rejected": _in_order(record.rejected)}
    if isinstance(record, Completion):
        return {"completion": record.completion, "prompt": record.prompt}
    messages = [
        {
            key: value if key in PRINTED or isinstance(value, str | bool) else _sorted(value)
            for key, value in sorted(message.items())
        }
        for message in record.messages
    ]
    found = {"last_only": record.last_only, "messages": messages, "tools": record.tools}
    return {**found, "num_completion": record.num_completion} if record.num_completion else found


def _sorted(value: Any) -> Any:
    return json.loads(json.dumps(value, default=_as_json, ensure_ascii=False, sort_keys=True))  # json: written here


def _as_json(value: Any) -> object:
    """Convert a value that JSON does not support. Dates, decimal numbers and bytes become text."""
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
    """Convert a string from ``written`` back to the record."""
    if not text.startswith(MARK):
        return text
    found = json.loads(text[1:])  # json: a record that this process made
    if isinstance(found, str):
        return found
    if "chosen" in found:
        return Pair(_answered(found["chosen"]), _answered(found["rejected"]))
    return _answered(found)


def _answered(found: Cells) -> Completion | Conversation:
    if "completion" in found:
        return Completion(**found)
    return Conversation(**{**found, "messages": tuple(found["messages"]), "tools": tuple(found["tools"])})


def encodable(text: str) -> str:
    """Return the text unchanged, after checking that it can be encoded.

    Raises:
        UnusableText: the text has a lone surrogate, such as half an emoji from truncated JSON.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise UnusableText(
            f"It has a lone surrogate ({half}), which is half a character.", "Repair the text, or remove the row."
        ) from error
    return text


def record_of(row: Cells, pairs: bool = False) -> Record:
    """Build the record of a row. Its columns determine the kind of record.

    Args:
        row: the cells by column.
        pairs: whether to accept only pairs of answers (see ``pair_of``).

    Raises:
        UnusableText: the columns are unknown, or the row has nothing to learn from.
    """
    cells = row if isinstance(row, RowCells) else RowCells(row)
    if pairs:
        refuse_in_row(cells, read=PAIRED)
        return pair_of(cells)
    forms = [form for form in READERS if form[0] <= cells.keys()]
    for columns, reader in sorted(
        forms, key=lambda message_format: not message_format[0] <= cells.filled
    ):  # Arrow fills up with nulls
        is_text = reader is _of_text
        refuse_in_row(cells, read=columns, next_to_text=is_text)
        if not is_text:
            refuse_columns(cells)
        return reader(cells)
    if PAIRED <= cells.keys():
        raise UnusableText(
            "It is a pair of answers (columns chosen and rejected), but a text is expected.",
            "To train on pairs, set objective.loss: dpo. data.watched takes texts even if training uses pairs.",
        )
    for column, meaning in ((str(column), meaning_of(str(column))) for column in cells):
        if meaning is not None and (meaning.kind == "pair" or spelled(column) == "inputids"):
            raise meaning.refusal(column, cells.unread(column), "The row")
    named = "; ".join(", ".join(sorted(columns)) for columns, _ in READERS)
    raise UnusableText(
        f"Its columns are {listed(list(cells)) or 'none'}, which do not match a supported format.",
        f"Rename the columns to one of these sets: {named}.",
    )


PARTS_FIX = (
    'Only parts of the type "text" are read: write {"type": "text", "text": ...}, write the whole content as one text, '
    "or remove the row."
)


def _of_list(column: str, row: RowCells) -> Conversation:
    return _conversation(row, _messages(row, _value_of(row, column), f"The column {column}"))


def _of_completion(row: RowCells) -> Record:
    prompt, completion = (messages_or_text(row[column]) for column in ("prompt", "completion"))
    if isinstance(prompt, str) and isinstance(completion, str):
        _require(completion, "The completion")
        if not _has_system(row):
            return Completion(prompt, completion)
        prompt, completion = [{"role": ASKS, "content": prompt}], [{"role": ANSWERS, "content": completion}]
    ends, begin = _listed(completion, "The completion"), _mappings(prompt, "The prompt")
    before = [_message(row, each, f"Message {n} of prompt", is_trained=False) for n, each in enumerate(begin, 1)]
    after = [_message(row, each, f"Message {n} of completion", is_trained=True) for n, each in enumerate(ends, 1)]
    roles = [message["role"] for message in after]
    if ANSWERS not in roles:
        raise UnusableText(
            f"No message of the completion has the role {ANSWERS}, so there is nothing to learn.", ROLE_FIX
        )
    if roles == [ANSWERS]:
        return _conversation(row, [*before, *after], last_only=True)
    if others := sorted({role for role in roles if role != ANSWERS}):
        row.remarks.add(
            f"The column completion has messages of {', '.join(others):.60}: they are trained on too, as by TRL "
            "(weight: 0 on a message excludes it)"
        )
    return _conversation(row, [*before, *after], num_completion=len(after))


def _of_instruction(row: RowCells) -> Conversation:
    asked = "\n\n".join(_require(part, "The instruction") for part in (row["instruction"], row.get("input")) if part)
    return _of_turns(row, asked, row["output"])


def _of_question(question: str, answer: str, row: RowCells) -> Conversation:
    return _of_turns(row, *(_require(row[column], f"The column {column}") for column in (question, answer)))


def _of_turns(row: RowCells, asked: str, answered: Any) -> Conversation:  # untyped: a cell of any type
    turns = ({"role": ASKS, "content": asked}, {"role": ANSWERS, "content": answered})
    return _conversation(row, [_message(row, turn, "The row") for turn in turns])


def _of_text(row: RowCells) -> str:
    return _require(row["text"], "The text")


COMPLETION = frozenset({"prompt", "completion"})
QUESTIONS = (
    ("question", "answer"),
    ("question", "response"),
    ("query", "answer"),
    ("query", "response"),
    ("input", "output"),
)
"""Pairs of columns with a question and its answer, which are a conversation of the user and the assistant."""
READERS: tuple[tuple[frozenset[str], Callable[[RowCells], Record]], ...] = (
    (frozenset({"messages"}), partial(_of_list, "messages")),
    (frozenset({"conversations"}), partial(_of_list, "conversations")),
    (COMPLETION, _of_completion),
    (frozenset({"instruction", "output"}), _of_instruction),
    (frozenset({"text"}), _of_text),
    *((frozenset(pair), partial(_of_question, *pair)) for pair in QUESTIONS),
)
"""Readers of rows, each with the columns that a row must have for this reader. The first matching reader is used."""
PAIRED = frozenset({"chosen", "rejected"})


def pair_of(cells: Cells) -> Pair:
    """Build the pair of answers of a row, as TRL reads it.

    The prompt is a separate column, or both answers begin with it. Prompt and answers are texts or lists of messages. A
    separate prompt is ignored if the answers already contain it. Answers contain a list prompt if both begin with its
    messages. They contain a text prompt if both begin with the same messages. LLaMA-Factory's rows have the prompt in
    the column conversations.

    Raises:
        UnusableText: a column is missing, an answer is empty, the answers are the same, or their prompts differ.
    """
    row = cells if isinstance(cells, RowCells) else RowCells(cells)
    refuse_columns(row)
    missing = " and ".join(sorted(PAIRED - row.keys()))
    if missing:
        what = f"It has no column {missing}; its columns are {listed(list(row)) or 'none'}."
        raise UnusableText(
            what,
            "objective.loss: dpo needs the columns chosen and rejected, and prompt if the answers do not include it.",
        )
    prompt, *answers = (messages_or_text(row.get(column)) for column in ("prompt", "chosen", "rejected"))
    prompt = _value_of(row, "conversations") if prompt is None and has_content(row.unread("conversations")) else prompt
    texts = [each for each in (prompt, *answers) if isinstance(each, str)]
    if len(texts) == 2 + (prompt is not None) and not _has_system(row):
        pair = _pair_of_texts(texts[0] if prompt is not None else None, *texts[-2:])
    else:
        pair = _pair_of_messages(row, prompt, answers)
    if pair.chosen == pair.rejected:
        raise UnusableText("The chosen and the rejected answer are the same.", "Remove the row.")
    return pair


def _pair_of_texts(prompt: str | None, chosen: str, rejected: str) -> Pair:
    _require(chosen, "The chosen answer")
    _require(rejected, "The rejected answer")
    if prompt or chosen == rejected:
        return Pair(Completion(prompt or "", chosen), Completion(prompt or "", rejected))
    shared = commonprefix([chosen, rejected]).removesuffix(" ")  # a space belongs to the next word
    if not shared.strip():
        raise UnusableText("Chosen and rejected begin differently, and there is no prompt.", PROMPT_FIX)
    found = [Completion(shared, answer[len(shared) :]) for answer in (chosen, rejected)]
    for name, answer in zip(("chosen", "rejected"), found, strict=True):
        _require(answer.completion, f"After the beginning that both answers share, the {name} answer")
    return Pair(*found)


def _pair_of_messages(row: RowCells, prompt: object, answers: Sequence[object]) -> Pair:
    # Convert prompt and answers to messages.
    begin = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    before = _messages(row, begin or [], "The prompt")
    sides = list[list[dict[str, Any]]]()
    for name, answer in zip(("chosen", "rejected"), answers, strict=True):
        given = [{"role": ANSWERS, "content": answer}] if isinstance(answer, str) else answer
        sides.append(_numbered(row, _listed(given, f"The {name} answer"), name))
        last = sides[-1][-1] if sides[-1] else {"content": ""}
        if not last.get("tool_calls"):
            _require(last["content"], f"The {name} answer")
    # Find the messages that both answers share.
    most = min(map(len, sides)) - 1
    shared = next((n for n in range(most) if sides[0][n] != sides[1][n]), most)
    if shared and (isinstance(prompt, str) or before == sides[0][: len(before)]):
        before = []
    if not before and not shared:
        raise UnusableText("The prompts of chosen and rejected differ, or there is no prompt.", PROMPT_FIX)
    if any(len(side) != shared + 1 or side[-1]["role"] != ANSWERS for side in sides):
        what = "The prompts of chosen and rejected differ, or more than one message of the assistant differs."
        raise UnusableText(what, "Write each answer as one message after the same messages.")
    # Both answers have to count in the loss.
    excluded = [
        name for name, side in zip(("chosen", "rejected"), sides, strict=True) if not side[-1].get(TRAINED, True)
    ]
    if excluded:
        what = f"A key such as weight excludes the {' and the '.join(excluded)} answer from training"
        raise UnusableText(f"{what}, but the loss of a pair needs both answers.", "Remove the key or the row.")
    chosen, rejected = (_conversation(row, [*before, *side], last_only=True) for side in sides)
    return Pair(chosen, rejected)


EMPTY_FIX = "Fill it, or remove the row."
ROLE_FIX = f"Add a message with the role {ANSWERS}, or remove the row."
PROMPT_FIX = "Begin both answers with the same prompt, or add it in the column prompt."


def _conversation(
    row: RowCells, messages: Sequence[Mapping[str, Any]], last_only: bool = False, num_completion: int = 0
) -> Conversation:
    """Build the conversation from messages of ``_message`` and from the columns for system message and tools.

    Raises:
        UnusableText: a message has an unknown role or is empty, or no answer is trained on.
    """
    found = Conversation((*_system(row, messages), *messages), _tools(row), last_only, num_completion)
    for number, message in enumerate(found.messages, 1):
        role = message["role"]
        if role not in KNOWN_ROLES:
            what = f"Message {number} has the role {role!a:.60}, which chat templates do not know."
            raise UnusableText(what, f"Use one of these roles: {', '.join(KNOWN_ROLES)}.")
        if role in (ASKS, ANSWERS) and not message.get("tool_calls"):
            _require(message["content"], f"Message {number} ({role})")
    if not messages:
        raise UnusableText("Its list of messages is empty.", EMPTY_FIX)
    if not found.turns:
        if any(message["role"] == ANSWERS for message in found.messages):
            what = "Keys such as weight exclude every answer that would be trained on, so there is nothing to learn."
            raise UnusableText(what, "Remove the row.")
        raise UnusableText(f"No message has the role {ANSWERS}, so there is nothing to learn.", ROLE_FIX)
    return found


def _has_system(row: RowCells) -> bool:
    return any(row.unread(column) for column in SYSTEM)


SYSTEM = ("system", "system_prompt")
"""Columns that contain the system message."""


def _system(row: RowCells, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a list with the system message of the row; empty if there is none, or ``messages`` already has one."""
    found = {column: row[column] for column in SYSTEM if column in row and row.unread(column)}
    first = messages[0] if messages else {"role": ""}
    if first["role"] in ("system", "developer"):
        for column, value in found.items():
            if value != first["content"]:
                row.remarks.add(f"The column {column} is ignored if the messages begin with a different system message")
        return []
    if len(found) == 2 and found["system"] != found["system_prompt"]:
        row.remarks.add("The columns system and system_prompt differ, so system_prompt is ignored")
    return [
        _message(row, {"role": "system", "content": value}, f"The column {column}")
        for column, value in [*found.items()][:1]
    ]


def _tools(row: RowCells) -> tuple[Any, ...]:
    """Return the function descriptions from the column tools, or from the column functions of OpenAI's older format."""
    return _functions(row, "tools") or tuple(
        {"type": "function", "function": function} for function in _functions(row, "functions")
    )


def _functions(row: RowCells, column: str) -> tuple[Any, ...]:
    found = _value_of(row, column)
    if found in (None, "", {}):
        return ()
    tools = [_tool(each) for each in found] if isinstance(found, list | tuple) else [None]
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise UnusableText(
            f"The column {column} is not a list of functions.", "Write a list of functions, or its JSON."
        )
    return tuple(tools)


def _tool(given: Any) -> Any:
    """Return a description of a function, after parsing the parts that are JSON texts."""
    tool = object_in(given)
    if not isinstance(tool, Mapping):
        return tool
    held = {key: object_in(tool[key]) for key in ("function", "parameters") if isinstance(tool.get(key), str)}
    if isinstance(inner := held.get("function", tool.get("function")), Mapping):
        if isinstance(inner.get("parameters"), str):
            held["function"] = {**inner, "parameters": object_in(inner["parameters"])}
    return {**tool, **held}


def _value_of(row: RowCells, column: str) -> object:
    """Return the value of a cell that is not plain text; None if the cell is empty.

    In tables of texts, such as CSV, the value is parsed from JSON.
    """
    cell = row.get(column)
    if not isinstance(cell, str) or not cell.strip():
        return None if isinstance(cell, str) else cell
    of = "messages (mappings with role and content)" if column in ("messages", "conversations") else "functions"
    return parsed(cell, f"The column {column}", f"Write a list of {of}, or its JSON.")


def _messages(row: RowCells, values: object, what: str) -> list[dict[str, Any]]:
    return _numbered(row, _mappings(values, what), what.removeprefix("The ").removeprefix("column "))


def _numbered(row: RowCells, values: Sequence[Cells], column: str) -> list[dict[str, Any]]:
    return [_message(row, each, f"Message {number} of {column}") for number, each in enumerate(values, 1)]


def _message(row: RowCells, given: Mapping[str, Any], where: str, *, is_trained: bool | None = None) -> dict[str, Any]:
    """Convert a message to the spelling of chat templates. Empty fields, which tables add, are removed.

    Unknown keys stay, because only rendering shows whether the chat template reads them.

    Args:
        row: the row that contains the message.
        given: the message as the row has it.
        where: name of the message in errors.
        is_trained: whether the message is trained on if none of its keys decides this. None means that only messages of
            the assistant are.
    """
    message = {str(key): value for key, value in given.items() if value is not None}
    # names of ShareGPT, and of roles elsewhere
    if "role" not in message and "from" in message:
        sender = message.pop("from")
        message["role"] = ROLES.get(sender.lower(), sender) if isinstance(sender, str) else sender
    if "content" not in message and "value" in message:
        message["content"] = message.pop("value")
    if not isinstance(message.get("role"), str):
        keys = listed(sorted(message)) or "none"
        raise UnusableText(f"{where} has no role; its keys are {keys}.", "Each message needs role and content.")
    message["content"] = content = _text(row, message.get("content", ""), where)
    if has_content(message.get("refusal")) and not content.strip() and not message.get("tool_calls"):
        what = f"{where} has no content, but an answer in refusal ({message['refusal']!a:.40})."
        raise UnusableText(what, "Move the text from refusal to content to learn to refuse, or remove the row.")
    # calls of tools
    if message["role"] in CALLS:
        made = parsed(
            content, f"The content of the role {message['role']}", "Write calls as JSON with name and arguments."
        )
        message |= {"role": ANSWERS, "content": "", "tool_calls": _wrapped(made)}
    elif message["role"] in RESULTS:
        message["role"] = "tool"
    if "function_call" in message and not message.get("tool_calls"):  # OpenAI's older format
        message["tool_calls"] = _wrapped(message.pop("function_call"))
    if "tool_calls" in message:
        message["tool_calls"] = _calls(message["tool_calls"])
    of_role = message["role"] == ANSWERS
    return carry_out_in_message(message, where, is_trained=of_role if is_trained is None else is_trained)


def _text(row: RowCells, content: object, where: str) -> str:
    """Return the text of a message. If its content is a list of text parts, they are joined."""
    if isinstance(content, list):
        for number, part in enumerate(content, 1):
            of_part = f"Part {number} of the content of {where[:1].lower()}{where[1:]}"
            if not isinstance(part, Mapping) or part.get("type") != "text":
                kind = part.get("type") if isinstance(part, Mapping) else part
                what = (
                    "has the unsupported type"
                    if isinstance(part, Mapping)
                    else "is not a mapping with type and text, but"
                )
                raise UnusableText(f"{of_part} {what} {kind!a:.40}.", PARTS_FIX)
            refuse_in_part(part, of_part)
        more = {str(key) for part in content for key in part if key not in ("type", "text") and has_content(part[key])}
        row.remarks.update(f"The key {key:.60} of a part of a message's content is not read" for key in sorted(more))
        parts = ["" if part.get("text") is None else part["text"] for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    if not isinstance(content, str):
        raise UnusableText(f"{where} has content that is not text: {content!a:.40}.", "Write the content as text.")
    return content


def _wrapped(made: Any) -> list[Any]:
    """Return tool calls in the format of tool_calls. The given calls may have only a name and arguments."""
    return [call if "function" in call else {"type": "function", "function": call} for call in _calls(made)]


def _calls(given: Any) -> list[Any]:
    """Return tool calls as a list of mappings. The list, each call, and each call's function may be JSON texts."""
    fix = "Write a list of calls, each with a function that has name and arguments."
    if isinstance(given, str):
        given = parsed(given, "tool_calls of a message", fix) if given.strip() else []
    calls = [given] if isinstance(given, Mapping) else [] if given is None else given
    calls = [object_in(call) for call in calls] if isinstance(calls, list | tuple) else [calls]
    if not all(isinstance(call, Mapping) for call in calls):
        raise UnusableText("tool_calls of a message is not a list of calls.", fix)
    return [{**call, "function": object_in(call["function"])} if "function" in call else call for call in calls]


def _listed(values: object, what: str) -> list[Cells]:
    """Return messages as a list of mappings. A single message that is not in a list is accepted, too.

    ``what``: name of the value in errors.
    """
    return _mappings([values] if isinstance(values, Mapping) else values, what)


def _mappings(values: object, what: str) -> list[Cells]:
    if isinstance(values, Iterable) and not isinstance(values, str | Mapping):
        found = [object_in(value) for value in values]
        if all(isinstance(value, Mapping) for value in found):
            return found
    if values is None:
        raise UnusableText(f"{what} is empty.", EMPTY_FIX)
    raise UnusableText(f"{what} is not a list of messages.", MESSAGES_FIX)


def _require(text: Any, what: str) -> str:
    if not isinstance(text, str) or not text.strip():
        is_empty = text is None or isinstance(text, str)
        raise UnusableText(f"{what} is {'empty' if is_empty else 'not text'}.", EMPTY_FIX)
    return text
