"""Comments with a reason at the places of the code that a rule excepts: ``path.unlink()  # writes: its own new file``.

The exception is where the code is, so it moves, merges and disappears with it. A marker belongs to a place if it is on
one of the place's lines, or alone on the line above. It needs a reason, and a marker without a place is a fault.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache

MIN_REASON_LETTERS = 10


@cache
def _comments(source: str) -> dict[int, tuple[str, bool]]:
    """Line -> its comment, and whether the line has nothing else."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        token.start[0]: (token.string, token.line.lstrip().startswith("#"))
        for token in tokens
        if token.type == tokenize.COMMENT
    }


def markers(source: str, word: str) -> dict[int, bool]:
    """Line of each marker with this word and a reason -> whether the line has nothing else."""
    if f"# {word}: " not in source:
        return {}
    pattern = re.compile(rf"# {re.escape(word)}: .{{{MIN_REASON_LETTERS},}}")
    return {line: alone for line, (comment, alone) in _comments(source).items() if pattern.search(comment)}


def unmarked(name: str, source: str, word: str, places: Iterable[tuple[int, int]]) -> Iterator[str]:
    """Yield the places of a module without a marker, and the markers without a place.

    Args:
        name: name of the module.
        source: its text.
        word: the marker's word.
        places: first and last line of each place.
    """
    known, used = markers(source, word), set[int]()
    for first, last in places:
        own = {line for line in range(first, last + 1) if line in known}
        own |= {first - 1} if known.get(first - 1) else set()
        used |= own
        if not own:
            yield f"{name}:{first} needs a comment '# {word}: REASON'"
    for line in sorted(known.keys() - used):
        yield f"{name}:{line} has a comment '# {word}:' at nothing that needs one"
