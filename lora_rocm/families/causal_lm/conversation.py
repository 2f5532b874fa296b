"""Renders one conversation with its chat template, and locates the answers in the text.

An answer is located by two renderings: the messages before it with the generation prompt, and these messages with the
answer. The time for this grows with the square of the number of messages. So in a long conversation, most later answers
are located by rendering only a few messages around them. Such a position is used only if the rendered answer matches
the full text exactly. As an extra check, answers 16, 32, 64, ... and the last answer are located by rendering
everything before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lora_rocm.dataset.rows.records import ANSWERS, ASKS, Conversation, UnusableText
from lora_rocm.families.causal_lm.chat_template import FIX, ChatTemplate
from lora_rocm.families.causal_lm.special_tokens import BREAKS, Span, SpecialTokens, changed_inside, leaves

OWN_WORDS = ("content", "reasoning_content", "thinking", "reasoning")
"""Fields of an answer in which special tokens stay special, because the model should learn to write them."""
NUM_WHOLE = 16
"""Number of answers at the start of a conversation that are located by rendering everything before them."""


@dataclass(frozen=True)
class ConversationLayout:
    """A rendered conversation, and the spans to train on."""

    text: str
    spans: Sequence[Span]


@dataclass(frozen=True)
class _Place:
    """Offsets of an answer in the text: its beginning, the end of its turn, and the end of its trained part."""

    begin: int
    end: int
    trained_end: int


class Chat:
    """Renders a conversation and locates its answers.

    Attributes:
        letter: one of ``BREAKS``, inserted into each special token that the data contain as text; "" if there are none.

    Raises:
        UnusableText: the data contain special tokens as text, and also all of the ``BREAKS`` characters.
    """

    def __init__(self, record: Conversation, template: ChatTemplate, special: SpecialTokens) -> None:
        self.record, self._template, self._special = record, template, special
        self.letter, self._marked = "", record
        self._turns, self._whole = record.turns, ""
        texts = list(leaves([*record.messages, *record.tools]))
        self._num_letters, self._has_begun = sum(map(len, texts)), any(map(special.is_begun, texts))
        if any(map(special.is_in, texts)) and any(
            map(special.is_in, leaves([*map(_of_data, record.messages), *record.tools]))
        ):
            self._mark(ends=False)

    def _mark(self, ends: bool) -> None:
        """Break special tokens that the data contain as text.

        With ``ends``, the break is also appended to texts that end in the middle of a special token.
        """
        self.letter = letter = _unused_letter(leaves([*self.record.messages, *self.record.tools]))

        def of_data(text: str) -> str:
            return of_answer(self._special.broken(text, letter))

        def of_answer(text: str) -> str:
            return text + letter if ends and self._special.is_begun(text) else text

        def changed(message: Mapping[str, Any]) -> Mapping[str, Any]:
            data = _of_data(message)
            found = {}
            for key, each in message.items():
                if key == "role":  # a role that templates know
                    found[key] = each
                elif key in data:
                    found[of_data(key)] = changed_inside(each, of_data)
                else:
                    found[key] = of_answer(each)
            return found

        tools = changed_inside(self.record.tools, of_data)
        self._marked = replace(self.record, messages=tuple(map(changed, self.record.messages)), tools=tuple(tools))

    def prompt(self) -> str:
        """Return the rendered conversation up to the point where the model answers."""
        return self._whole_text(len(self.record.messages), prompt=True)

    def layout(self) -> ConversationLayout | None:
        """Return the text and its answers' spans, or None if the template rewrites answers when messages follow.

        Raises:
            UnusableText: the template fails, or the answers cannot be located.
        """
        if not self._turns:
            raise UnusableText(
                "The row's last answer is excluded from training by a key such as weight.", "Remove the row."
            )
        until = self._turns[-1] + 1 if self.record.last_only else len(self._marked.messages)
        self._whole = text = self._whole_text(until)
        found = list[_Place]()
        for number, turn in enumerate(self._turns):
            is_exact = number < NUM_WHOLE or number == len(self._turns) - 1 or not number & (number - 1)
            place = None if is_exact else self._place_nearby(number, found[-1].end)
            if place is None:
                begin, end = self._turn(turn, until)
                if not text.startswith(end):
                    return None
                place = self._place(begin, end, 0)
                if found and found[-1].end > place.begin:
                    return None
            found.append(place)
        return ConversationLayout(text, [(place.begin, place.trained_end) for place in found])

    def excluded(self, text: str) -> list[Span]:
        """Return spans of the messages that the row excludes from training, including their headers.

        text: the text of ``layout``.

        Raises:
            UnusableText: the template rewrites such a message when messages follow, so it cannot be located.
        """
        found, messages = list[Span](), self._marked.messages
        for at in (at for at in self.record.masked if at < len(messages)):
            begin = self._text(messages[:at]) if at else ""
            end = self._text(messages[: at + 1])
            if text.startswith(end) and end.startswith(begin):
                found.append((len(begin) if at else -1, len(end)))
            elif len(begin) < len(text):
                raise UnusableText(
                    f"Message {at + 1}, which a key such as weight excludes from training, cannot be located, "
                    "because the chat template rewrites it when messages follow.",
                    "Set objective.train_on: answers, or remove the row.",
                )
        return found

    def others(self, text: str) -> list[Span]:
        """Return spans of the messages in ``Conversation.others``, including their headers.

        text: the text of ``layout``.

        Raises:
            UnusableText: the template rewrites such a message when messages follow, so it cannot be located.
        """
        found, messages, places = list[Span](), self._marked.messages, self.record.others
        firsts = [at for at in places if at - 1 not in places]
        for first in firsts:  # templates join neighbours into one turn, such as the results of several calls
            until = next(at for at in range(first, len(messages) + 1) if at not in places)
            begin, end = self._text(messages[:first]) if first else "", self._text(messages[:until])
            if not (text.startswith(end) and end.startswith(begin)):
                raise rewritten(first)
            found.append((len(begin) if first else -1, len(end)))
        return found

    def _turn(self, turn: int, until: int) -> tuple[str, str]:
        """Return the text before an answer (with the generation prompt) and the text up to the answer's end."""
        messages = self._marked.messages
        end = self._whole if turn + 1 == until else self._text(messages[: turn + 1])
        nobody_asked = all(message["role"] != ASKS for message in messages[:turn])
        try:
            begin = self._text(messages[:turn], prompt=True)
        except UnusableText:
            if not nobody_asked:
                raise
            return self._after_request(end), end
        if not end.startswith(begin):
            if not nobody_asked:
                raise self._template.unfit(begin)
            begin = self._after_request(end)
        return begin, end

    def _after_request(self, end: str) -> str:
        """Return the part of a text before its answer, located by searching for the template's generation prompt."""
        asked = [{"role": ASKS, "content": "a"}]
        without, request = self._text(asked), self._text(asked, prompt=True)
        words = request.removeprefix(without)
        if not words or words == request or end.count(words) != 1:
            raise self._template.unfit(words)
        return end[: end.index(words) + len(words)]

    def _place(self, begin: str, end: str, at: int) -> _Place:
        """Return an answer's position from its two renderings. ``at``: offset of both renderings in the full text."""
        stripped = end.rstrip()
        ends = self._special.at_end(stripped) is not None and len(stripped) > len(begin)
        return _Place(at + len(begin), at + len(end), at + len(stripped if ends else end))

    def _place_nearby(self, number: int, last_end: int) -> _Place | None:
        """Return an answer's position, found by rendering a few messages around it, or None if that is not possible."""
        turn, last = self._turns[number], self._turns[number - 1]
        try:
            before, begin, end = (
                self._text(nearby(self._marked.messages, self._turns[number - 2], until), prompt)
                for until, prompt in ((last + 1, False), (turn, True), (turn + 1, False))
            )
        except UnusableText:
            return None
        fits = begin.startswith(before) and end.startswith(begin)
        if not fits or not self._whole.startswith(end[len(before) :], last_end):
            return None
        return self._place(begin, end, last_end - len(before))

    def _text(self, messages: Sequence[Mapping[str, Any]], prompt: bool = False) -> str:
        found = self._template.text(messages, self._marked.tools, prompt, self._num_letters)
        escape = f"\\u{ord(self.letter):04x}" if self.letter else ""  # of JSON
        return found.replace(escape, self.letter) if escape else found

    def _whole_text(self, until: int, prompt: bool = False) -> str:
        """Render the first ``until`` messages.

        Raises:
            UnusableText: the template fails, or it handles a broken special token differently.
        """
        found = self._text(self._marked.messages[:until], prompt)
        if self._has_begun:
            before, letter = self._marked, self.letter
            self._mark(ends=True)
            other = self._text(self._marked.messages[:until], prompt)
            if self._special.count(other, self.letter) < self._special.count(found, letter):
                found = other  # two texts of the data together formed one
            else:
                self._marked, self.letter = before, letter
        if self.letter:
            messages = self.record.messages[:until]
            plain = self._template.text(messages, self.record.tools, prompt, self._num_letters)
            if found.replace(self.letter, "") != plain:
                raise UnusableText(
                    "The row contains special tokens as plain text where the chat template changes them.", FIX
                )
        return found


def rewritten(place: int) -> UnusableText:
    """Return the error for a message of a completion that the chat template writes differently if messages follow.

    The message is from the user or a tool, not the assistant.
    """
    return UnusableText(
        f"Message {place + 1} of the completion cannot be located, because the chat template "
        "rewrites it or an answer when messages follow.",
        "Set weight: 0 for the completion's messages that are not the assistant's, or remove the row.",
    )


def nearby(messages: Sequence[Mapping[str, Any]], start: int, until: int) -> list[Mapping[str, Any]]:
    """Return the messages up to the first user message, followed by the messages from ``start`` up to ``until``."""
    first = next((at for at, message in enumerate(messages[:start]) if message["role"] == ASKS), -1)
    return [*messages[: first + 1], *messages[start:until]]


def _of_data(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return those fields of a message in which special tokens count as plain text."""
    own = OWN_WORDS if message["role"] == ANSWERS else ()
    return {
        key: each for key, each in message.items() if key != "role" and (key not in own or not isinstance(each, str))
    }


def _unused_letter(texts: Iterable[str]) -> str:
    left = set(BREAKS)
    for text in texts:
        left -= {letter for letter in left if letter in text}
    if not left:
        raise UnusableText(
            "The row contains special tokens as plain text, and also the private-use characters that would mark them.",
            f"Remove one of the characters {BREAKS!a} from the row.",
        )
    return min(left)
