"""Random numbers as pure functions of their arguments. There is no state, and results are equal on every machine."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b


def draw(*parts: int | str) -> int:
    """Return a uniform random integer in [0, 2**64) that depends only on ``parts``."""
    return int.from_bytes(blake2b(repr(parts).encode("utf-8"), digest_size=8).digest(), "little")


def drawer(*parts: int | str) -> Callable[..., int]:
    """Return ``draw`` with fixed first arguments, which are hashed only once: ``drawer(a)(b) == draw(a, b)``."""
    begun = blake2b(("(" + "".join(f"{part!r}, " for part in parts)).encode("utf-8"), digest_size=8)

    def rest(*more: int | str) -> int:
        digest = begun.copy()
        digest.update((", ".join(map(repr, more)) + ")").encode("utf-8"))
        return int.from_bytes(digest.digest(), "little")

    return rest


def fraction(*parts: int | str) -> float:
    """Return a uniform random number in [0, 1) that depends only on ``parts``."""
    return (draw(*parts) >> 11) / 2**53
