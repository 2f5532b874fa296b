"""Child process that counts a step's memory into the footprint cache, while the training process starts.

Command: ``... RECIPE``. It imports what it needs, then waits for a line on standard input with dtype and settings
(``footprint_process.CountRequest``). It ends when it has counted, or when its standard input closes.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import torch

from lora_rocm.families.base import family_for
from lora_rocm.memory.footprint import counted, largest_of
from lora_rocm.memory.footprint_process import CountRequest
from lora_rocm.recipe.load import load_recipe

ORPHANED_CODE = 1


def main() -> int:
    """Count what standard input asks for, and return the exit code.

    Raises:
        LoraRocmError: recipe or base model cannot be used. Loading has the same error, and reports it.
    """
    torch.set_num_threads(1)
    recipe = load_recipe(Path(sys.argv[1])).recipe
    family = family_for(recipe)
    text = b""
    while not text.endswith(b"\n"):  # unbuffered: a buffer's lock would be held at interpreter exit
        if not (more := os.read(sys.stdin.fileno(), 4096)):
            return ORPHANED_CODE
        text += more
    threading.Thread(target=_leave_with_parent, daemon=True, name="parent-watch").start()
    request = CountRequest.from_text(text.decode("utf-8"))
    counted(recipe, family, getattr(torch, request.dtype), request.settings, largest_of(recipe))
    return 0


def _leave_with_parent() -> None:
    """Exit when standard input closes: nobody waits for the result then."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(ORPHANED_CODE)
