"""Turns the captions of caption files and datasets into the captions to train on. Random choices depend on the seed."""

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
"""Function that maps any arguments to a random number in [0, 2**64). Equal arguments give the same number."""


def as_read(text: str, options: SourceOptions) -> str:
    """Normalise a caption to one line. If the options read wildcards, each non-empty line stays a separate caption."""
    if not options.enable_wildcard:
        return one_line(text)
    return "\n".join(filter(None, map(one_line, text.splitlines())))


def prepare(caption: str, options: SourceOptions, draw: Draw = lambda *purpose: 0) -> str:
    """Add prefix, suffix and trigger word to a caption. If the options read wildcards, choose a line and words first.

    The trigger word replaces ``PLACEHOLDER``. If the result does not contain the trigger word as a whole word, it is
    added in front as a separate tag. Matching ignores case, because CLIP's tokenizers lower-case all text.

    Args:
        caption: a caption from ``as_read``.
        options: options of the caption's source.
        draw: draws the random choices; by default the first line and the first words are chosen.

    Returns:
        The caption to train on.
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
    """Find a brace without a partner in a caption with wildcards.

    Returns:
        The text from that brace to the end of its line; "" if all braces match, or the options read no wildcards.
    """
    for line in caption.split("\n") if options.enable_wildcard else ():
        text = _framed(line, options)
        rest = WILDCARD.sub(lambda match: " " * len(match[0]), text)
        if (brace := re.search(r"[{}]", rest)) is not None:
            return text[brace.start() :]
    return ""


def variants(captions: str | Sequence[str], options: SourceOptions, num_variants: int, seed: int) -> tuple[str, ...]:
    """Return the different texts to cache for an image. They depend only on the seed, the captions and the options.

    There are at most ``num_variants`` texts, taken from each caption in turn, but at least one text per caption.
    """
    captions = (captions,) if isinstance(captions, str) else captions
    of_each = [_variants(caption, options, num_variants, seed) for caption in captions]
    found = dict.fromkeys(text for texts in zip_longest(*of_each) for text in texts if text is not None)
    return tuple(found)[: max(num_variants, len(captions))]


def _variants(caption: str, options: SourceOptions, num_variants: int, seed: int) -> tuple[str, ...]:
    """Return the different texts to cache for one caption: at most ``num_variants``, fewer if not enough exist.

    They differ in the chosen line and wildcards, and in the order and omission of comma-separated tags. If the options
    use none of these, the only text is the prepared caption. The first ``keep_tokens`` tags and tags that contain the
    trigger word are neither moved nor dropped.
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
    """Return the indices of the tags that may be moved or dropped."""
    return [place for place, tag in enumerate(tags) if place >= options.keep_tokens and not _is_trigger(tag, options)]


def _num_orders(prepared: str, options: SourceOptions) -> int:
    tags = tags_of(prepared)
    movable = _movable(tags, options)
    same = Counter(tags[place] for place in movable).values()
    return math.factorial(len(movable)) // math.prod(math.factorial(count) for count in same)


def _arranged(prepared: str, options: SourceOptions, seed: int, attempt: int) -> str:
    """Return the caption with its tags shuffled and some of them dropped, as the options require.

    ``prepared`` is a caption from ``prepare``. ``attempt`` makes the random choices of repeated calls differ.
    """
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
    """Return the non-empty comma-separated tags of a caption. The tag counts in the exported metadata use them."""
    return [tag for tag in (part.strip() for part in caption.split(",")) if tag]


def _is_trigger(tag: str, options: SourceOptions) -> bool:
    return any(has_words(tag, part) for part in tags_of(options.trigger_word or ""))
