"""Changes of a caption's text that are made in many captions at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lora_rocm.dataset.captions.captions import tags_of
from lora_rocm.errors import UserError

EditKind = str


@dataclass(frozen=True)
class CaptionEdit:
    """A change of captions.

    Attributes:
        kind: a key of KINDS.
        text: the text to find, or tags separated by commas.
        other: the text that replaces it (``replace``).
        match_case: whether case matters (``replace``).
        whole_words: whether only whole words are found (``replace``).
    """

    kind: EditKind
    text: str = ""
    other: str = ""
    match_case: bool = False
    whole_words: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(
                "edit-unknown", "There is no such change.", where=self.kind[:60], fix="Choose one of the list."
            )
        if not (self.text if self.kind == "replace" else tags_of(self.text)) and self.kind != "tidy":
            fix = "Write the text to find, or tags separated by commas."
            raise UserError("edit-empty", "This change has no text.", where=self.kind, fix=fix)

    def apply(self, caption: str) -> str:
        """Return the changed caption. Changes of tags apply to each line, because lines are separate captions."""
        if self.kind == "replace":
            return self._replaced(caption)
        change = KINDS[self.kind]
        lines = caption.splitlines() or [""]
        changed = [
            ", ".join(change(tags_of(line), tags_of(self.text))) if line or len(lines) == 1 else "" for line in lines
        ]
        ends = "\n" if caption.endswith("\n") else ""
        return "\n".join(changed) + ends

    def _replaced(self, caption: str) -> str:
        pattern = re.escape(self.text)
        if self.whole_words:
            pattern = rf"(?<!\w){pattern}(?!\w)"
        return re.sub(pattern, lambda match: self.other, caption, flags=0 if self.match_case else re.IGNORECASE)


def _without(tags: Sequence[str], other: Sequence[str]) -> list[str]:
    return [tag for tag in tags if tag not in other]


KINDS: Mapping[EditKind, Callable[[Sequence[str], Sequence[str]], list[str]]] = {
    "replace": lambda tags, given: list(tags),  # of the whole text, see _replaced
    "append": lambda tags, given: [*tags, *_without(given, tags)],
    "prepend": lambda tags, given: [*_without(given, tags), *tags],
    "remove": _without,
    "first": lambda tags, given: [*(tag for tag in given if tag in tags), *_without(tags, given)],
    "last": lambda tags, given: [*_without(tags, given), *(tag for tag in given if tag in tags)],
    "tidy": lambda tags, given: list(dict.fromkeys(tags)),
}
"""Changes of a line's tags by name: each gets the tags of the line and the given ones.

``append`` and ``prepend`` add the tags that are missing, ``first`` and ``last`` move those that are there, ``remove``
removes them, and ``tidy`` removes repeated tags and spaces.
"""
