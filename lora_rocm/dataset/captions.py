"""Turns captions as read into the captions to train on: text only, deterministic given the seed."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable

from lora_rocm.foundation.seeds import drawer
from lora_rocm.recipe.schema import SourceOptions

TRIES_PER_VARIANT = 32


def prepare(caption: str, options: SourceOptions) -> str:
    """Prepend the trigger word as a separate tag, unless the caption contains it as a whole word.

    Matching ignores case, because CLIP's tokenizers lower-case all text.
    """
    trigger = (options.trigger_word or "").strip()
    if not trigger or _contains(caption, trigger):
        return caption
    return f"{trigger}, {caption}" if caption else trigger


def variants(caption: str, options: SourceOptions, num_variants: int, seed: int) -> tuple[str, ...]:
    """The captions to cache for an image; depends only on seed, caption and options.

    Without ``shuffle_caption``, this is the prepared caption alone. With it, up to ``num_variants`` different orders of
    its comma-separated tags (fewer if there are not enough). The first ``keep_tokens`` tags and tags that contain the
    trigger word keep their positions.
    """
    prepared = prepare(caption, options)
    tags = tags_of(prepared)
    movable = [
        place for place, tag in enumerate(tags) if place >= options.keep_tokens and not _is_trigger(tag, options)
    ]
    if not options.shuffle_caption or len(movable) < 2:
        return (prepared,)
    same = Counter(tags[place] for place in movable).values()
    orders = math.factorial(len(movable)) // math.prod(math.factorial(count) for count in same)
    found: dict[str, None] = {}
    number = drawer("shuffle", seed, ",".join(tags))
    for attempt in range(num_variants * TRIES_PER_VARIANT):
        found[_shuffled(tags, movable, number, attempt)] = None
        if len(found) == min(num_variants, orders):
            break
    return tuple(found)


def _shuffled(tags: list[str], movable: list[int], number: Callable[..., int], attempt: int) -> str:
    """The caption with the tags at the ``movable`` positions reordered."""
    order = sorted(movable, key=lambda place: number(attempt, place))
    shuffled = list(tags)
    for place, source in zip(movable, order, strict=True):
        shuffled[place] = tags[source]
    return ", ".join(shuffled)


def tags_of(caption: str) -> list[str]:
    """The non-empty comma-separated tags of a caption, as counted in the metadata."""
    return [tag for tag in (part.strip() for part in caption.split(",")) if tag]


def _is_trigger(tag: str, options: SourceOptions) -> bool:
    return any(_contains(tag, part) for part in tags_of(options.trigger_word or ""))


def _contains(text: str, words: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text, re.IGNORECASE) is not None
