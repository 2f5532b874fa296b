"""Finds out which message keys, other than role and content, the chat template writes, and how.

A chat template reads only the keys that it knows. Rendering a conversation with and without a key reveals whether the
template reads that key.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lora_rocm.dataset.rows.loss_keys import TRAINED
from lora_rocm.dataset.rows.records import Conversation, Pair, Record, UnusableText
from lora_rocm.dataset.rows.row_cells import NameCount, has_content
from lora_rocm.foundation.json_text import BadJson, NoJson, parse_json
from lora_rocm.foundation.units import count_text

OWN = ("role", "content", "tool_calls", TRAINED)  # ChatTokenizer refuses calls that are not written
THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thoughts", "thought")
"""Keys for the thoughts that precede an answer, in the formats of several models."""
PROBE = {"lora_rocm": "a"}
Render = Callable[[Conversation], str]


class MessageKeys:
    """Counts message keys and tool descriptions that the chat template does not write.

    Args:
        render: renders a conversation with the chat template; raises UnusableText if the template refuses it.
    """

    def __init__(self, render: Render) -> None:
        self._render, self._silent, self._num_silent_tools = render, NameCount(), 0

    @property
    def notices(self) -> list[str]:
        found = self._silent.notices("Keys of messages that the chat template does not write")
        if self._num_silent_tools:
            rows = count_text(self._num_silent_tools, "row")
            found.append(f"The chat template omits the descriptions of functions (tools, functions) of {rows}.")
        return found

    @staticmethod
    def of(record: Record) -> bool:
        """Whether a record has tools or message keys that have to be counted."""
        sides = (record.chosen, record.rejected) if isinstance(record, Pair) else (record,)
        chats = [side for side in sides if isinstance(side, Conversation)]
        return any(chat.tools or any(key not in OWN for each in chat.messages for key in each) for chat in chats)

    def account(self, samples: Sequence[Conversation]) -> None:
        """Count the keys and tools of one row that the template does not write. ``samples`` are the row's parts.

        Raises:
            UnusableText: the template does not write the thoughts of an answer that is trained on.
        """
        held = dict[tuple[str, str], None]()
        for sample in samples:
            for message in sample.messages:
                held |= {
                    (message["role"], key): None
                    for key, value in message.items()
                    if key not in OWN and has_content(value)
                }
            for turn in sample.turns:
                self._require_thoughts(sample, turn)
        silent = [
            key
            for role, key in held
            if not any(
                self._writes(each, key, [at for at, one in enumerate(each.messages) if one["role"] == role])
                for each in samples
            )
        ]
        for key in dict.fromkeys(silent):
            self._silent.add(key)
        described = [sample for sample in samples if sample.tools]
        if described and not any(self._differs(each, replace(each, tools=())) for each in described):
            self._num_silent_tools += 1

    def _require_thoughts(self, sample: Conversation, turn: int) -> None:
        for key in THOUGHTS:
            if has_content(sample.messages[turn].get(key)) and not self._writes(sample, key, [turn]):
                raise UnusableText(
                    f"Message {turn + 1} has {key}, but the chat template omits it, so the model would learn "
                    "to answer without these thoughts.",
                    "Set model.tokenizer to a tokenizer with a chat template for this key, or remove the key "
                    "from the row.",
                )

    def _writes(self, sample: Conversation, key: str, places: Iterable[int]) -> bool:
        """Whether a sample's text changes if the key is removed from the messages at these positions."""
        messages = list(sample.messages)
        for at in places:
            messages[at] = {name: value for name, value in messages[at].items() if name != key}
        return self._differs(sample, replace(sample, messages=tuple(messages)))

    def _differs(self, sample: Conversation, without: Conversation) -> bool:
        text = self._render(sample)
        try:
            return text != self._render(without)
        except UnusableText:  # the template requires the removed part
            return True


def with_arguments(sample: Conversation, render: Render) -> Conversation:
    """Return a conversation with tool call arguments as the chat template expects them: mappings or JSON texts.

    In OpenAI's format the arguments are JSON texts. Most templates convert mappings to JSON, and would add quotes
    around a text. A template that writes texts unchanged gets texts.
    """
    found = [_arguments(call) for message in sample.messages for call in _calls(message)]
    has_texts, has_mappings = any(_decoded(each) is not None for each in found), any(map(_is_mapping, found))
    if not has_texts and not has_mappings:
        return sample
    probe = json.dumps(PROBE)
    takes_texts = probe in (_tried(_replaced(sample, lambda _: probe), render) or "")
    if has_texts and not takes_texts:
        decoded = _replaced(sample, lambda given: given if _is_mapping(given) else _decoded(given))
        return sample if _tried(decoded, render) is None else decoded
    if has_mappings and takes_texts:
        written = _tried(_replaced(sample, lambda _: PROBE), render)
        if written is None or str(PROBE) in written:  # refused, or written as Python writes it
            return _replaced(
                sample, lambda given: json.dumps(given, ensure_ascii=False) if _is_mapping(given) else given
            )
    return sample


def require_whole_calls(sample: Conversation) -> None:
    """Refuse a conversation with a tool call without a name, or with arguments that are not a JSON object.

    A template would write an empty name, or would write null, a number or a quoted text as the arguments.

    Raises:
        UnusableText: such a call exists.
    """
    for at, message in enumerate(sample.messages):
        for call in _calls(message):
            # A name.
            inner = call.get("function", call)
            name = inner.get("name") if isinstance(inner, Mapping) else None
            if not isinstance(name, str) or not name.strip():
                raise UnusableText(
                    f"Message {at + 1} calls a tool without a name: {call!r:.100}.",
                    "Give each call a function with a name and arguments, or remove the row.",
                )
            # Arguments under their own key.
            more = [
                str(key) for key, value in inner.items() if key not in ("name", "description") and has_content(value)
            ]
            if "arguments" not in inner and (inner is not call) and more:
                raise UnusableText(
                    f"Message {at + 1} calls {name:.60} with {more[0]:.60}, but arguments are only read from "
                    "the key arguments.",
                    "Give each call a function with a name and arguments, or remove the row.",
                )
            # Arguments as a mapping or a JSON object.
            given = _arguments(call)
            if "arguments" not in inner or _is_mapping(given):
                continue
            try:
                found, why = parse_json(given) if isinstance(given, str) else given, ""
            except NoJson:
                found, why = None, ""
            except BadJson as error:
                found, why = None, f" ({error})"
            if not isinstance(found, dict):
                raise UnusableText(
                    f"Message {at + 1} calls a tool with arguments that are not a JSON object{why}: {given!r:.100}.",
                    "Write the arguments as a JSON object ({} if there are none), or remove the row.",
                )


def _replaced(sample: Conversation, change: Callable[[Any], Any]) -> Conversation:
    """Apply ``change`` to the arguments of all tool calls that have a mapping or a JSON object."""

    def call_of(call: Any) -> Any:
        given = _arguments(call)
        if not _is_mapping(given) and _decoded(given) is None:
            return call
        inner = call.get("function")
        changed = {"arguments": change(given)}
        return {**call, "function": {**inner, **changed}} if isinstance(inner, Mapping) else {**call, **changed}

    messages = (
        {**message, "tool_calls": [call_of(call) for call in calls]} if (calls := _calls(message)) else message
        for message in sample.messages
    )
    return replace(sample, messages=tuple(messages))


def _calls(message: Mapping[str, Any]) -> Sequence[Any]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else ()


def _arguments(call: Any) -> Any:
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    return inner.get("arguments") if isinstance(inner, Mapping) else None


def _is_mapping(given: object) -> bool:
    return isinstance(given, Mapping)


def _decoded(given: object) -> dict[str, Any] | None:
    """Return the mapping in a JSON text, or None if the value is not such a text."""
    try:
        found = parse_json(given) if isinstance(given, str) else None
    except BadJson:
        return None
    return found if isinstance(found, dict) else None


def _tried(sample: Conversation, render: Render) -> str | None:
    try:
        return render(sample)
    except UnusableText:
        return None
