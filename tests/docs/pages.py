"""The pages that a newcomer types from: their fenced blocks as files to write and commands to run."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
START = ("docs/start/install.md", "docs/start/image-lora.md", "docs/start/language-model.md")
PAGES = ("README.md", *START)
BLOCK = re.compile(
    r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<content>.*?)^```$", re.DOTALL | re.MULTILINE
)
SHELLS = {"bash": True, "bat": False}
"""Language of a block of commands -> whether words are split as a POSIX shell does."""
EXAMPLE = "text"
"""Language of a block that nobody types."""


@dataclass(frozen=True)
class Block:
    """One fenced block.

    title: the name of the file that the reader writes; empty for commands and examples.
    """

    page: str
    language: str
    title: str
    content: str

    def commands(self) -> list[str]:
        """The commands of a shell's block, one a line; empty for other blocks."""
        if self.language not in SHELLS:
            return []
        lines = [re.sub(r"\s+#.*$", "", line).strip() for line in self.content.replace("\\\n", " ").splitlines()]
        return [line for line in lines if line and not line.startswith("#")]

    def words(self, command: str) -> list[str]:
        """A command's words without quotes."""
        words = shlex.split(command, posix=SHELLS[self.language])
        return words if SHELLS[self.language] else [word.strip('"') for word in words]


def blocks(page: str) -> list[Block]:
    """All blocks of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [Block(page, m["language"], m["title"] or "", m["content"]) for m in BLOCK.finditer(text)]
