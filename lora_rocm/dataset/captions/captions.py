"""Turns captions as read into the captions to train on: text only, deterministic given the seed."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest

from lora_rocm.foundation.seeds import drawer
from lora_rocm.foundation.terminal_text import one_line
from lora_rocm.recipe.source_sections import SourceOptions
from lora_rocm.recipe.trigger import has_words, with_trigger

TRIES_PER_VARIANT = 32
WILDCARD = re.compile(r"(\{\{|\}\})|\{([^{}]+)\}")
Draw = Callable[..., int]
"""Maps a purpose to a random number in [0, 2**64)."""


def as_read(text: str, options: SourceOptions) -> str:
    """A caption on one line, or with a line for each of several captions if the options read wildcards."""
    if not options.enable_wildcard:
        return one_line(text)
    return "\n".join(filter(None, map(one_line, text.splitlines())))


def prepare(caption: str, options: SourceOptions, draw: Draw = lambda *purpose: 0) -> str:
    """Choose a line and words if the options read wildcards, and add prefix, suffix and trigger word.

    The trigger word takes the place of ``PLACEHOLDER``. It is a separate tag in front, unless the caption contains it
    as a whole word. Matching ignores case, because CLIP's tokenizers lower-case all text.

    Args:
        caption: from ``as_read``.
        options: options of its source.
        draw: draws the choices; the default takes the first line and words.
    """
    if options.enable_wildcard:
        lines = caption.split("\n")
        caption = WILDCARD.sub(partial(_chosen, draw), _framed(lines[draw("line") % len(lines)], options))
    else:
        caption = _framed(caption, options)
    trigger = (options.trigger_word or "").strip()
    if not trigger or has_words(caption, trigger):
        return caption
    return f"{trigger}, {caption}" if caption else trigger


def open_wildcard(caption: str, options: SourceOptions) -> str:
    """The first line from its first brace outside of wildcards on; "" if there is none, or wildcards are not read."""
    for line in caption.split("\n") if options.enable_wildcard else ():
        text = _framed(line, options)
        rest = WILDCARD.sub(lambda match: " " * len(match[0]), text)
        if (brace := re.search(r"[{}]", rest)) is not None:
            return text[brace.start() :]
    return ""


def variants(captions: str | Sequence[str], options: SourceOptions, num_variants: int, seed: int) -> tuple[str, ...]:
    """The texts to cache for an image with these captions; depends only on seed, captions and options.

    Up to ``num_variants`` different texts, in turn from each caption; at least one from each caption.
    """
    captions = (captions,) if isinstance(captions, str) else captions
    of_each = [_variants(caption, options, num_variants, seed) for caption in captions]
    found = dict.fromkeys(text for texts in zip_longest(*of_each) for text in texts if text is not None)
    return tuple(found)[: max(num_variants, len(captions))]


def _variants(caption: str, options: SourceOptions, num_variants: int, seed: int) -> tuple[str, ...]:
    """The texts to cache for one caption.

    Up to ``num_variants`` different texts (fewer if there are not enough). They differ in lines and wildcards, and in
    comma-separated tags that are shuffled or dropped. Without any of these, the result is the prepared caption alone.
    The first ``keep_tokens`` tags and tags that contain the trigger word are neither moved nor dropped.
    """
    number, possible = drawer("wildcard", seed, caption), num_variants
    if not options.caption_tag_dropout_rate and not (options.enable_wildcard and re.search(r"[\n{]", caption)):
        possible = _num_orders(prepare(caption, options), options) if options.shuffle_caption else 1
    found: dict[str, None] = {}
    for attempt in range(num_variants * TRIES_PER_VARIANT):
        found[_arranged(prepare(caption, options, partial(number, attempt)), options, seed, attempt)] = None
        if len(found) == min(num_variants, possible):
            break
    return tuple(found)


def _framed(caption: str, options: SourceOptions) -> str:
    text = " ".join(filter(None, (options.caption_prefix, caption, options.caption_suffix)))
    return with_trigger(text, options.trigger_word)


def _chosen(draw: Draw, match: re.Match[str]) -> str:
    if match[1]:  # a doubled brace is a brace
        return match[1][0]
    words = match[2].split("|")
    return words[draw("words", match.start()) % len(words)]


def _movable(tags: list[str], options: SourceOptions) -> list[int]:
    """Positions of the tags that may be moved or dropped."""
    return [place for place, tag in enumerate(tags) if place >= options.keep_tokens and not _is_trigger(tag, options)]


def _num_orders(prepared: str, options: SourceOptions) -> int:
    tags = tags_of(prepared)
    movable = _movable(tags, options)
    same = Counter(tags[place] for place in movable).values()
    return math.factorial(len(movable)) // math.prod(math.factorial(count) for count in same)


def _arranged(prepared: str, options: SourceOptions, seed: int, attempt: int) -> str:
    """The caption with its tags shuffled and some of them dropped, according to the options."""
    tags, rate = tags_of(prepared), options.caption_tag_dropout_rate
    movable = _movable(tags, options)
    if not rate and (not options.shuffle_caption or len(movable) < 2):
        return prepared
    number, arranged = drawer("shuffle", seed, ",".join(tags)), list(tags)
    if options.shuffle_caption:
        order = sorted(movable, key=lambda place: number(attempt, place))
        for place, source in zip(movable, order, strict=True):
            arranged[place] = tags[source]
    dropped = {place for place in movable if number(attempt, "drop", place) < rate * 2**64}
    return ", ".join(tag for place, tag in enumerate(arranged) if place not in dropped)


def tags_of(caption: str) -> list[str]:
    """The non-empty comma-separated tags of a caption, as counted in the metadata."""
    return [tag for tag in (part.strip() for part in caption.split(",")) if tag]


def _is_trigger(tag: str, options: SourceOptions) -> bool:
    return any(has_words(tag, part) for part in tags_of(options.trigger_word or ""))
