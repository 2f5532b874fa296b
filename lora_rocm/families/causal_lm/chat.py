"""Texts and conversations as tokens, with the places that are trained on. The chat template is the tokenizer's own.

What a message of a user, a tool or the system says is plain text, also where it looks like a special token of the
template. Everything else has the tokens that transformers' ``apply_chat_template`` gives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer

from lora_rocm.dataset.records import (
    ANSWERS,
    Completion,
    Conversation,
    Pair,
    Record,
    UnusableText,
    part,
    read,
    written,
)
from lora_rocm.errors import DataError
from lora_rocm.families.causal_lm.message_keys import MessageKeys, with_arguments

BREAKS = "\ue0f1\ue0f2\ue0f3\ue0f4"
"""Letters of private use, one of which keeps the text of a message from being read as a special token."""
BEGIN, END = "⟦", "⟧"
Span = tuple[int, int]


@dataclass(frozen=True)
class Tokens:
    """A sample as tokens.

    Attributes:
        ids: S token ids.
        trained: for each, whether the model should learn to write it.
        whole: the number of tokens before the sample was cut to the longest length.
    """

    ids: tuple[int, ...]
    trained: tuple[bool, ...]
    whole: int


class ChatTokenizer:
    """Makes tokens of records.

    Args:
        tokenizer: of transformers, with a fast backend.
        max_length: most tokens of a sample; the rest is cut off.
        train_on: as ``objective.train_on``.
        name: of the model, for messages.
        pairs: each record has to be a pair of answers.
    """

    def __init__(self, tokenizer: Any, max_length: int, train_on: str, name: str, pairs: bool = False) -> None:
        self.tokenizer, self.max_length, self.train_on, self._name = tokenizer, max_length, train_on, name
        self._pairs, self._num_cut, self._num_joined = pairs, 0, 0
        self._keys = MessageKeys(lambda record: self._rendered(self._with_arguments(record)))

    @property
    def notices(self) -> Sequence[str]:
        found = list[str]()
        if self._num_cut:
            are = "1 text is" if self._num_cut == 1 else f"{self._num_cut} texts are"
            found.append(f"{are} longer than data.max_length ({self.max_length} tokens): the end is not trained on.")
        if self._num_joined:
            have = "1 row has" if self._num_joined == 1 else f"{self._num_joined} rows have"
            columns = "prompt, chosen and rejected" if self._pairs else "messages, or prompt and completion,"
            found.append(
                f"{have} prompt and answer as plain texts: the tokenizer's chat template is not used for them. To "
                f"train on answers in a chat, give {columns} as lists of messages."
            )
        return (*found, *self._keys.notices)

    def parts(self, text: str) -> Sequence[str]:
        """As ``TextReader.parts``: a conversation whose turns are written otherwise once more follow is cut at each."""
        record = read(text)
        of_it = (record.chosen, record.rejected) if isinstance(record, Pair) else (record,)
        for each in of_it:
            self._require_calls(each)
        cut = self._pair(record) if self._pairs else self._cut(record)
        if self._keys.of(record):
            samples = of_it if self._pairs else map(read, cut)
            self._keys.account([each for each in samples if isinstance(each, Conversation)])
        self._num_joined += isinstance(of_it[0], Completion) and self.tokenizer.chat_template is not None
        return cut

    def _cut(self, record: Record) -> Sequence[str]:
        if isinstance(record, Conversation) and not self._last_only(record) and not self._keeps_its_beginnings(record):
            records = [part(record, number) for number in range(len(record.turns))]
        else:
            records = [record]
        for each in records:
            self._checked(each)
        return [written(each) for each in records]

    def _last_only(self, record: Conversation) -> bool:
        return record.last_only or self.train_on == "last-turn"

    def num_tokens(self, text: str) -> int:
        """As ``TextReader.num_tokens``. Of a pair the longer answer counts, to which the other is filled up."""
        record = read(text)
        answers = (record.chosen, record.rejected) if isinstance(record, Pair) else (record,)
        return max(len(self.tokens(answer).ids) for answer in answers)

    def _require_calls(self, record: Record) -> None:
        """Raise UnusableText if the chat template leaves out a call of a tool."""
        if not isinstance(record, Conversation):
            return
        record = self._with_arguments(record)
        for at, message in enumerate(record.messages):
            if not message.get("tool_calls"):
                continue
            until = record.up_to(at)
            silent = {key: value for key, value in message.items() if key != "tool_calls"}
            text = self._rendered(until)
            try:
                is_written = text != self._rendered(replace(until, messages=(*until.messages[:-1], silent)))
            except UnusableText:  # the template wants the call
                is_written = True
            if not is_written:
                raise UnusableText(
                    f"Message {at + 1} ({message['role']}) calls a tool, and the chat template does not write calls: "
                    "the model would learn to leave it out.",
                    "Give a tokenizer whose chat template knows tools (model.tokenizer), or take the row away.",
                )

    def _checked(self, record: Record) -> Tokens:
        """The tokens of a sample that has some to train on; counts those that are cut."""
        found = self.tokens(record)
        if not any(found.trained):
            raise UnusableText(
                f"Its answer begins behind the {self.max_length} tokens that are trained on.",
                f"Raise data.max_length (it has {found.whole}), or shorten the prompt.",
            )
        self._num_cut += found.whole > self.max_length
        return found

    def _pair(self, record: Record) -> Sequence[str]:
        if not isinstance(record, Pair):
            raise UnusableText(
                "It is no pair of answers.", "objective.loss: dpo takes tables with the columns chosen and rejected."
            )
        chosen, rejected = self._checked(record.chosen), self._checked(record.rejected)
        if chosen.ids == rejected.ids:
            raise UnusableText(
                f"Both answers are the same {len(chosen.ids)} tokens as far as they are trained on.",
                "Raise data.max_length, or take the row away.",
            )
        return [written(record)]

    def shown(self, text: str) -> str:
        """As ``TextReader.shown``. Of a pair the chosen answer comes first."""
        record = read(text)
        if isinstance(record, Pair):
            return f"chosen:\n{self._marked_tokens(record.chosen)}\nrejected:\n{self._marked_tokens(record.rejected)}"
        return self._marked_tokens(record)

    def _marked_tokens(self, record: Record) -> str:
        found = self.tokens(record)
        pieces, at = [], 0
        while at < len(found.ids):
            end = next((n for n in range(at, len(found.ids)) if found.trained[n] != found.trained[at]), len(found.ids))
            piece = str(self.tokenizer.decode(found.ids[at:end]))
            pieces.append(f"{BEGIN}{piece}{END}" if found.trained[at] else piece)
            at = end
        return "".join(pieces)

    def trained(self, text: str) -> str:
        """As ``TextReader.trained``; of a pair what is preferred."""
        record = read(text)
        found = self.tokens(record.chosen if isinstance(record, Pair) else record)
        ids = [token for token, counts in zip(found.ids, found.trained, strict=True) if counts]
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of a conversation that the model should go on with, or of a plain text without a template."""
        if self.tokenizer.chat_template is None:
            ids: list[int] = self.tokenizer("".join(message["content"] for message in messages)).input_ids
            return ids
        marked = self._marked(Conversation(tuple(messages)))
        return self._encoded(self._rendered(marked, prompt=True), marked)[0]

    def tokens(self, record: Record) -> Tokens:
        """The tokens of a record.

        Raises:
            DataError: chat-template-missing, chat-template-unfit.
            UnusableText: the template refuses the messages.
        """
        assert not isinstance(record, Pair), "a pair is two texts"
        untrained = list[Span]()
        if isinstance(record, Conversation):
            marked = self._marked(replace(record, last_only=self._last_only(record)))
            text, spans = self._spans(marked)
            untrained = self._masked_spans(text, marked) if self.train_on == "all" else []
            ids, ends = self._encoded(text, marked)
        else:
            text = record if isinstance(record, str) else record.prompt + record.completion
            encoded = self._backend.encode(text, add_special_tokens=True)
            ids, ends = list(encoded.ids), [end for _, end in encoded.offsets]
            start = len(record.prompt) if isinstance(record, Completion) else 0
            spans = [(start, len(text))]
            if self.tokenizer.eos_token_id is not None and ids[-1:] != [self.tokenizer.eos_token_id]:
                ids, ends = [*ids, self.tokenizer.eos_token_id], [*ends, len(text)]
        spans = [(-1, len(text))] if self.train_on == "all" else spans
        trained = [_is_within(end, spans) and not _is_within(end, untrained) for end in ends]
        if ids and not isinstance(record, Conversation):
            trained[-1] = True
        most = self.max_length
        return Tokens(tuple(ids[:most]), tuple([False, *trained[1:]][:most]), len(ids))

    def _spans(self, marked: Conversation) -> tuple[str, list[Span]]:
        """A conversation as text, and where it holds what is trained on."""
        if not marked.turns:
            raise UnusableText("Its last answer is excluded by a key such as weight.", "Take the row away.")
        last = marked.turns[-1]
        text = self._rendered(marked if not marked.last_only else marked.up_to(last))
        spans = []
        for turn in marked.turns:
            begin, end = self._turn(marked, turn)
            if not text.startswith(end):
                raise AssertionError("a conversation whose beginnings change is cut at each turn")
            spans.append((len(begin), self._end_of_turn(end, len(begin))))
        return text, spans

    def _masked_spans(self, text: str, marked: Conversation) -> list[Span]:
        """Where a conversation holds the messages that its row excludes, with their headers.

        Raises:
            UnusableText: the template rewrites them later, so that their place is not known.
        """
        found = []
        for at in (at for at in marked.masked if at < len(marked.messages)):
            begin = self._rendered(replace(marked, messages=marked.messages[:at])) if at else ""
            end = self._rendered(replace(marked, messages=marked.messages[: at + 1]))
            if text.startswith(end) and end.startswith(begin):
                found.append((len(begin) if at else -1, len(end)))
            elif len(begin) < len(text):
                raise UnusableText(
                    f"A key such as weight excludes message {at + 1}, and the chat template rewrites it later, so its "
                    "place is not known.",
                    "Set objective.train_on: answers, or take the row away.",
                )
        return found

    def _keeps_its_beginnings(self, record: Conversation) -> bool:
        """Whether each turn is written alike in the whole conversation and in its beginning up to that turn."""
        marked = self._marked(record)
        text = self._rendered(marked)
        return all(text.startswith(self._turn(marked, turn)[1]) for turn in marked.turns)

    def _turn(self, marked: Conversation, turn: int) -> tuple[str, str]:
        """The conversation before an answer, as the model is asked for it, and with that answer.

        Raises:
            DataError: chat-template-unfit: the one does not begin with the other.
        """
        before = replace(marked, messages=marked.messages[:turn])
        begin, end = self._rendered(before, prompt=True), self._rendered(marked.up_to(turn))
        if not end.startswith(begin):
            raise DataError(
                "chat-template-unfit",
                "The chat template asks for an answer by a text that the answer itself does not begin with, so what "
                "the model should write cannot be told apart.",
                where=f"chat template of {self._name}: {begin[-80:]!r}",
                fix="Give a tokenizer with another chat template (model.tokenizer), or rows of prompt and completion.",
            )
        return begin, end

    def _end_of_turn(self, text: str, begin: int) -> int:
        """The end of what is trained on: behind the token that ends the turn, without the line end that may follow."""
        stripped = text.rstrip()
        ends = any(stripped.endswith(token) for token in self._special) and len(stripped) > begin
        return len(stripped) if ends else len(text)

    def _rendered(self, marked: Conversation, prompt: bool = False) -> str:
        if self.tokenizer.chat_template is None:
            raise DataError(
                "chat-template-missing",
                "The tokenizer has no chat template, and conversations need one.",
                where=f"model.name_or_path: {self._name}",
                fix="Use the instruction-tuned edition, name its tokenizer (model.tokenizer), or give rows of prompt "
                "and completion.",
            )
        try:
            rendered: str = self.tokenizer.apply_chat_template(
                list(marked.messages), tools=list(marked.tools) or None, tokenize=False, add_generation_prompt=prompt
            )
        except (TemplateError, TypeError, LookupError) as error:
            what = f"The chat template refuses its messages: {' '.join(str(error).split())[:200]}."
            raise UnusableText(what, "Change the order or the keys of its messages.") from error
        return rendered

    @cached_property
    def _special(self) -> tuple[str, ...]:
        """Texts of the special tokens, longest first."""
        found = (str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special)
        return tuple(sorted(found, key=len, reverse=True))

    @property
    def end_ids(self) -> set[int]:
        """Special tokens that end an answer in the chat template."""
        if self.tokenizer.chat_template is None:
            return set()
        asked: list[Mapping[str, Any]] = [{"role": "user", "content": "a"}, {"role": ANSWERS, "content": "b"}]
        text, spans = self._spans(Conversation(tuple(asked), last_only=True))
        last = next((token for token in self._special if text[: spans[-1][1]].endswith(token)), None)
        return set() if last is None else {int(self.tokenizer.convert_tokens_to_ids(last))}

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._special)) or r"(?!)")

    @cached_property
    def _plain(self) -> Tokenizer:
        """The tokenizer to which special tokens are text."""
        tokenizer = Tokenizer.from_str(self._backend.to_str())
        tokenizer.encode_special_tokens = True
        return tokenizer

    @cached_property
    def _backend(self) -> Tokenizer:
        """The tokenizer without transformers, which neither cuts nor fills."""
        tokenizer: Tokenizer = self.tokenizer.backend_tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def _with_arguments(self, record: Conversation) -> Conversation:
        return with_arguments(record, self._rendered)

    def _marked(self, record: Conversation) -> Conversation:
        """A conversation with a letter of ``BREAKS`` inside each special token that its messages spell out.

        Its calls have their arguments as the template takes them.
        """
        record, messages = self._with_arguments(record), []
        for message in record.messages:
            content = message["content"]
            if message["role"] != ANSWERS and isinstance(content, str) and self._marks.search(content):
                letter = next((each for each in BREAKS if each not in content), None)
                if letter is None:
                    raise UnusableText("It holds letters of private use.", f"Remove {BREAKS!a} from it.")
                content = self._marks.sub(lambda found: found[0][0] + letter + found[0][1:], content)  # noqa: B023
                message = {**message, "content": content}
            messages.append(message)
        return replace(record, messages=tuple(messages))

    def _encoded(self, text: str, marked: Conversation) -> tuple[list[int], list[int]]:
        """The tokens of a rendered conversation, and where each ends in its text."""
        ids, ends, at = list[int](), list[int](), 0
        broken = {letter for letter in BREAKS if letter in text}
        pieces = re.split(f"({self._marks.pattern})", text) if broken else [text]
        for piece, plain in _joined(pieces, broken):
            tokenizer = self._plain if plain else self._backend
            kept = [n for n, letter in enumerate(piece) if not plain or letter not in broken]
            encoded = tokenizer.encode("".join(piece[n] for n in kept), add_special_tokens=False)
            ids += encoded.ids
            ends += [at + (kept[end - 1] + 1 if end else 0) for _, end in encoded.offsets]
            at += len(piece)
        return ids, ends


def _is_within(end: int, spans: Sequence[Span]) -> bool:
    """Whether a token that ends there belongs to one of some spans."""
    return any(start < end <= stop for start, stop in spans)


def _joined(pieces: Sequence[str], broken: set[str]) -> list[tuple[str, bool]]:
    """Pieces between which no special token was broken as one, each with whether one was inside it."""
    found: list[tuple[str, bool]] = []
    for piece in pieces:
        plain = not broken.isdisjoint(piece)
        if found and not plain and not found[-1][1]:
            found[-1] = (found[-1][0] + piece, False)
        elif piece:
            found.append((piece, plain))
    return found
