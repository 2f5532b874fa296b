"""The wording of messages: tests name a phrase by its key, and ``golden/wording.json`` alone has the words.

A test asserts on codes, keys and places where an object has them. Where only the words identify a message, it writes

    ``assert says(error, "dataset/no-images-found", path=folder)``

and the file has ``"dataset/no-images-found": "no images found in {path}"``. After messages were reworded,

    LORA_ROCM_UPDATE_GOLDEN=1 pytest -n 0 ...

writes the piece of the text that resembles the old phrase most into the file; read it in the diff. A phrase that
nothing resembles stays, and its test fails. ``test_wording.py`` refuses wording outside the file.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path

from lora_rocm.errors import Problem

FILE = Path(__file__).parent / "golden" / "wording.json"
LIKENESS = 0.45
"""Pieces of a text that resemble a phrase less do not count as its new wording."""
MORE_WORDS = 6
"""The new wording has up to this many words more, and fewer only where its whole sentence has."""
PIECES = 8
"""Number of sentences, the ones that share most words with the phrase, that are compared with it letter by letter."""


class Answer:
    """Whether a text has a phrase; a failed assertion shows both."""

    def __init__(self, found: bool, wanted: str, texts: list[str]) -> None:
        self.found, self._wanted, self._texts = found, wanted, texts

    def __bool__(self) -> bool:
        return self.found

    def __repr__(self) -> str:
        return f"<{self._wanted!r} is {'' if self.found else 'not '}in {self._texts}>"


class Worded:
    """A whole text by its key: equal to a text that reads so. It is used in lists, tuples and values of dicts."""

    def __init__(self, key: str, values: dict[str, object]) -> None:
        self.key, self.values = key, values
        self.__name__ = key  # how pytest names the row of a table

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Worded):
            return (self.key, self.values) == (other.key, other.values)
        if not isinstance(other, str):
            return NotImplemented
        return other == phrase(self.key, **self.values) or _renewed(self.key, self.values, [other], whole=True)

    def __ne__(self, other: object) -> bool:  # asks, so it never renews
        return other != phrase(self.key, **self.values)

    __hash__ = None  # type: ignore[assignment]  # in a set a text would not be found

    def __str__(self) -> str:
        return phrase(self.key, **self.values)

    def __repr__(self) -> str:
        return repr(str(self))


def says(text: object, key: str | Worded, /, **values: object) -> Answer:
    """Assert that a text has this phrase. Of several texts, one has it: strings, errors, problems."""
    key, values = (key.key, key.values) if isinstance(key, Worded) else (key, values)
    texts = list(_texts(text))
    wanted = phrase(key, **values)
    return Answer(any(wanted in one for one in texts) or _renewed(key, values, texts), wanted, texts)


def says_if(expected: object, text: object, key: str | Worded, /, **values: object) -> bool:
    """Assert that a text has this phrase if that is expected, and lacks it otherwise."""
    return bool(says(text, key, **values)) if expected else not mentions(text, key, **values)


def mentions(text: object, key: str | Worded, /, **values: object) -> Answer:
    """Ask whether a text has this phrase: for ``not``, ``or`` and filters. The answer never changes the file."""
    key, values = (key.key, key.values) if isinstance(key, Worded) else (key, values)
    texts = list(_texts(text))
    wanted = phrase(key, **values)
    return Answer(any(wanted in one for one in texts), wanted, texts)


def holds(text: object, words: str | Worded) -> bool:
    """For tables that name keys and values in addition to wording: the text has a name as it is, or a phrase by its
    key.
    """
    return bool(says(text, words)) if isinstance(words, Worded) else any(words in one for one in _texts(text))


class Saying:
    """Whether an error has all phrases, for ``pytest.raises``, which shows what was wanted."""

    def __init__(self, phrases: list[Worded]) -> None:
        self._phrases = phrases

    def __call__(self, text: object) -> bool:
        return all(says(text, each) for each in self._phrases)

    def __repr__(self) -> str:
        return " and ".join(map(repr, self._phrases))


def saying(key: str | Worded, /, *more: str, **values: object) -> Saying:
    """For ``pytest.raises(..., check=saying(...))``: the error has this phrase, and more that have no values."""
    first = key if isinstance(key, Worded) else Worded(key, values)
    return Saying([first, *(Worded(each, {}) for each in more)])


def worded(key: str, /, **values: object) -> Worded:
    """The whole text, to be compared by ``==``."""
    return Worded(key, values)


def phrase(key: str, /, **values: object) -> str:
    """The phrase in the file, to be counted or searched for."""
    template = _phrases()[key]
    names = set(re.findall(r"\{(\w+)\}", template.replace("{{", "").replace("}}", "")))
    assert names == values.keys(), f"{key} has the values {sorted(names)}, not {sorted(values)}"
    return template.format(**{name: str(value) for name, value in values.items()})


@cache
def _phrases() -> dict[str, str]:
    found: dict[str, str] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def _texts(given: object) -> Iterator[str]:
    if isinstance(given, str):
        yield given
    elif isinstance(given, Problem):
        yield f"{given.where}: {given.what}\n{given.fix}"
    elif isinstance(given, BaseException):
        yield str(given)
    elif isinstance(given, Iterable):
        for one in given:
            yield from _texts(one)
    else:
        yield str(given)


_renewed_keys: set[str] = set()


def _renewed(key: str, values: dict[str, object], texts: list[str], *, whole: bool = False) -> bool:
    """With LORA_ROCM_UPDATE_GOLDEN: write the new wording into the file. Whether there is one."""
    if not os.environ.get("LORA_ROCM_UPDATE_GOLDEN"):
        return False
    assert "PYTEST_XDIST_WORKER" not in os.environ, "several processes would write over each other: run with -n 0"
    if key in _renewed_keys:  # two tests, two wordings: each needs its own key
        return False
    new = renewed(_phrases()[key], values, texts, whole=whole)
    if new is None:
        return False
    _renewed_keys.add(key)
    _phrases()[key] = new
    FILE.write_bytes(file_content(_phrases()))
    return True


def file_content(phrases: dict[str, str]) -> bytes:
    """Sorted, a phrase a line."""
    return (json.dumps(phrases, indent=0, sort_keys=True, ensure_ascii=False) + "\n").encode()


def renewed(template: str, values: dict[str, object], texts: list[str], *, whole: bool = False) -> str | None:
    """The piece of the texts that resembles a phrase most, with its values as placeholders again."""
    filled = {name: str(value) for name, value in values.items()}
    old = template.format(**filled)
    pieces = list(texts) if whole else [piece for text in texts for piece in _pieces(text, old)]
    fitting = dict.fromkeys(piece for piece in pieces if all(value in piece for value in filled.values()))
    likeness = {piece: _likeness(piece, old, filled) for piece in fitting}
    best = max(likeness, key=likeness.__getitem__, default=None)
    if best is None or likeness[best] < LIKENESS:
        return None
    new = best.replace("{", "{{").replace("}", "}}")
    for name, value in sorted(filled.items(), key=lambda item: -len(item[1])):
        if value:
            value = value.replace("{", "{{").replace("}", "}}")
            edges = (r"(?<![\w{])" if value[0].isalnum() else "", r"(?![\w}])" if value[-1].isalnum() else "")
            new = re.sub(
                edges[0] + re.escape(value) + edges[1], f"{{{name}}}", new, count=template.count(f"{{{name}}}")
            )
    return new if all(f"{{{name}}}" in new for name in filled) else None


def _likeness(piece: str, old: str, values: dict[str, str]) -> float:
    """From 0 to 1: letters in the same order, and the same words, without the values, which are the same anyway."""
    for value in values.values():
        piece, old = piece.replace(value, " ", 1), old.replace(value, " ", 1)
    first, second = re.findall(r"\w+", piece.lower()), re.findall(r"\w+", old.lower())
    common = sum((Counter(first) & Counter(second)).values())
    words = 2 * common / max(1, len(first) + len(second))
    letters = SequenceMatcher(None, " ".join(first), " ".join(second), autojunk=False).ratio()
    return (words + letters) / 2


def _pieces(text: str, old: str) -> Iterator[str]:
    """Runs of words in the sentences that share most words with the old phrase; of lines where it has several."""
    if "\n" in old:
        lines, count = text.splitlines(keepends=True), old.count("\n") + 1
        yield from ("".join(lines[at : at + count]) for at in range(len(lines)))
        return
    words = set(re.findall(r"\w+", old.lower()))
    sentences = sorted(
        re.split(r"\n|(?<=[.!?])(?= )", text),
        key=lambda sentence: -len(words & set(re.findall(r"\w+", sentence.lower()))),
    )
    length = len(old.split())
    for sentence in sentences[:PIECES]:
        spans = [word.span() for word in re.finditer(r"\S+", sentence)]
        for first in range(len(spans)):
            for last in range(first + min(length, len(spans)) - 1, min(len(spans), first + length + MORE_WORDS)):
                start, end = spans[first][0], spans[last][1]
                yield sentence[start:end] if old.rstrip() == old else sentence[start : end + 1]
                if old[-1].isalnum():
                    yield sentence[start:end].rstrip(".,:;!?)")
