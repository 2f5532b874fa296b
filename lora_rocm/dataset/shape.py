"""The size of a sample along named axes. It is the same for all samples of a batch and determines a step's memory.

Data sources create shapes, and model families read them. All code between them only compares, orders and prints them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

IMAGE_AXES = ("h", "w")
NAME = re.compile(r"[a-z][a-z0-9_]*")
PART = re.compile(r"([0-9]+) ([a-z_]+)")
SIDES = re.compile(r"(?:([a-z][a-z0-9_]*) )?([0-9]+)x([0-9]+)")


@dataclass(frozen=True)
class SampleShape:
    """Size of one sample. Images have the axes ``h`` and ``w`` in pixels, clips also ``frames``, and texts ``tokens``.

    A companion with its own size, such as "control", adds the axes ``control_h`` and ``control_w``.

    axes: name and size of each axis, sorted by name.
    cost: number that grows with the memory and time of a step; shapes are ordered by it. By default, the product of the
        sizes, plus the product of each companion's sizes.
    """

    axes: tuple[tuple[str, int], ...]
    cost: int

    @classmethod
    def of(cls, cost: int | None = None, **axes: int) -> SampleShape:
        """Return the shape with these axes."""
        sizes: dict[str, int] = {}
        for name, size in axes.items():
            owner = name[:-2] if name.endswith(("_h", "_w")) else ""
            sizes[owner] = sizes.get(owner, 1) * size
        return cls(tuple(sorted(axes.items())), sum(sizes.values()) if cost is None else cost)

    def __getitem__(self, axis: str) -> int:
        """Return the size along one axis.

        Raises:
            KeyError: the shape has no such axis.
        """
        return dict(self.axes)[axis]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes, in the order of ``axes``."""
        return tuple(size for _, size in self.axes)

    @property
    def order(self) -> tuple[int, tuple[int, ...], tuple[str, ...]]:
        """Sort key: cost, then sizes, then axis names."""
        return self.cost, self.sizes, tuple(name for name, _ in self.axes)

    def __str__(self) -> str:
        """Return text such as "1024x768" (width x height), "1024x768, 17 frames" or "512 tokens".

        A companion with its own size is added at the end: "64x64, control 96x32".
        """
        axes = dict(self.axes)
        sides = [f"{axes.pop('w')}x{axes.pop('h')}"] if axes.keys() >= set(IMAGE_AXES) else []
        owners = sorted(name.removesuffix("_h") for name in axes if name.endswith("_h"))
        companions = [f"{name} {axes.pop(f'{name}_w')}x{axes.pop(f'{name}_h')}" for name in owners]
        return ", ".join([*sides, *(f"{size} {name}" for name, size in axes.items()), *companions])

    @classmethod
    def parse(cls, text: str) -> SampleShape:
        """Convert text from ``str`` back to a shape, with the default cost.

        Raises:
            ValueError: the text does not describe a shape.
        """
        axes: dict[str, int] = {}
        for part in text.split(", "):
            if (sides := SIDES.fullmatch(part)) is not None:
                owner = f"{sides[1]}_" if sides[1] else ""
                axes |= {f"{owner}w": int(sides[2]), f"{owner}h": int(sides[3])}
            elif (other := PART.fullmatch(part)) is not None:
                axes[other[2]] = int(other[1])
            else:
                raise ValueError(f"not a shape: {text!r:.100}")
        return cls.of(**axes)

    def to_json(self) -> dict[str, Any]:
        return {"axes": dict(self.axes), "cost": self.cost}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SampleShape:
        """Return the shape that ``to_json`` wrote.

        Raises:
            ValueError, LookupError, TypeError, AttributeError: the value does not describe a shape.
        """
        axes, cost = value["axes"], value["cost"]
        if not all(NAME.fullmatch(name) and type(size) is int for name, size in axes.items()) or type(cost) is not int:
            raise ValueError("not a shape")
        return cls(tuple(sorted(axes.items())), cost)
