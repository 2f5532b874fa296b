"""Random choices as pure functions of what they are for: no generator, no hidden state, the same on every machine."""

from __future__ import annotations

from hashlib import blake2b


def draw(*parts: int | str) -> int:
    """A uniform integer in [0, 2**64) that depends on ``parts`` alone."""
    return int.from_bytes(blake2b(repr(parts).encode("utf-8"), digest_size=8).digest(), "little")


def fraction(*parts: int | str) -> float:
    """A uniform number in [0, 1) that depends on ``parts`` alone."""
    return (draw(*parts) >> 11) / 2**53
