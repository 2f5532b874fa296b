"""lora-rocm: a LoRA trainer that people with AMD GPUs can trust.

The names in ``__all__`` are the public Python API (docs/reference/python.md). They are imported on first use, so
``import lora_rocm`` costs nothing, and none of them imports torch.
"""

import time
from importlib import import_module
from typing import TYPE_CHECKING

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
    found: object = getattr(import_module("lora_rocm.api"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
