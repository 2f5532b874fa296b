"""Finds captions that the text encoders truncate, by counting tokens with the encoders' tokenizers. Needs no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, tee
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.foundation.files import write_atomic

if TYPE_CHECKING:
    from tokenizers import Tokenizer

KEPT_IN = "tokenizers"
MAX_TOKENIZER_BYTES = 1 << 26
AT_ONCE = 1024
LOST_SHOWN = 60  # letters of a caption's lost end that a notice quotes


@dataclass(frozen=True)
class TokenLimit:
    """A text encoder's tokenizer, and the maximum number of tokens that the encoder reads.

    tokenizer: the tokenizer in the JSON format of the ``tokenizers`` library.
    max_tokens: the maximum, including the end-of-text token, which is always last.
    """

    tokenizer: str
    max_tokens: int


def lost_ends(captions: Iterable[str], limits: Sequence[TokenLimit]) -> Iterator[str]:
    """Yield the truncated end of each caption, or "" if every text encoder reads the whole caption.

    If several encoders truncate a caption, the longest truncated end is yielded.
    """
    left = iter(captions)
    while chunk := list(islice(left, AT_ONCE)):
        lost = [""] * len(chunk)
        for limit in limits:
            long = [number for number, caption in enumerate(chunk) if not _surely_fits(caption, limit.max_tokens)]
            if not long:
                continue
            tokenizer = _loaded(limit.tokenizer)  # takes 0.1 s
            for number, encoded in zip(long, tokenizer.encode_batch([chunk[at] for at in long]), strict=True):
                if len(encoded.ids) > limit.max_tokens:
                    end = chunk[number][encoded.offsets[limit.max_tokens - 1][0] :].strip()
                    lost[number] = max(lost[number], end, key=len)
        yield from lost


def _surely_fits(caption: str, max_tokens: int) -> bool:
    """Whether a caption certainly fits, judged by its length alone.

    A token covers at least one ASCII character. Two more tokens mark the beginning and the end.
    """
    return len(caption) + 2 <= max_tokens and caption.isascii()


@lru_cache(maxsize=8)
def _loaded(tokenizer: str) -> Tokenizer:
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_str(tokenizer)
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def cut_notice(
    captions: Iterable[tuple[str, str]], limits: Sequence[TokenLimit], are_samples: bool = False
) -> tuple[str, ...]:
    """Return a notice if the text encoders truncate any caption, else an empty tuple.

    Args:
        captions: pairs of sample key and caption.
        limits: the tokenizers of the text encoders, with their limits.
        are_samples: whether the captions are the texts that the model itself is trained on.
    """
    keys, texts = tee(captions)
    count, example = 0, ""
    for (key, _), lost in zip(keys, lost_ends((caption for _, caption in texts), limits), strict=True):
        count += bool(lost)
        if lost and not example:
            end = f"{lost[:LOST_SHOWN]!r}{'' if len(lost) <= LOST_SHOWN else ' ...'}"
            example = f"{key}, which loses {end}"
    if not count:
        return ()
    noun, limit = ("text", "the model reads") if are_samples else ("caption", "the text encoders read")
    are = f"1 {noun} is" if count == 1 else f"{count} {noun}s are"
    return (f"{are} longer than {limit}, for example {example}.",)


def keep_limits(cache: Path, limits: Sequence[TokenLimit]) -> list[list[Any]]:
    """Store each distinct tokenizer in a cache folder.

    Returns:
        A list that can be stored as JSON; ``recall_limits`` reads the tokenizers back from it.

    Raises:
        StorageError: a tokenizer cannot be written.
    """
    kept = []
    for limit in limits:
        content = limit.tokenizer.encode("utf-8")
        digest = hashlib.sha256(content).hexdigest()
        if _content(cache, digest) is None:
            write_atomic(_file(cache, digest), content)
        kept.append([digest, limit.max_tokens])
    return kept


def recall_limits(cache: Path, kept: object) -> list[TokenLimit] | None:
    """Read the limits that ``keep_limits`` stored.

    Args:
        cache: the cache folder.
        kept: the list returned by ``keep_limits``.

    Returns:
        The limits; None if a tokenizer is missing or damaged, or ``kept`` is malformed.
    """
    try:
        named = [(str(digest), int(max_tokens)) for digest, max_tokens in kept]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return None
    contents = [_content(cache, digest) for digest, _ in named]
    return (
        [
            TokenLimit(content.decode("utf-8"), max_tokens)
            for content, (_, max_tokens) in zip(contents, named, strict=True)
            if content is not None
        ]
        if None not in contents
        else None
    )


def _file(cache: Path, digest: str) -> Path:
    return cache / KEPT_IN / f"{digest[:40]}.json"


def _content(cache: Path, digest: str) -> bytes | None:
    try:
        content = read_plain(_file(cache, digest), MAX_TOKENIZER_BYTES)
    except OSError:
        return None
    return content if hashlib.sha256(content).hexdigest() == digest else None
