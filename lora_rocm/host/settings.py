"""Settings of the heavy half that no variable of torch or HIP carries: they travel in one variable of our own.

A child reads them once at its start (``device.precision``); the parent plans them beside the variables.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

VARIABLE = "LORA_ROCM_SETTINGS"


@dataclass(frozen=True)
class Settings:
    """What the plan decided about code. The defaults are those of a machine about which nothing is known to be bad."""

    miopen: bool = True
    """False: torch.backends.cudnn.enabled = False, so that convolutions do not go through MIOpen."""
    attention: Literal["auto", "math"] = "auto"
    """math: fused attention is switched off (it failed the self-test)."""
    pin_memory: bool = True
    """What runtime.pin_memory: auto means on a GPU."""
    precision: Literal["bf16", "fp16", "no"] | None = None
    """What train.mixed_precision: auto means on the GPU; None: the heavy half asks torch."""
    heap_copy: bool = False
    """Tensors of memory-mapped files are copied to the heap before they go to the device."""
    memory_limit_bytes: int | None = None
    """The allocator raises at this size, instead of a desktop that freezes or a driver that swaps."""

    def to_text(self) -> str:
        """One line; only what differs from the defaults, so that it can be read."""
        return json.dumps({key: value for key, value in asdict(self).items() if value != asdict(Settings())[key]})


def settings_from(environ: Mapping[str, str]) -> Settings:
    """The settings that the parent planned; the defaults where there is no parent.

    Raises:
        ValueError, TypeError: the variable is not what the parent writes.
    """
    return Settings(**json.loads(environ.get(VARIABLE) or "{}"))
