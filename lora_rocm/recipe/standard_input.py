"""A recipe from standard input (``-``)."""

from __future__ import annotations

import sys

from lora_rocm.errors import Problem, RecipeError

STANDARD_INPUT = "-"
"""The path that means standard input."""
INPUT_NAME = "standard-input"
"""Name of a recipe from standard input, in messages and in the names of run directories."""


def read_standard_input(max_bytes: int) -> bytes:
    """Return at most ``max_bytes`` of standard input.

    Raises:
        RecipeError: there is no standard input.
    """
    if sys.stdin is None:
        raise RecipeError([Problem(INPUT_NAME, "there is no standard input", "Give the path of a recipe.")])
    return sys.stdin.buffer.read(max_bytes)
