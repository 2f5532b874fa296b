"""The line of a recipe that a problem is about, with carets below the value."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import replace

from lora_rocm.errors import Problem
from lora_rocm.foundation.terminal_text import printable
from lora_rocm.recipe.explain import NO_SUCH_KEY
from lora_rocm.recipe.layers import Layered
from lora_rocm.recipe.yaml_tree import Span, dotted

PLACE = re.compile(r":(\d+)(?::(\d+))?(?: (\S+))?")
LAST_PART = re.compile(r"\w+(?=(?:\[\d+\])*$)")
MAX_LETTERS, SHOWN_BEFORE = 100, 40


def with_excerpt(problem: Problem, layers: Layered) -> Problem:
    """Return the problem with the line of its file, if its place is a line of one."""
    if problem.excerpt:
        return problem
    for origin, text in layers.texts.items():
        place = PLACE.match(problem.where, len(origin)) if problem.where.startswith(origin) else None
        if place is None:
            continue
        lines = text.splitlines()
        number, key = int(place[1]), place[3] or ""
        if not 0 < number <= len(lines):
            return problem
        line = lines[number - 1]
        if place[2]:  # a syntax error
            column, width = int(place[2]) - 1, 1
        else:
            column, width = _marked(line, number, key, None if problem.what == NO_SUCH_KEY else _span(key, layers))
        return replace(problem, excerpt=excerpt(line, number, column, width))
    return problem


def _span(key: str, layers: Layered) -> Span | None:
    """Return the place of the value of a key as users write it."""
    for parts, place in layers.places.items():
        if place.span is not None and key in (dotted(parts), place.name):
            return place.span
    return None


def _marked(line: str, number: int, key: str, span: Span | None) -> tuple[int, int]:
    """Return (column, width) of the value, or of the key if the value is on another line.

    The width is 0 if neither is in the line.
    """
    if span is not None and span.line == number and span.width:
        return span.column, span.width
    name = LAST_PART.search(key)
    found = re.search(rf"(?<!\w){re.escape(name[0])}(?=[\"']?\s*:)", line) if name else None
    return (found.start(), len(found[0])) if found else (0, 0)


def excerpt(line: str, number: int, column: int, width: int) -> str:
    """Return a numbered line, and a second line with carets if ``width`` is not 0. A long line is shortened.

    Args:
        line: the line of the file.
        number: its number.
        column: index of the first marked character.
        width: number of marked characters.
    """
    column = min(column, len(line))
    begin = max(0, column - SHOWN_BEFORE) if len(line) > MAX_LETTERS else len(line) - len(line.lstrip())
    begin = min(begin, column)
    cut = line[begin : begin + MAX_LETTERS].replace("\t", " ")
    before, marked = cut[: column - begin], cut[column - begin : column - begin + width]
    after = cut[len(before) + len(marked) :]
    start, end = "..." if begin and line[:begin].strip() else "", "..." if begin + MAX_LETTERS < len(line) else ""
    head = f"{number} | "
    shown = [start + printable(before), printable(marked), printable(after).rstrip() + end]
    text = f"{head}{''.join(shown)}"
    if not width:
        return text
    gap = " " * (len(head) - 2) + "| " + " " * _columns(shown[0])
    return f"{text}\n{gap}{'^' * max(_columns(shown[1]), 1)}"


def _columns(text: str) -> int:
    """Return the number of columns that a text takes in a terminal."""
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in text
    )
