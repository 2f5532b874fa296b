"""Formats numbers for people: sizes, times, rates."""

from __future__ import annotations


def size_text(num_bytes: float) -> str:
    """Return a size in binary units: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def time_text(seconds: float) -> str:
    """Return a duration in clock notation: 3725 -> "1:02:05", 65 -> "1:05"."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def rate_text(per_second: float, unit: str = "it") -> str:
    """Return a rate in steps per second, or in seconds per step below one: 4 -> "4.00 it/s", 0.25 -> "4.00 s/it"."""
    if per_second <= 0:
        return "-"
    return f"{per_second:.2f} {unit}/s" if per_second >= 1 else f"{1 / per_second:.2f} s/{unit}"


def count_text(count: int, noun: str) -> str:
    """Return a count with a noun, which gets an "s" in the plural: 1 -> "1 step", 2 -> "2 steps"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def times_text(count: int) -> str:
    """Return a number of times as words: 1 -> "once", 2 -> "2 times"."""
    return "once" if count == 1 else f"{count} times"


def number_text(value: float | None) -> str:
    """Return a number with four significant digits. None, for values that are unmeasured or not finite, becomes "-"."""
    return "-" if value is None else f"{value:.4g}"
