"""Text output of ``lora-rocm cache``, which reports on a cache folder (see ``cache_store.maintenance``)."""

from __future__ import annotations

from pathlib import Path

from lora_rocm.cache_store.maintenance import BAD, GOOD, OLDER, CachePruned, CacheStats, CacheVerified
from lora_rocm.foundation.terminal_text import printable
from lora_rocm.foundation.units import count_text, size_text

MAX_NAMED = 100


def stats_text(found: CacheStats) -> str:
    """Return the number and size of the files of each kind, as text."""
    lines = [f"{_shown(found.folder)}: {size_text(sum(kind.num_bytes for kind in found.kinds.values()))}"]
    for name, kind in found.kinds.items():
        lines.append(f"  {printable(name)}: {count_text(kind.files, 'file')}, {size_text(kind.num_bytes)}")
    return "\n".join(lines)


def verified_text(found: CacheVerified) -> str:
    """Return the first faulty files and the number of files in each state, as text."""
    lines = [f"{fault.state}: {_shown(fault.path)}: {printable(fault.why)}" for fault in found.faults[:MAX_NAMED]]
    if len(found.faults) > MAX_NAMED:
        lines.append(f"... and {len(found.faults) - MAX_NAMED} more")
    summary = f"{_shown(found.folder)}: {found.good} good, {found.bad} bad, {found.unreadable} unreadable"
    for number, words in (
        (found.replaced, "damaged before and replaced"),
        (found.older, "of older versions of the program"),
        (found.newer, "of newer versions of the program"),
    ):
        summary += f", {number} {words}" if number else ""
    lines.append(summary)
    if found.bad or found.unreadable:
        lines.append("Training never uses them: the next run that needs one encodes it again.")
    if found.bad or found.replaced:
        lines.append("To delete damaged files: lora-rocm cache prune")
    return "\n".join(lines)


def pruned_text(found: CachePruned) -> str:
    """Return the number of deleted files by reason, and the number of files kept, as text."""
    words = {
        BAD: "bad",
        GOOD: "second copies",
        OLDER: "of older versions",
        "unused": f"not used for {found.older_than_days or 0:g} days",
        "temporary": "left by writers that were killed",
    }
    parts = [f"{found.deleted[why]} {text}" for why, text in words.items() if found.deleted.get(why)]
    would = "Would free" if found.dry_run else "Freed"
    text = f"{_shown(found.folder)}: {would} {size_text(found.freed_bytes)}: {', '.join(parts) or 'nothing to delete'}"
    if found.left:
        text += "\nKept: " + ", ".join(f"{number} {why}" for why, number in sorted(found.left.items()))
    return text


def _shown(path: Path) -> str:
    return printable(str(path))
