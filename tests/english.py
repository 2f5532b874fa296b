"""The linter of our prose: texts of the tree, rules of ``english.toml``, hits by room.

``python -m tests.english ROOM [--rule NAME] [--counts] [--lower]`` prints the hits of a room (of all without a name).
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
RULES = Path(__file__).with_name("english.toml")
CEILINGS = Path(__file__).with_name("english_ceilings.toml")
PACKAGE = "lora_rocm"
NAME_CEILINGS = ("names", "class_names")
"""Rows of the ceilings for the tests of names."""
MAX_SENTENCE_WORDS = 30
LONG_SENTENCE = "long-sentence"
MIN_MESSAGE_WORDS = 3
GENERATED = {"docs/recipe.md", "docs/json.md"}
"""Their text is linted where it is written: in field descriptions and docstrings."""
FOREIGN = ("lora_rocm/base_models/tokenizer_data/", "lora_rocm/builtin/", "docs/lab/")
"""Licences and data from other projects, and the laboratory journal."""
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")


@dataclass(frozen=True)
class Text:
    """One piece of prose; ``kind`` is docstring, comment, message (a string of code), data (TOML, YAML) or docs."""

    file: str
    line: int
    kind: str
    words: str

    @cached_property
    def lower(self) -> str:
        return self.words.lower()

    @property
    def room(self) -> str:
        parts = self.file.split("/")
        if parts[0] == PACKAGE:
            return parts[1].removesuffix(".py")
        return parts[0] if len(parts) > 1 else "top"


@dataclass(frozen=True)
class Rule:
    """A pattern of English that we do not write, and what to write instead."""

    name: str
    pattern: str
    why: str
    write: str
    bad: list[str]
    good: list[str]
    unless: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    rooms: list[str] = field(default_factory=list)

    def spans(self, text: Text) -> Iterator[tuple[int, int]]:
        """Yield the places where the text breaks the rule; a hit inside a match of ``unless`` is none."""
        if (self.kinds and text.kind not in self.kinds) or (self.rooms and text.room not in self.rooms):
            return
        words = text.words
        if self.name == LONG_SENTENCE:
            yield from long_sentences(words)
            return
        words = text.lower
        hits = [match.span() for match in _compiled(self.pattern).finditer(words)]
        if not hits:
            return
        allowed = [match.span() for other in self.unless for match in _compiled(other).finditer(words)]
        for start, end in hits:
            if not any(first <= start and end <= last for first, last in allowed):
                yield start, end


@dataclass(frozen=True)
class Allowed:
    """A hit that stays, and why: ``text`` is in the words around it."""

    rule: str
    file: str
    text: str
    reason: str


@dataclass(frozen=True)
class Hit:
    """One place that breaks a rule."""

    rule: Rule
    text: Text
    start: int
    end: int

    @property
    def line(self) -> int:
        return self.text.line + self.text.words.count("\n", 0, self.start)

    @property
    def around(self) -> str:
        return " ".join(self.text.words[max(0, self.start - 70) : self.end + 70].split())

    def __str__(self) -> str:
        shown = " ".join(self.text.words[self.start : self.end].split())[:60]
        return f"{self.text.file}:{self.line} [{self.rule.name}] {shown!r} in: {self.around}"


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """A blank of a pattern is any white space, so that a phrase is found across lines; texts are in lower case."""
    lower = re.sub(r"\\.|[A-Z]", lambda match: match[0] if match[0][0] == "\\" else match[0].lower(), pattern)
    return re.compile(lower.replace(" ", r"\s+"), re.MULTILINE)


def long_sentences(words: str) -> Iterator[tuple[int, int]]:
    """Sentences of more than 30 words; an empty line or a new item ends one too."""
    start = 0
    for end in [match.end() for match in re.finditer(r"[.!?](?=[\s\"')]|$)|\n\s*\n|\n(?=\s*[-*|#>])", words)] + [
        len(words)
    ]:
        if len(WORD.findall(words, start, end)) > MAX_SENTENCE_WORDS:
            yield start + len(words[start:end]) - len(words[start:end].lstrip()), end
        start = end


# ---------------------------------------------------------------- texts of files


def blank(match: re.Match[str]) -> str:
    """Code, addresses and placeholders: a word without letters of the same length, so that places stay."""
    return re.sub(r"\S", "_", match[0])


def prose(words: str) -> str:
    """The words without code in backticks, addresses and placeholders."""
    words = re.sub(r"``[^`]+``|`[^`]+`", blank, words)
    words = re.sub(r"https?://\S+|\]\([^)\s]+\)", blank, words)
    return re.sub(r"\{[^{}\n]*\}", blank, words)


PYTHON = re.compile(
    r"""(?P<comment>\#[^\n]*)"""
    r"""|(?P<prefix>[rRbBfFuU]{0,2})(?:(?P<triple>\"{3}|'{3})(?P<long>(?:[^\\]|\\.)*?)(?P=triple)"""
    r"""|"(?P<double>(?:[^"\\\n]|\\.)*)"|'(?P<single>(?:[^'\\\n]|\\.)*)')""",
    re.DOTALL,
)
TOML = re.compile(
    r"""(?P<comment>\#[^\n]*)|(?P<triple>\"{3}|'{3})(?P<long>(?:[^\\]|\\.)*?)(?P=triple)"""
    r"""|"(?P<double>(?:[^"\\\n]|\\.)*)"|'(?P<single>[^'\n]*)'""",
    re.DOTALL,
)
PATTERN_OF_CODE = re.compile(r"\(\?|\\[bdswWSD.()\[\]]|\.\*|\^\w|\[\^")


def quoted(file: str, source: str, language: re.Pattern[str], kind: str) -> Iterator[Text]:
    """Strings, joined where they follow one another, and comments, joined where their lines do."""
    pending: list[str] = []
    first = last_end = last_line = 0
    was = ""

    def flush() -> Iterator[Text]:
        words = prose(("\n" if was in ("comment", "docstring") else "").join(pending))
        if pending and (was in ("comment", "docstring") or len(WORD.findall(words)) >= MIN_MESSAGE_WORDS):
            yield Text(file, first, was, words)
        pending.clear()

    line, seen = 1, 0
    for match in language.finditer(source):
        line, seen = line + source.count("\n", seen, match.start()), match.start()
        before = source[last_end : match.start()]
        if (comment := match["comment"]) is not None:
            joins = was == "comment" and line == last_line + 1 and not before.strip()
            now, words = "comment", comment.lstrip("#: ")
            if re.match(r"type:|noqa|!/|pragma|fmt:|mypy:", words):
                now, words = "", ""
        else:
            words = next(match[name] for name in ("long", "double", "single") if match[name] is not None)
            opens = not source[source.rfind("\n", 0, match.start()) + 1 : match.start()].strip()
            now = "docstring" if match["triple"] and opens and kind == "message" else kind
            joins = was == now == kind and not before.strip()
            raw = (
                kind == "message"
                and now != "docstring"
                and "r" in match["prefix"].lower()
                or "b" in match.groupdict().get("prefix", "")
            )
            if raw or (now == kind and PATTERN_OF_CODE.search(words)):
                now, words = "", ""
            elif now != "docstring":
                words = words.replace("\\n", "  ")
        if not joins or not now:
            yield from flush()
            first, was = line, now
        if now:
            pending.append(words)
            was = now
        last_end, last_line = match.end(), line
    yield from flush()


def docstrings_of(file: str, source: str) -> Iterator[Text]:
    """The docstrings alone: of tests, strings and comments are not linted."""
    yield from (text for text in quoted(file, source, PYTHON, "message") if text.kind == "docstring")


def markdown(file: str, source: str) -> Iterator[Text]:
    """Paragraphs, items of lists and cells of tables, without fenced code."""
    if file == "CONTRIBUTING.md":  # the glossary names what we do not write
        source = re.sub(r"(?ms)^\| not \| but \|.*?^$", "", source)
    source = re.sub(r"(?ms)^ *```.*?^ *```|<!--.*?-->|<[^>\n]+>", blank, source)
    block: list[str] = []
    first = 0
    for number, line in enumerate([*source.split("\n"), ""], 1):
        starts = re.match(r"\s*(?:[-*] |\d+\. |#+ |\|)", line)
        if block and (starts or not line.strip()):
            yield Text(file, first, "docs", prose("\n".join(block)))
            block = []
        if line.lstrip().startswith("|"):
            for cell in line.strip().strip("|").split("|"):
                if len(WORD.findall(cell)) >= MIN_MESSAGE_WORDS:
                    yield Text(file, number, "docs", prose(cell))
        elif line.strip():
            first = first if block else number
            block.append(line)


def yaml_comments(file: str, source: str) -> Iterator[Text]:
    """The comments of a recipe; its values are data."""
    for number, line in enumerate(source.split("\n"), 1):
        if match := re.search(r"(?:^|\s)#(.*)", line):
            yield Text(file, number, "data", prose(match[1]))


def echoed(file: str, source: str) -> Iterator[Text]:
    """The printed lines of a batch file, and its remarks."""
    for number, line in enumerate(source.split("\n"), 1):
        if match := re.match(r"(?i)\s*@?(?:.*\becho[ .:]|rem )(.*)", line):
            yield Text(file, number, "message", prose(match[1]))


def texts_of(file: str, source: str) -> Iterator[Text]:
    """The prose of one file."""
    if file.endswith(".py"):
        yield from docstrings_of(file, source) if file.startswith("tests/") else quoted(file, source, PYTHON, "message")
    elif file.endswith(".toml"):
        yield from quoted(file, source, TOML, "data")
    elif file.endswith((".yaml", ".yml")):
        yield from yaml_comments(file, source)
    elif file.endswith(".bat"):
        yield from echoed(file, source)
    else:
        yield from markdown(file, source)


def files() -> Iterator[Path]:
    """The linted files: code, tables, recipes, docs; of tests the docstrings, of the history nothing."""
    for folder in (PACKAGE, "scripts", "benchmarks", "tests", "docs", "recipes"):
        for path in sorted((ROOT / folder).rglob("*")):
            file = path.relative_to(ROOT).as_posix()
            is_test = folder == "tests" and path.suffix != ".py"
            if path.suffix in (".py", ".toml", ".yaml", ".yml", ".md", ".bat") and not is_test:
                if not file.startswith(FOREIGN) and file not in GENERATED:
                    yield path
    yield from (ROOT / "README.md", ROOT / "CONTRIBUTING.md")


# ---------------------------------------------------------------- rules and hits


@cache
def rules() -> tuple[Rule, ...]:
    return tuple(Rule(**row) for row in tomllib.loads(RULES.read_text(encoding="utf-8"))["rule"])


@cache
def allowed() -> tuple[Allowed, ...]:
    return tuple(Allowed(**row) for row in tomllib.loads(RULES.read_text(encoding="utf-8")).get("allowed", []))


def hits_in(text: Text, among: tuple[Rule, ...]) -> Iterator[Hit]:
    """All hits of the rules in one text, without the allow-list."""
    return (Hit(rule, text, *span) for rule in among for span in rule.spans(text))


@cache
def all_texts() -> tuple[Text, ...]:
    return tuple(
        text
        for path in files()
        for text in texts_of(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    )


@cache
def hits_of_the_tree() -> tuple[Hit, ...]:
    """Every hit, including the ones in the allow-list."""
    return tuple(hit for text in all_texts() for hit in hits_in(text, rules()))


def permits(row: Allowed, hit: Hit) -> bool:
    return (row.rule, row.file) == (hit.rule.name, hit.text.file) and row.text in hit.around


def open_hits() -> list[Hit]:
    """The hits that no row of the allow-list permits."""
    return [hit for hit in hits_of_the_tree() if not any(permits(row, hit) for row in allowed())]


def counts_by_room(found: list[Hit]) -> dict[str, int]:
    counts = Counter(hit.text.room for hit in found)
    return {room: counts[room] for room in sorted(counts)}


def ceilings() -> dict[str, int]:
    """Room to the number of hits that it may still have; a room that is not named has none."""
    table: dict[str, int] = tomllib.loads(CEILINGS.read_text(encoding="utf-8"))
    return table


def write_ceilings(counts: dict[str, int], before: dict[str, int] | None) -> None:
    """Write what is left; with ``before``, no number rises."""
    rows = {name: before[name] for name in NAME_CEILINGS if before and name in before}
    rows |= {room: count if before is None else min(count, before.get(room, 0)) for room, count in counts.items()}
    head = (
        "# How many hits of tests/english.toml each room may still have. The aim is an empty file; no number rises.\n"
        "# `python -m tests.english --lower` writes what is left.\n"
    )
    body = "".join(f"{room} = {count}\n" for room, count in sorted(rows.items()) if count)
    CEILINGS.write_text(head + body, encoding="utf-8", newline="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rooms", nargs="*", help="rooms (train, docs, tests, top, ...) or parts of file names")
    parser.add_argument("--rule", action="append", help="only this rule (several times for several)")
    parser.add_argument("--counts", action="store_true", help="counts by rule and by room")
    parser.add_argument("--lower", action="store_true", help="lower the ceilings to what is left")
    given = parser.parse_args()
    found = open_hits()
    if given.lower:
        write_ceilings(counts_by_room(found), ceilings() if CEILINGS.exists() else None)
        return
    if given.rooms:
        found = [
            hit
            for hit in found
            if any(room == hit.text.room or ("/" in room and room in hit.text.file) for room in given.rooms)
        ]
    if given.rule:
        found = [hit for hit in found if hit.rule.name in given.rule]
    if given.counts:
        by_rule = Counter(hit.rule.name for hit in found)
        lines = [f"{count:6} {rule}" for rule, count in by_rule.most_common()]
        lines += ["", *(f"{count:6} {room}" for room, count in counts_by_room(found).items()), f"{len(found):6} in all"]
    else:
        lines = [f"{hit}\n    -> {hit.rule.write}" for hit in sorted(found, key=lambda hit: (hit.text.file, hit.line))]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
