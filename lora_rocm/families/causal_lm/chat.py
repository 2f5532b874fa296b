"""Encodes texts and conversations as tokens, with marks on trained tokens. It uses the tokenizer's chat template.

The content of messages from users, tools and the system is treated as plain text, even where it looks like a special
token of the template. Everything else gets the same tokens as with transformers' ``apply_chat_template``.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from tokenizers import Tokenizer

from lora_rocm.dataset.rows.loss_keys import TRAINED
from lora_rocm.dataset.rows.plain_prompts import is_plain, plain_prompts_warning
from lora_rocm.dataset.rows.records import (
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
from lora_rocm.dataset.rows.row_edge import SharedCause, fails_for_all, row_edge
from lora_rocm.families.causal_lm.chat_template import ChatTemplate
from lora_rocm.families.causal_lm.conversation import NUM_WHOLE, Chat, ConversationLayout, nearby, rewritten
from lora_rocm.families.causal_lm.message_keys import MessageKeys, require_whole_calls, with_arguments
from lora_rocm.families.causal_lm.special_tokens import Span, SpecialTokens
from lora_rocm.families.causal_lm.template_limits import OverLimit
from lora_rocm.foundation.terminal_text import printable

BEGIN, END = "⟦", "⟧"
MAX_TRIED = 32
"""After this many consecutive answers beyond the maximum length, all later answers of the conversation are skipped."""
MAX_OVER_LIMIT = 8
"""Number of rows that may exceed the chat template's limits. The template is refused if more rows do so, and if they
are most of the rows.
"""
MAX_LENGTHS = 50_000
"""Maximum number of samples with a stored length. The length of any other sample is found by encoding it again."""
MAX_USUAL_GROWTH, MAX_NORMALISED_LETTERS = 100, 1 << 22
"""Usual maximum growth of a text in a normalizer (characters written per character), and the maximum length of a
normalised text if the growth may be larger.
"""


@dataclass(frozen=True)
class Tokens:
    """A sample as tokens.

    Attributes:
        ids: token ids.
        trained: for each token, whether the model learns to predict it.
        whole: number of tokens before the sample was cut to the maximum length.
        brings_ends: whether a plain text already contained the tokenizer's begin or end token.
    """

    ids: tuple[int, ...]
    trained: tuple[bool, ...]
    whole: int
    brings_ends: bool = False


class ChatTokenizer:
    """Encodes records as tokens.

    Args:
        tokenizer: a transformers tokenizer with a fast backend.
        max_length: maximum number of tokens per sample; the rest is cut off.
        train_on: value of ``objective.train_on``.
        name: name of the model, for messages.
        pairs: whether each record has to be a pair of answers.
        num_rows: number of rows in the model's embedding table, or None if unknown. Texts with ids beyond it are
            refused.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_length: int,
        train_on: str,
        name: str,
        pairs: bool = False,
        num_rows: int | None = None,
    ) -> None:
        self._num_table_rows = num_rows
        self.tokenizer, self.max_length, self.train_on, self._name = tokenizer, max_length, train_on, name
        self._template, self._pairs = ChatTemplate(tokenizer, name), pairs
        self._num_rows = self._num_over_limit = 0
        self._lengths: dict[bytes, int] = {}
        self._num_cut = self._num_joined = self._num_behind = self._num_whole = 0
        self._keys = MessageKeys(lambda record: self._rendered(self._with_arguments(record)))

    @property
    def takes_conversations(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return self._template.is_there

    def require_template(self, where: str) -> None:
        """Refuse a chat template that cannot be compiled (see ``ChatTemplate.require_readable``)."""
        self._template.require_readable(where)

    @property
    def notices(self) -> Sequence[str]:
        found = list[str]()
        if self._num_cut:
            are = "1 text is" if self._num_cut == 1 else f"{self._num_cut} texts are"
            found.append(f"{are} longer than data.max_length ({self.max_length} tokens), so the end is not trained on.")
        if self._num_behind:
            are = "1 answer begins" if self._num_behind == 1 else f"{self._num_behind} answers begin"
            found.append(
                f"{are} after the first {self.max_length} tokens of the conversation (data.max_length) and cannot be "
                "trained on. Earlier answers of these conversations are trained on."
            )
        if self._num_whole:
            have = "1 text begins or ends" if self._num_whole == 1 else f"{self._num_whole} texts begin or end"
            found.append(f"{have} with the tokenizer's begin or end token, which is therefore not added again.")
        return (*found, *self._keys.notices)

    @property
    def warnings(self) -> Sequence[str]:
        return [plain_prompts_warning(self._num_joined, pairs=self._pairs)] if self._num_joined else []

    def parts(self, text: str) -> Sequence[str | None]:
        """Implements ``TextReader.parts``.

        A conversation is split into one sample per answer if the template rewrites answers when messages follow.
        """
        self._num_rows += 1
        try:
            return self._parts(read(text))
        except UnusableText as error:
            self._count_over_limit(error)
            raise

    def _parts(self, record: Record) -> Sequence[str | None]:
        of_it = (record.chosen, record.rejected) if isinstance(record, Pair) else (record,)
        for each in of_it:
            self._require_trained(each)
            self._require_calls(each)
        cut = self._pair(record) if self._pairs else self._cut(record)
        if self._keys.of(record):
            samples = of_it if self._pairs else [read(each) for each in cut if each is not None]
            self._keys.account([each for each in samples if isinstance(each, Conversation)])
        self._num_joined += is_plain(record) and self.takes_conversations
        return cut

    def _count_over_limit(self, error: UnusableText) -> None:
        """Count a row that exceeds the chat template's limits, and raise if most rows do.

        Trying each of them would take hours.
        """
        if not isinstance(error, SharedCause) or not isinstance(error.__cause__, OverLimit):
            return
        self._num_over_limit += 1
        if self._num_over_limit >= MAX_OVER_LIMIT and 2 * self._num_over_limit > self._num_rows:
            raise error.of_all from error

    def _cut(self, record: Record) -> Sequence[str | None]:
        if isinstance(record, Conversation) and not self._last_only(record):
            chat = self._chat(record)
            layout = chat.layout()
            if layout is None:
                if record.others and self.train_on == "answers":
                    raise rewritten(record.others[0])
                return self._cut_at_turns(record)
            tokens = self._of_layout(chat, layout)
        else:
            tokens = self.tokens(record)
        return [self._used(record, tokens)]

    def _cut_at_turns(self, record: Conversation) -> Sequence[str | None]:
        """Return one sample per answer, or None for an answer that begins after the maximum length."""
        found, not_fitting, whole = list[str | None](), 0, 0
        for number in range(len(record.turns)):
            one = part(record, number)
            tokens = self.tokens(one) if not_fitting < MAX_TRIED else None
            if tokens is None or not any(tokens.trained):
                whole, not_fitting = whole or (0 if tokens is None else tokens.whole), not_fitting + 1
                found.append(None)
            else:
                not_fitting = 0
                found.append(self._used(one, tokens))
        if not any(found):
            raise self._too_long(whole)
        self._num_behind += found.count(None)
        return found

    def _last_only(self, record: Conversation) -> bool:
        return record.last_only or self.train_on == "last-turn"

    def num_tokens(self, text: str) -> int:
        """Implements ``TextReader.num_tokens``.

        For a pair, return the length of the longer answer, to which the other one is padded.
        """
        known = self._lengths.get(_digest(text))
        if known is not None:
            return known
        record = read(text)
        answers = (record.chosen, record.rejected) if isinstance(record, Pair) else (record,)
        return max(len(self.tokens(answer).ids) for answer in answers)

    def _require_trained(self, record: Record) -> None:
        """Raise UnusableText if the row requests training on a message that ``objective.train_on`` excludes."""
        if not isinstance(record, Conversation) or self.train_on == "all":
            return
        for at, message in enumerate(record.messages):
            if message.get(TRAINED):
                raise UnusableText(
                    f"Message {at + 1} ({message['role']}) is marked for training by a key such as train or "
                    f"weight, but objective.train_on: {self.train_on} excludes it.",
                    "Set objective.train_on: all, or remove the key from messages that are not answers.",
                )

    def _require_calls(self, record: Record) -> None:
        """Raise UnusableText if the chat template omits a tool call."""
        if not isinstance(record, Conversation):
            return
        require_whole_calls(record)
        record = self._with_arguments(record)
        turns = record.turns
        for at, message in enumerate(record.messages):
            if not message.get("tool_calls"):
                continue
            silent = {key: value for key, value in message.items() if key != "tool_calls"}
            number = bisect_left(turns, at)
            before = record.messages[:at]
            if NUM_WHOLE <= number < len(turns):
                before = tuple(nearby(record.messages, turns[number - 2], at))
            text = self._template.text([*before, message], record.tools)
            try:
                is_written = text != self._template.text([*before, silent], record.tools)
            except UnusableText:  # the template requires the call
                is_written = True
            if not is_written:
                raise UnusableText(
                    f"Message {at + 1} ({message['role']}) calls a tool, but the chat template omits tool "
                    "calls, so the model would learn not to call tools.",
                    "Set model.tokenizer to a tokenizer with a chat template for tools, or remove the row.",
                )

    def _used(self, record: Record, *found: Tokens) -> str:
        """Return a sample as one string, and store its number of tokens. ``found`` are the sample's encoded texts.

        Raises:
            UnusableText: one of the texts has no tokens to train on.
        """
        for tokens in found:
            if not any(tokens.trained):
                raise self._too_long(tokens.whole)
        for tokens in found:
            self._num_cut += tokens.whole > self.max_length
            self._num_whole += tokens.brings_ends
        text = written(record)
        if len(self._lengths) < MAX_LENGTHS:
            self._lengths[_digest(text)] = max(len(tokens.ids) for tokens in found)
        return text

    def _too_long(self, whole: int) -> UnusableText:
        return UnusableText(
            f"Its answer begins after the {self.max_length} tokens that are trained on.",
            f"Raise data.max_length (the text has {whole} tokens), or shorten the prompt.",
        )

    def _pair(self, record: Record) -> Sequence[str]:
        if not isinstance(record, Pair):
            raise UnusableText(
                "The row is not a pair of answers.",
                "For objective.loss: dpo, use tables with the columns chosen and rejected.",
            )
        chosen, rejected = (self.tokens(answer) for answer in (record.chosen, record.rejected))
        if chosen.ids == rejected.ids and any(chosen.trained):
            raise UnusableText(
                f"Both answers have the same {len(chosen.ids)} tokens within data.max_length.",
                "Raise data.max_length, or remove the row.",
            )
        return [self._used(record, chosen, rejected)]

    def shown(self, text: str) -> str:
        """Implements ``TextReader.shown``. In a pair, the chosen answer comes first."""
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

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]], *, plain: bool = False) -> list[int]:
        """Return the tokens of a conversation for the model to continue.

        Without a chat template, or if ``plain``, the messages' contents are joined as plain text.

        Raises:
            UnusableText: the template or the tokenizer fails.
        """
        if plain or not self._template.is_there:
            with self._tokenizing():
                text = "".join(message["content"] for message in messages)
                return list(self._with_ends(text, eos=False)[0])
        chat = self._chat(Conversation(tuple(messages)))
        text = chat.prompt()
        return self._in_table(self._encoded(text, chat.letter)[0])

    def tokens(self, record: Record) -> Tokens:
        """Encode a record that is not a pair.

        Raises:
            UnusableText: the template refuses the messages, or the tokenizer refuses the text.
        """
        assert not isinstance(record, Pair), "a pair is two texts"
        if isinstance(record, Conversation):
            chat = self._chat(replace(record, last_only=self._last_only(record)))
            layout = chat.layout()
            assert layout is not None, "a conversation with changing beginnings is cut at each turn"
            return self._of_layout(chat, layout)
        text = record if isinstance(record, str) else record.prompt + record.completion
        start = len(record.prompt) if isinstance(record, Completion) else 0
        with self._tokenizing():
            ids, ends, brings_ends = self._with_ends(text)
            found = self._marked_off(ids, ends, [(start, len(text))], is_text=True)
        return replace(found, brings_ends=brings_ends)

    def _with_ends(self, text: str, eos: bool = True) -> tuple[list[int], list[int], bool]:
        """Encode a plain text and add the tokenizer's begin and end tokens.

        Returns:
            (token ids, end position of each token in the text, whether the text already contained the begin or end
                token). A token that the text already contains is not added again.
        """
        self._require_bounded(text)
        encoded = self._backend.encode(text, add_special_tokens=True)
        ids, ends, added = list(encoded.ids), [end for _, end in encoded.offsets], encoded.special_tokens_mask
        brings = False
        bos, eos_id = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if bos is not None and ids[:2] == [bos, bos] and list(added[:2]) == [1, 0]:
            ids, ends, added, brings = ids[1:], ends[1:], added[1:], True
        if eos_id is None:
            return ids, ends, brings
        is_ended = self._is_ended(text)
        if len(ids) > 1 and ids[-1] == eos_id and added[-1]:
            if is_ended:
                ids, ends, brings = ids[:-1], ends[:-1], True
        elif eos and ids[-1:] != [eos_id]:
            if is_ended:
                brings = True
            else:
                ids, ends = [*ids, eos_id], [*ends, len(text)]
        elif eos:
            brings = True
        return ids, ends, brings

    def _is_ended(self, text: str) -> bool:
        """Whether the text, without trailing white space, ends with a token that ends a text or a turn."""
        last = self._special.at_end(text.rstrip()) or self._special.at_end(text)
        return last is not None and self.tokenizer.convert_tokens_to_ids(last) in self._ends

    @cached_property
    def _ends(self) -> set[int]:
        return {self.tokenizer.eos_token_id, *self.end_ids}

    def _chat(self, record: Conversation) -> Chat:
        return Chat(self._with_arguments(record), self._template, self._special)

    def _with_arguments(self, record: Conversation) -> Conversation:
        return with_arguments(record, self._rendered)

    def _rendered(self, record: Conversation) -> str:
        return self._template.text(record.messages, record.tools)

    def _of_layout(self, chat: Chat, layout: ConversationLayout) -> Tokens:
        excluded = chat.excluded(layout.text) if self.train_on == "all" else []
        others = chat.others(layout.text) if self.train_on == "answers" else []
        ids, ends = self._encoded(layout.text, chat.letter)
        return self._marked_off(ids, ends, sorted([*layout.spans, *others]), is_text=False, excluded=excluded)

    def _in_table(self, ids: Sequence[int]) -> list[int]:
        """Return the ids, after checking that the model's embedding table has a row for each.

        Raises:
            UnusableText: an id has no row.
        """
        largest = max(ids, default=0)
        if self._num_table_rows is not None and largest >= self._num_table_rows:
            token = printable(repr(self.tokenizer.convert_ids_to_tokens(largest)))[:80]
            rows = f"the model's embedding table has only {self._num_table_rows} rows"
            raise UnusableText(
                f"The text has the token {token} with the id {largest}, but {rows}.", "Remove the token from the text."
            )
        return [*ids]

    def _marked_off(
        self,
        ids: Sequence[int],
        ends: Sequence[int],
        spans: Sequence[Span],
        is_text: bool,
        excluded: Sequence[Span] = (),
    ) -> Tokens:
        """Mark the trained tokens, and cut the sample to the maximum length.

        spans: trained parts of the text, in order. excluded: parts that are never trained on.
        """
        self._in_table(ids)
        starts = [start for start, _ in spans]
        trained = []
        for end in ends[: self.max_length]:
            number = bisect_left(starts, end) - 1  # of the last span that begins before
            is_trained = self.train_on == "all" or (number >= 0 and end <= spans[number][1])
            trained.append(is_trained and not any(start < end <= stop for start, stop in excluded))
        if is_text and len(trained) == len(ids):
            trained[-1:] = [True][: len(ids)]
        return Tokens(tuple(ids[: self.max_length]), tuple([False, *trained[1:]][: len(trained)]), len(ids))

    @cached_property
    def _special(self) -> SpecialTokens:
        return SpecialTokens(str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special)

    @cached_property
    def end_ids(self) -> set[int]:
        """A set with the id of the special token that ends an answer in the chat template. Empty if there is none."""
        asked: list[Mapping[str, Any]] = [{"role": "user", "content": "a"}, {"role": ANSWERS, "content": "b"}]
        if not self._template.is_there:
            return set()
        try:
            layout = self._chat(Conversation(tuple(asked), last_only=True)).layout()
        except UnusableText:
            return set()
        last = None if layout is None else self._special.at_end(layout.text[: layout.spans[-1][1]])
        return set() if last is None else {int(self.tokenizer.convert_tokens_to_ids(last))}

    @cached_property
    def _plain(self) -> Tokenizer:
        """The tokenizer, set to treat special tokens as text."""
        tokenizer = Tokenizer.from_str(self._backend.to_str())
        tokenizer.encode_special_tokens = True
        return tokenizer

    @cached_property
    def _backend(self) -> Tokenizer:
        """The fast tokenizer inside transformers' tokenizer, with truncation and padding disabled."""
        tokenizer: Tokenizer = self.tokenizer.backend_tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def _tokenizing(self) -> AbstractContextManager[None]:
        fix = "Correct the text, or set another tokenizer (model.tokenizer)."
        return row_edge("The tokenizer cannot encode the text", fix, fails_for_all("tokenizer", self._name))

    def _require_bounded(self, text: str) -> None:
        """Refuse a text that may become too long for the memory when the tokenizer normalises it."""
        if self._growth > MAX_USUAL_GROWTH and len(text) * self._growth > MAX_NORMALISED_LETTERS:
            raise ValueError(f"its normalizer may write {self._growth:.3g} characters per character")

    @cached_property
    def _growth(self) -> float:
        """Maximum number of characters that the tokenizer's normalizer or decoder writes per input character."""
        parts = (self._backend.normalizer, self._backend.decoder)
        # json: a library prints it
        return max(1.0, *(growth_of(json.loads(each.__getstate__())) for each in parts if each is not None))

    def _encoded(self, text: str, letter: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a rendered conversation, and the end position of each token in the text.

        ``letter``: character that breaks special tokens in data, so that they become plain text; "" if there are none.
        """
        ids, ends, at = list[int](), list[int](), 0
        with self._tokenizing():
            self._require_bounded(text)
            for piece, plain in self._pieces(text, letter) if letter else [(text, False)]:
                tokenizer = self._plain if plain else self._backend
                kept = [n for n, each in enumerate(piece) if each != letter] if plain else range(len(piece))
                bare = piece.replace(letter, "") if plain else piece
                encoded = tokenizer.encode(bare, add_special_tokens=False)
                ids += encoded.ids
                ends += [at + (kept[end - 1] + 1 if end else 0) for _, end in encoded.offsets]
                at += len(piece)
        return ids, ends

    def _pieces(self, text: str, letter: str) -> list[tuple[str, bool]]:
        """Split a text into pieces that can be encoded separately.

        Returns:
            (piece, whether the piece contains a broken special token) for each piece.
        """
        cuts, at = list[str](), 0
        for start, end in self._special.spans(text, letter):
            cuts += [text[at:start], text[start:end]]
            at = end
        found: list[tuple[str, bool]] = []
        for piece in (*cuts, text[at:]):
            plain = letter in piece
            if found and not plain and not found[-1][1]:
                found[-1] = (found[-1][0] + piece, False)
            elif piece:
                found.append((piece, plain))
        return found


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


GROWTH = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Precompiled": 18, "Lowercase": 3, "BertNormalizer": 12}
"""Maximum number of characters that a rule writes per input character, by rule type. Precompiled tables count as
Unicode normalisation.
"""


def growth_of(rule: Any) -> float:
    """Return the maximum number of characters that a rule of ``tokenizer.json`` writes per character.

    The rule belongs to a normalizer or a decoder.
    """
    if not isinstance(rule, dict):
        return 1.0
    inside = next((rule[key] for key in ("normalizers", "decoders") if key in rule), None)
    if inside is not None:
        return prod(map(growth_of, inside))
    if rule.get("type") == "Replace":
        pattern, content = rule.get("pattern") or {}, rule.get("content") or ""
        wanted = len(pattern.get("String") or "") if isinstance(pattern, dict) else 0
        return max(1.0, len(content) / wanted if wanted else len(content) + 1.0)  # a regex may match nothing
    return GROWTH.get(str(rule.get("type")), 1)
