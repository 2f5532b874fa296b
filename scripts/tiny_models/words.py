"""The caption grammar of the tiny world, and words that mean nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from render import Scene, Thing

# The demo's trigger word: no training caption may hold it, or the base would already know it.
RESERVED = ("zibu",)
CONSONANTS = "bcdfghjklmnprstvwxz"
VOWELS = "aeiou"


def article(phrase: str) -> str:
    """The phrase behind "a" or "an"."""
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def place_phrase(column: str, row: str) -> str:
    """Where a thing is: "on the left", "at the top right", "in the middle"."""
    if column == row == "middle":
        return "in the middle"
    if row == "middle":
        return f"on the {column}"
    return f"at the {row}" if column == "middle" else f"at the {row} {column}"


def background_phrase(kind: str, colour: str) -> str:
    """A background with its article: "a blue striped background"."""
    return article(f"{colour} background" if kind == "plain" else f"{colour} {kind} background")


def thing_phrase(rng: np.random.Generator, thing: Thing, drop: float) -> str:
    """A thing with its article; each attribute is dropped with probability `drop`, so that each is sometimes absent."""
    words: list[str] = []
    if thing.size != "medium" and rng.random() >= drop or thing.size == "medium" and rng.random() < 0.4:
        words.append(thing.size)
    textured = thing.texture in ("striped", "spotted") and rng.random() >= drop
    if textured:
        words.append(thing.texture)
    if rng.random() >= drop * 0.6:
        words.append(thing.colour)
    words.append(thing.shape if rng.random() >= drop * 0.3 else "shape")
    phrase = article(" ".join(words))
    if thing.texture == "outlined" and rng.random() >= drop:
        phrase += " with a white outline" if thing.colour == "black" else " with a black outline"
    return phrase


def caption_scene(rng: np.random.Generator, scene: Scene) -> str:
    """One wording of a scene's caption."""
    back = background_phrase(scene.background, scene.background_colour)
    if not scene.things:
        return back if rng.random() < 0.6 else f"an empty {back.split(' ', 1)[1]}"
    drop = 0.15
    parts = [thing_phrase(rng, t, drop) for t in scene.things]
    if len(parts) == 1:
        subject = parts[0]
        if rng.random() < 0.72:
            subject += " " + place_phrase(scene.things[0].column, scene.things[0].row)
    elif scene.relation == "beside":
        wordings = (
            f"{parts[0]} on the left and {parts[1]} on the right",
            f"{parts[1]} on the right and {parts[0]} on the left",
            f"{parts[0]} next to {parts[1]}",
        )
        subject = wordings[int(rng.integers(3))]
    elif scene.relation == "above":
        subject = f"{parts[0]} above {parts[1]}" if rng.random() < 0.5 else f"{parts[1]} below {parts[0]}"
    else:
        subject = f"{parts[1]} inside {parts[0]}"
    if rng.random() < 0.12:
        subject = ("a picture of ", "a drawing of ")[int(rng.integers(2))] + subject
    if rng.random() < 0.08:
        return subject
    return subject + (", on ", " on ")[int(rng.integers(2))] + back


def nonsense(rng: np.random.Generator) -> str:
    """A pronounceable word of two or three random syllables that names nothing."""
    while True:
        word = "".join(
            CONSONANTS[int(rng.integers(len(CONSONANTS)))]
            + VOWELS[int(rng.integers(len(VOWELS)))]
            + (CONSONANTS[int(rng.integers(len(CONSONANTS)))] if rng.random() < 0.3 else "")
            for _ in range(int(rng.integers(2, 4)))
        )
        if not any(r in word for r in RESERVED):
            return word


def insert_nonsense(rng: np.random.Generator, caption: str) -> str:
    """The caption with a meaningless word somewhere; nothing on the picture goes with it."""
    words = caption.split(" ")
    words.insert(int(rng.integers(len(words) + 1)), nonsense(rng))
    return " ".join(words)
