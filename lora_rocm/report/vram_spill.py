"""Detects GPU memory that spills into main memory, which makes training slow on Windows and on APUs.

On these, the driver silently moves tensors to main memory; a discrete GPU on Linux raises an error instead. Sources:
AMD radeon-ryzen docs, limitations of Ryzen AI Max; unsloth#8482.
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
from lora_rocm.rules.memory_rules import budget_of
from lora_rocm.rundir.event_types import ChangeEvent, Event, StartEvent, StepEvent

WINDOW_STEPS = 10
SLOWER_TIMES = 3.0
FULL_SHARE = 0.9


def spill_bytes(facts: HostFacts, selection: Selection, device: str) -> int | None:
    """Bytes of tensors above which this GPU's driver spills; None if it does not spill, or if the limit is unknown.

    ``device``: value of ``runtime.device``.
    """
    gpu = selection.gpu
    if gpu is None or device == "cpu" or not (gpu.integrated or facts.system == "windows"):
        return None
    found = budget_of(facts, gpu)
    return found.total_bytes if found is not None else None


def spilled(environment: Mapping[str, Any], device: str, events: Iterable[Event]) -> list[str]:
    """The messages of ``Spilling`` for all events of a run.

    ``environment``: content of the run's environment.json, which describes its machine. If it is damaged, there are no
    messages.
    """
    try:
        facts = facts_from_json(environment.get("machine"), "environment.json")
    except UserError:
        return []
    spilling = Spilling(spill_bytes(facts, select(facts, facts.variables), device))
    return [text for event in events if (text := spilling.on_event(event))]


class Spilling:
    """Watches ``start``, ``change`` and ``step`` events, and reports once if full memory makes training slow.

    A run that spills from its first step on has no fast steps to compare with, so this is not detected.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes, self._said = limit_bytes, False
        self._recent, self._best_s = deque[float](maxlen=WINDOW_STEPS), float("inf")

    def on_event(self, event: Event) -> str:
        """Return a message for the user, or an empty string. The time spent waiting for the loader is ignored."""
        if isinstance(event, StartEvent | ChangeEvent):  # new settings change the usual speed
            self._recent.clear()
            self._best_s = float("inf")
        if not isinstance(event, StepEvent) or self._limit_bytes is None or self._said:
            return ""
        self._recent.append(event.step_s - event.loading_s)
        if len(self._recent) < WINDOW_STEPS:
            return ""
        now_s = median(self._recent)
        slower = now_s > SLOWER_TIMES * self._best_s
        self._best_s = min(self._best_s, now_s)
        if not slower or event.memory_bytes < FULL_SHARE * self._limit_bytes:
            return ""
        self._said = True
        return (
            f"Since about step {event.updates - WINDOW_STEPS} training is more than {SLOWER_TIMES:g} times slower, "
            f"and the GPU's memory is full ({size_text(event.memory_bytes)} of {size_text(self._limit_bytes)}): the "
            "driver moves tensors to main memory. Continue with train.gradient_checkpointing: true, or start a new run "
            "with a smaller train.batch_size and more train.gradient_accumulation_steps."
        )
