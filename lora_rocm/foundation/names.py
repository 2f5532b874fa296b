"""Names of files: which of them are the same name, and which a system may refuse."""

from __future__ import annotations

import re
import unicodedata

FORBIDDEN = re.compile(r'[\x00-\x1f\x7f<>:"/\\|?*]')
"""Characters that a file name cannot have on Windows."""
DEVICE = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9\u00b9\u00b2\u00b3]) *(\..*)?", re.IGNORECASE)
"""Names of devices of Windows, which it finds in every folder, whatever the ending."""
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
