"""Names of files: which of them are the same name, and which a system may refuse."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

FORBIDDEN = re.compile(r'[\x00-\x1f\x7f<>:"/\\|?*]')
"""Characters that a file name cannot have on Windows."""
DEVICE = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9\u00b9\u00b2\u00b3]) *(\..*)?", re.IGNORECASE)
"""Names of devices of Windows, which it finds in every folder, whatever the ending."""
BUILTIN = "builtin:"
"""How the names of what is shipped with the package begin, in recipes and commands."""
LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
MAX_STEM_BYTES = 160
"""In UTF-8. A name has 255 bytes on most systems; a run adds endings, and more for temporary files."""


def name_key(name: str) -> str:
    """The form in which names and paths of files are compared: NFC.

    A Mac may store ``é`` as a letter and an accent (NFD); the other systems store what was typed, which is NFC.
    """
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def stem_fault(stem: str) -> str:
    """Why a file cannot have this name before its ending on every system, as a phrase; empty if it can."""
    if found := FORBIDDEN.search(stem):
        return f"has the character {found[0]!a}, which no file name can have on Windows"
    if LONE_SURROGATE.search(stem):
        return "has characters that no text can have"
    if stem != stem.strip(" .") or not stem:
        return "is empty, or begins or ends with a blank or a dot, which file names cannot have on every system"
    if DEVICE.fullmatch(stem):
        return "is the name of a device on Windows"
    if (size := len(stem.encode("utf-8", "surrogatepass"))) > MAX_STEM_BYTES:
        return f"is too long for the name of a file: {size} bytes, and at most {MAX_STEM_BYTES} are possible"
    return ""


def usable_stem(stem: str) -> str:
    """A name that is like this one and has no such fault."""
    bare = FORBIDDEN.sub("-", stem).encode("utf-8", "ignore")[: MAX_STEM_BYTES - len("lora-")]
    cleaned = bare.decode("utf-8", "ignore").strip(" .")
    return cleaned if not stem_fault(cleaned) else f"lora-{cleaned}".rstrip("-")


class Names(Generic[T]):
    """Values by name or path, as ``name_key`` compares them: for pairing files, rows and images by name.

    A name is found as it is spelled; if it is not there so, a name that is the same in ``name_key``, if it is the only
    one.
    """

    def __init__(self, values: Iterable[tuple[str, T]] = ()) -> None:
        self._values: dict[str, T] = {}
        self._spellings: dict[str, list[str]] = {}  # of names that are not ASCII: the others have only one
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
        """The name as it is spelled here, and its value; None if it is not here, or not clear."""
        if name in self._values:
            return name, self._values[name]
        found = [] if name.isascii() else self._spellings.get(name_key(name), [])
        return (found[0], self._values[found[0]]) if len(found) == 1 else None

    def items(self) -> list[tuple[str, T]]:
        return list(self._values.items())


def spelled(path: Path) -> Path:
    """The path as the file system spells it, if it is not there as it is given.

    A path that is there is returned as it is, and so is one that leads nowhere.
    """
    if str(path).isascii() or os.path.lexists(path):
        return path
    parent = spelled(path.parent)
    try:
        found = Names((name, name) for name in os.listdir(parent)).find(path.name)
    except OSError:
        return path
    return path if found is None else parent / found[0]
