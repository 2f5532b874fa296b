"""lora-rocm: a LoRA trainer that people with AMD GPUs can trust.

The names in ``__all__`` are the public Python API (docs/reference/python.md). They are imported on first use, so
``import lora_rocm`` costs nothing, and none of them imports torch. This module imports nothing that is not built in:
Ctrl+C would show a traceback there, because the program is not in control yet (``entry.py``).
"""

import time

TYPE_CHECKING = False  # as in typing, which takes most of the time until ``entry.main``
if TYPE_CHECKING:
    from lora_rocm.api import (
        CheckResult,
        LoadedRecipe,
        LoraRocmError,
        LossChart,
        PlanResult,
        RunHandle,
        RunResult,
        RunView,
        StepEvent,
        check,
        load_recipe,
        plan,
        start_run,
    )

__version__ = "0.2.0"
__all__ = [
    "CheckResult",
    "LoadedRecipe",
    "LoraRocmError",
    "LossChart",
    "PlanResult",
    "RunHandle",
    "RunResult",
    "RunView",
    "StepEvent",
    "check",
    "load_recipe",
    "plan",
    "start_run",
]
BEGAN_S = time.time()
"""The first instruction of this program in this process, in seconds since the epoch."""


def __getattr__(name: str) -> object:
    """Import a name of the public API when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found: object = getattr(import_module("lora_rocm.api"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
