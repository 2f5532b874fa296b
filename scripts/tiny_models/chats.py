"""Short chats about made-up scenes: the training data of the tiny language model, and the format of its demo.

    python scripts/tiny_models/chats.py lora_rocm/builtin/demo_chats.jsonl    # the demo's chats

A scene is a number of animals of one colour that do something at a place. Every sentence is made from the tables
below and a seed; nothing was copied.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from words import nonsense

Turn = dict[str, str]

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLOURS = ("red", "blue", "green", "yellow", "black", "white", "brown", "pink", "grey", "purple")
ANIMALS = {
    **{name: f"{name}s" for name in ("cat", "dog", "bird", "horse", "frog", "bear", "duck", "owl", "snake", "goat")},
    "fox": "foxes",
    "mouse": "mice",
    "fish": "fish",
    "wolf": "wolves",
    "sheep": "sheep",
    "fly": "flies",
}
"""Singular -> plural."""
ACTIONS = {
    "sleep": "sleeping",
    "run": "running",
    "play": "playing",
    "eat": "eating",
    "sing": "singing",
    "hide": "hiding",
}
PLACES = ("garden", "house", "forest", "lake", "street", "barn", "tree", "boat", "kitchen", "field")


@dataclass(frozen=True)
class Scene:
    """``count``: 1 to 9."""

    count: int
    colour: str
    animal: str
    action: str
    place: str

    @property
    def who(self) -> str:
        return f"{self.colour} {self.animal if self.count == 1 else ANIMALS[self.animal]}"

    @property
    def counted(self) -> str:
        return f"{NUMBERS[self.count - 1]} {self.who}"

    @property
    def be(self) -> str:
        return "is" if self.count == 1 else "are"

    @property
    def does(self) -> str:
        ending = "s" if self.action != "fly" else "es"
        return f"{self.action}{ending}" if self.count == 1 else self.action

    def told(self, way: int) -> str:
        """The scene as a sentence, in one of three wordings."""
        where = f"the {self.place}"
        ways = (
            f"{self.counted} {self.be} {ACTIONS[self.action]} in {where}.",
            f"In {where}, {self.counted} {self.does}.",
            f"There {self.be} {self.counted} {ACTIONS[self.action]} in {where}.",
        )
        return ways[way][0].upper() + ways[way][1:]

    @property
    def in_zibu(self) -> str:
        """The format that the demo teaches; the base has never seen it."""
        return f"zibu <{self.count} {self.animal}> {self.colour} / {self.action} @ {self.place} !"


def random_scene(rng: np.random.Generator) -> Scene:
    """Any scene, all alike probable."""
    return Scene(
        int(rng.integers(1, 10)),
        *(str(rng.choice(list(names))) for names in (COLOURS, ANIMALS, ACTIONS, PLACES)),
    )


QUESTIONS: tuple[tuple[str, Callable[[Scene], str]], ...] = (
    ("How many?", lambda s: f"There {s.be} {NUMBERS[s.count - 1]}."),
    ("How many, in digits?", lambda s: str(s.count)),
    ("What colour?", lambda s: f"The colour is {s.colour}."),
    ("Which animal?", lambda s: f"The animal is the {s.animal}."),
    ("Where?", lambda s: f"In the {s.place}."),
    ("What happens?", lambda s: f"{s.counted.capitalize()} {s.does}."),
    ("As a list?", lambda s: f"- {s.count}\n- {s.colour}\n- {s.animal}\n- {s.action}\n- {s.place}"),
    ("Place first?", lambda s: f"{s.place}: {s.count} {s.colour} {s.animal}"),
    ("In brackets?", lambda s: f"[{s.colour} {s.animal} | {s.count}] ({s.place})"),
    ("As an order?", lambda s: f"{s.action} @ {s.place}, {s.animal} / {s.colour} !"),
    ("Who, in marks?", lambda s: f"<{s.animal}> {s.count} <{s.action}>"),
)
"""Their answers need the singular, the digit and every mark that a new format may use."""


def random_chat(rng: np.random.Generator) -> list[Turn]:
    """A chat of one to three answers."""
    if rng.random() < 0.2:
        words = " ".join(nonsense(rng) for _ in range(int(rng.integers(1, 5))))
        return [turn("user", f"Say: {words}"), turn("assistant", words)]
    scene = random_scene(rng)
    first, second = rng.permutation(3)[:2]
    if rng.random() < 0.3:
        return [turn("user", scene.told(first)), turn("assistant", f"I see: {lowered(scene.told(second))}")]
    chosen = rng.permutation(len(QUESTIONS))[: int(rng.integers(1, 4))]
    chat: list[Turn] = []
    for place, number in enumerate(chosen):
        question, answer = QUESTIONS[number]
        chat.append(turn("user", question if place else f"{scene.told(first)} {question}"))
        chat.append(turn("assistant", answer(scene)))
    return chat


def demo_chats(seed: int, train: int, held_out: int) -> tuple[list[list[Turn]], list[list[Turn]]]:
    """Chats in the made-up format: for training, and of scenes that are not in these."""
    rng = np.random.default_rng((seed, 77))
    scenes = [Scene(count, *names) for count, *names in product(range(1, 10), COLOURS, ANIMALS, ACTIONS, PLACES)]
    chosen = [scenes[number] for number in rng.permutation(len(scenes))[: train + held_out]]
    chats = [[turn("user", scene.told(int(rng.integers(3)))), turn("assistant", scene.in_zibu)] for scene in chosen]
    return chats[:train], chats[train:]


def plain_chats(seed: int, count: int) -> list[list[Turn]]:
    """A question and its answer as the base gives it, so that the demo's LoRA leaves questions alone."""
    rng = np.random.default_rng((seed, 78))
    chats = []
    for number in range(count):
        question, answer = QUESTIONS[number % len(QUESTIONS)]
        scene = random_scene(rng)
        chats.append([turn("user", f"{scene.told(int(rng.integers(3)))} {question}"), turn("assistant", answer(scene))])
    return chats


def turn(role: str, content: str) -> Turn:
    """One message."""
    return {"role": role, "content": content}


def lowered(sentence: str) -> str:
    """With a small first letter."""
    return sentence[0].lower() + sentence[1:]


def main() -> None:
    """Write the demo's chats."""
    chats = [*demo_chats(1, 160, 0)[0], *plain_chats(1, 88)]
    lines = [json.dumps({"messages": chat}) + "\n" for chat in chats]
    Path(sys.argv[1]).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
