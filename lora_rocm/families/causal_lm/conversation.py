"""One conversation as its chat template writes it, and the positions of the answers in that text.

An answer is located by two renderings: of the messages before it with the generation prompt, and with the answer. The
time for this grows with the square of the number of messages. So in a long conversation the later answers are located
by renderings of a few messages around each. These positions count only if the parts joined equal the whole text, letter
by letter. The last answer, and ever fewer earlier ones, are also compared with renderings of everything before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lora_rocm.dataset.rows.records import ANSWERS, ASKS, Conversation, UnusableText
from lora_rocm.families.causal_lm.chat_template import FIX, ChatTemplate
from lora_rocm.families.causal_lm.special_tokens import BREAKS, Span, SpecialTokens, changed_inside, leaves

OWN_WORDS = ("content", "reasoning_content", "thinking", "reasoning")
"""Fields of an answer in which special tokens stay special, because the model should write them."""
NUM_WHOLE = 16
"""Number of answers in a conversation that are located by renderings of everything before them."""


@dataclass(frozen=True)
class ConversationLayout:
    """A conversation as text, and the spans to train on."""

    text: str
    spans: Sequence[Span]


@dataclass(frozen=True)
class _Place:
    """The beginning of an answer in the text, the end of its turn, and the end of its trained part."""

    begin: int
    end: int
    trained_end: int


class Chat:
    """Locates the answers of a conversation.

    Attributes:
        letter: one of ``BREAKS``, inserted into each special token that the data spell out; "" if there is none.

    Raises:
        UnusableText: it spells out special tokens but uses all of these letters itself.
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
        """Break the special tokens that data spell out; with ``ends``, also texts that end in the middle of one."""
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
        """The text that the model is asked to continue."""
        return self._whole_text(len(self.record.messages), prompt=True)

    def layout(self) -> ConversationLayout | None:
        """The text with the spans of its answers; None: the template rewrites answers once further messages follow.

        Raises:
            UnusableText: the template fails, or the answers cannot be located.
        """
        if not self._turns:
            raise UnusableText("Its last answer is excluded by a key such as weight.", "Remove the row.")
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
        """Spans of the messages that the row excludes from training, in the text of ``layout``, with their headers.

        Raises:
            UnusableText: the template rewrites one later, so its place is not known.
        """
        found, messages = list[Span](), self._marked.messages
        for at in (at for at in self.record.masked if at < len(messages)):
            begin = self._text(messages[:at]) if at else ""
            end = self._text(messages[: at + 1])
            if text.startswith(end) and end.startswith(begin):
                found.append((len(begin) if at else -1, len(end)))
            elif len(begin) < len(text):
                raise UnusableText(
                    f"A key such as weight excludes message {at + 1}, but the chat template rewrites it later, so it "
                    "cannot be located.",
                    "Set objective.train_on: answers, or remove the row.",
                )
        return found

    def others(self, text: str) -> list[Span]:
        """Spans of the messages in ``Conversation.others``, in the text of ``layout``, with their headers.

        Raises:
            UnusableText: the template rewrites one later, so its place is not known.
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
        """(the text before an answer with the generation prompt, the text with that answer)."""
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
        """The beginning of a text up to its answer, located by the template's generation prompt within the text."""
        asked = [{"role": ASKS, "content": "a"}]
        without, request = self._text(asked), self._text(asked, prompt=True)
        words = request.removeprefix(without)
        if not words or words == request or end.count(words) != 1:
            raise self._template.unfit(words)
        return end[: end.index(words) + len(words)]

    def _place(self, begin: str, end: str, at: int) -> _Place:
        """The position of an answer. ``at``: offset of both texts in the whole."""
        stripped = end.rstrip()
        ends = self._special.at_end(stripped) is not None and len(stripped) > len(begin)
        return _Place(at + len(begin), at + len(end), at + len(stripped if ends else end))

    def _place_nearby(self, number: int, last_end: int) -> _Place | None:
        """The position of an answer from a few messages around it; None: they do not determine it."""
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
        """The text of the first messages.

        Raises:
            UnusableText: also if the template handles a broken special token differently.
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
                raise UnusableText("It spells out special tokens where the chat template changes them.", FIX)
        return found


def rewritten(place: int) -> UnusableText:
    """The error for a completion with a message, not the assistant's, that the chat template rewrites later."""
    return UnusableText(
        f"Message {place + 1} is part of the completion, but the chat template rewrites it or an answer later, so it "
        "cannot be located.",
        "Give weight: 0 to the messages of the completion that are not the assistant's, or remove the row.",
    )


def nearby(messages: Sequence[Mapping[str, Any]], start: int, until: int) -> list[Mapping[str, Any]]:
    """Messages before ``until``. Of the messages before the answer ``start``, only those up to the first user's."""
    first = next((at for at, message in enumerate(messages[:start]) if message["role"] == ASKS), -1)
    return [*messages[: first + 1], *messages[start:until]]


def _of_data(message: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a message that are data, in which special tokens are plain text."""
    own = OWN_WORDS if message["role"] == ANSWERS else ()
    return {
        key: each for key, each in message.items() if key != "role" and (key not in own or not isinstance(each, str))
    }


def _unused_letter(texts: Iterable[str]) -> str:
    left = set(BREAKS)
    for text in texts:
        left -= {letter for letter in left if letter in text}
    if not left:
        raise UnusableText("It contains private-use characters.", f"Remove {BREAKS!a} from it.")
    return min(left)
