"""Memory of the GPU that spills: on Windows, and on GPUs that share main memory, a full one makes training slow.

There the driver moves tensors to main memory without a word, where a discrete card under Linux would fail with an
error. Sources: AMD radeon-ryzen docs, limitations of Ryzen AI Max; unsloth#8482.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from lora_rocm.errors import UserError
from lora_rocm.foundation.units import size_text
from lora_rocm.hardware.facts import HostFacts, facts_from_json
from lora_rocm.hardware.gpu_select import Selection, select
from lora_rocm.hardware.memory_budget import budget

WINDOW_STEPS = 10
SLOWER_TIMES = 3.0
FULL_SHARE = 0.9


def spill_bytes(facts: HostFacts, selection: Selection, device: str) -> int | None:
    """What tensors may take before the driver of this GPU spills; None where it does not, or nothing is known.

    ``device``: as in ``runtime.device``.
    """
    gpu = selection.gpu
    if gpu is None or device == "cpu" or not (gpu.integrated or facts.system == "windows"):
        return None
    found = budget(facts, gpu)
    return found.total_bytes if found is not None else None


def spilled(environment: Mapping[str, Any], device: str, events: Iterable[dict[str, Any]]) -> list[str]:
    """What ``Spilling`` says of a whole run, on the machine of its environment.json; nothing where that is damaged."""
    try:
        facts = facts_from_json(environment.get("machine"), "environment.json")
    except UserError:
        return []
    spilling = Spilling(spill_bytes(facts, select(facts, facts.variables), device))
    return [text for event in events if (text := spilling.on_event(event))]


class Spilling:
    """Looks at ``start``, ``change`` and ``step`` events; says once that training is slow because memory is full.

    A run that spills from its first steps on has no fast ones to compare with, and is not found.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes, self._said = limit_bytes, False
        self._recent, self._best_s = deque[float](maxlen=WINDOW_STEPS), float("inf")

    def on_event(self, event: dict[str, Any]) -> str:
        """A sentence for the user, or nothing. Waiting for the loader is no part of the time that counts."""
        if event["type"] in ("start", "change"):  # with other settings another speed is usual
            self._recent.clear()
            self._best_s = float("inf")
        if event["type"] != "step" or self._limit_bytes is None or self._said:
            return ""
        self._recent.append(event["step_s"] - event["loading_s"])
        if len(self._recent) < WINDOW_STEPS:
            return ""
        now_s = median(self._recent)
        slower = now_s > SLOWER_TIMES * self._best_s
        self._best_s = min(self._best_s, now_s)
        if not slower or event["memory_bytes"] < FULL_SHARE * self._limit_bytes:
            return ""
        self._said = True
        return (
            f"Since about step {event['updates'] - WINDOW_STEPS} training is more than {SLOWER_TIMES:g} times slower, "
            f"and the GPU's memory is full ({size_text(event['memory_bytes'])} of {size_text(self._limit_bytes)}): the "
            "driver moves tensors to main memory. Go on with train.gradient_checkpointing: true, or start a new run "
            "with a smaller train.batch_size and more train.gradient_accumulation_steps."
        )
