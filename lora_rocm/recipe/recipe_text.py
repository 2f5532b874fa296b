"""Changes values in the text of a recipe and keeps everything else: comments, order and blank lines.

It works on recipes in the layout of the shipped ones: sections at the left edge, keys indented by two blanks.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence

from lora_rocm.recipe.yaml_tree import YamlSyntaxError, parse_yaml

Value = bool | int | float | str | Sequence[str] | Sequence[Mapping[str, str]]
MARK = "<--"
"""Mark in the comment of a line that a user has to change."""
COMMENT_COLUMN = 26
COMMENT_WIDTH = 120
LAST_SECTION = "output"


class RecipeText:
    """The text of a recipe, to be changed line by line.

    Args:
        text: the recipe, in the layout of the shipped recipes.
    """

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()

    def __str__(self) -> str:
        return "\n".join(self._lines) + "\n"

    def number_of(self, section: str, key: str) -> int:
        """Return the line number of a key, from 1; 0 if the recipe does not have it."""
        at = self._find(section, key)
        return 0 if at is None else at + 1

    def name_of(self, section: str, key: str) -> str:
        """Return the dotted name of a key, which may be in the first entry of the section's sources."""
        at = self._find(section, key)
        in_entry = at is not None and self._lines[at].lstrip().startswith("- ")
        return f"{section}.sources[0].{key}" if in_entry else f"{section}.{key}"

    def has(self, section: str, key: str) -> bool:
        return self._find(section, key) is not None

    def set(
        self, section: str, key: str, value: Value, why: str, *, instead_of: str = "", at_top: bool = False
    ) -> None:
        """Set a key, with the reason as the comment of its line. A missing key is added to the end of its section.

        Args:
            section: name of the section.
            key: name of the key.
            value: its new value.
            why: the reason, without line ends.
            instead_of: another key of the section that this one replaces.
            at_top: whether a missing key is added to the beginning of its section instead.
        """
        at = self._find(section, instead_of or key)
        begin, end = self._bounds(section)
        if at is None:
            at = begin if at_top else end
            self._lines.insert(at, f"  {key}:")
        lead = re.match(r"\s*(?:- )?", self._lines[at])
        indent = lead[0] if lead else "  "
        head = f"{indent}{key}: {written(value)}"
        self._lines[at] = f"{head:<{COMMENT_COLUMN}}  # {why}"
        self._drop_rest(at, len(indent))

    def set_list(self, section: str, key: str, items: Sequence[str], why: str) -> None:
        """Set a key to a list with one item per line. For the arguments see ``set``."""
        self.set(section, key, "", why)
        at = self.number_of(section, key)
        self._lines[at - 1] = f"{f'  {key}:':<{COMMENT_COLUMN}}  # {why}"
        self._lines[at:at] = [f"    - {written(item)}" for item in items]

    def remove(self, section: str, key: str) -> bool:
        """Remove a key with its value and comments. Return whether the recipe had it."""
        if (at := self._find(section, key)) is None:
            return False
        self._drop_rest(at, 2)
        del self._lines[at]
        return True

    def describe(self, sentence: str, *, replaced: str) -> None:
        """Begin the first comment with a sentence.

        Args:
            sentence: the sentence.
            replaced: the sentence with which the comment began; with an empty text, the whole comment is replaced.
        """
        num_lines = next((at for at, line in enumerate(self._lines) if not line.startswith("#")), len(self._lines))
        words = " ".join(line.lstrip("# ") for line in self._lines[:num_lines])
        rest = words.removeprefix(replaced).strip() if replaced else ""
        width, whole = COMMENT_WIDTH - 2, f"{sentence} {rest}".strip()
        wrapped = textwrap.wrap(whole, width, break_long_words=False, break_on_hyphens=False)
        self._lines[:num_lines] = [*(f"# {line}" for line in wrapped), *([] if num_lines else [""])]

    def _drop_rest(self, at: int, indent: int) -> None:
        """Remove the next lines that belong to a value or its comment: they are indented further than the key."""
        while at + 1 < len(self._lines) and re.match(rf"\s{{{indent + 1},}}\S", self._lines[at + 1]):
            del self._lines[at + 1]

    def marked(self) -> list[tuple[int, str]]:
        """Return number and text of each line that is marked to be changed, without its comment."""
        found = ((number, line) for number, line in enumerate(self._lines, 1) if MARK in line.partition("#")[2])
        return [(number, line.partition("#")[0].strip()) for number, line in found if not line.lstrip().startswith("#")]

    def _bounds(self, section: str) -> tuple[int, int]:
        """Return the first line of a section's content, and the line after its last key. A missing section is added."""
        if f"{section}:" not in self._lines:
            last = f"{LAST_SECTION}:"
            at = self._lines.index(last) if last in self._lines else len(self._lines)
            self._lines[at:at] = [f"{section}:", ""]
        begin = end = self._lines.index(f"{section}:") + 1
        for number, line in enumerate(self._lines[begin:], begin):
            if line and not line.startswith(" "):
                break
            if line.strip():
                end = number + 1
        return begin, end

    def _find(self, section: str, key: str) -> int | None:
        if f"{section}:" not in self._lines:
            return None
        begin, end = self._bounds(section)
        wanted = re.compile(rf"(  |    - ){re.escape(key)}:(?: |$)")
        return next((number for number in range(begin, end) if wanted.match(self._lines[number])), None)


def written(value: Value | Mapping[str, str]) -> str:
    """Return a value as YAML on one line. A text is quoted only where it has to be."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {written(each)}' for key, each in value.items())}}}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if not isinstance(value, str):
        return f"[{', '.join(map(written, value))}]"
    quotes = "'" + value.replace("'", "''") + "'"
    spellings = (value, quotes) if re.fullmatch(r"[\w.~/\\].*", value) and "," not in value else (quotes,)
    return next((spelling for spelling in spellings if _reads_as(spelling, value)), json.dumps(value))


def _reads_as(spelling: str, value: str) -> bool:
    try:
        return bool(parse_yaml(f"key: {spelling} # why").value == {"key": value})
    except YamlSyntaxError:
        return False
