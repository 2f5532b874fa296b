"""Compares file names across operating systems, and finds names that some system refuses."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

FORBIDDEN = re.compile(r'[\x00-\x1f\x7f<>:"/\\|?*]')
"""Characters that Windows forbids in file names."""
DEVICE = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9\u00b9\u00b2\u00b3]) *(\..*)?", re.IGNORECASE)
"""Device names that Windows reserves in every folder, with any file extension."""
BUILTIN = "builtin:"
"""Prefix of names of files in this package, used in recipes and commands."""
LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
MAX_STEM_BYTES = 160
"""Maximum length of a file name without its extension, in bytes of UTF-8.

Most systems allow 255 bytes for a name, but a run adds suffixes, and longer ones for temporary files.
"""


def name_key(name: str) -> str:
    """Return the name in Unicode's NFC, for comparisons.

    macOS may store ``é`` as a letter and an accent (NFD). Other systems store it as it was typed, which is NFC.
    """
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def stem_fault(stem: str) -> str:
    """Return the reason why some system refuses this stem of a file name, as a phrase; empty if all accept it."""
    if found := FORBIDDEN.search(stem):
        return f"has the character {found[0]!a}, which no file name can have on Windows"
    if LONE_SURROGATE.search(stem):
        return "has characters that are not valid Unicode"
    if stem != stem.strip(" .") or not stem:
        return "is empty, or begins or ends with a blank or a dot, which file names cannot have on every system"
    if DEVICE.fullmatch(stem):
        return "is the name of a device on Windows"
    if (size := len(stem.encode("utf-8", "surrogatepass"))) > MAX_STEM_BYTES:
        return f"is too long for a file name: it has {size} bytes, but at most {MAX_STEM_BYTES} are possible"
    return ""


def usable_stem(stem: str) -> str:
    """Return a similar stem that all systems accept."""
    bare = FORBIDDEN.sub("-", stem).encode("utf-8", "ignore")[: MAX_STEM_BYTES - len("lora-")]
    cleaned = bare.decode("utf-8", "ignore").strip(" .")
    return cleaned if not stem_fault(cleaned) else f"lora-{cleaned}".rstrip("-")


class NameIndex(Generic[T]):
    """A mapping from names or paths to values, used to pair files, rows and images by name.

    A lookup finds the exact name, or else the only name with the same ``name_key``.
    """

    def __init__(self, values: Iterable[tuple[str, T]] = ()) -> None:
        self._values: dict[str, T] = {}
        self._spellings: dict[str, list[str]] = {}  # of names that are not ASCII: an ASCII name has only one
        for name, value in values:
            self[name] = value

    def __setitem__(self, name: str, value: T) -> None:
        if name not in self._values and not name.isascii():
            self._spellings.setdefault(name_key(name), []).append(name)
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        del self._values[name]
        if not name.isascii():
            self._spellings[name_key(name)].remove(name)

    def __contains__(self, name: str) -> bool:
        return self.find(name) is not None

    def __len__(self) -> int:
        return len(self._values)

    def find(self, name: str) -> tuple[str, T] | None:
        """Return the stored spelling of a name and its value; None if the name is missing or ambiguous."""
        if name in self._values:
            return name, self._values[name]
        found = [] if name.isascii() else self._spellings.get(name_key(name), [])
        return (found[0], self._values[found[0]]) if len(found) == 1 else None

    def items(self) -> list[tuple[str, T]]:
        return list(self._values.items())


def spelled(path: Path) -> Path:
    """Return the path as the file system spells it. A path that exists or matches nothing is returned unchanged."""
    if str(path).isascii() or os.path.lexists(path):
        return path
    parent = spelled(path.parent)
    try:
        found = NameIndex((name, name) for name in os.listdir(parent)).find(path.name)
    except OSError:
        return path
    return path if found is None else parent / found[0]
