"""Decides when readings cause a warning: the GPU is hot or slowed down, or its data spills to main memory.

A state begins after STEADY consecutive readings that show it, and ends after STEADY consecutive readings without it.
Each time it begins, there is a warning.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from lora_rocm.foundation.units import size_text
from lora_rocm.rundir.event_types import AlarmEvent, TelemetryEvent

STEADY = 3
MAX_EACH = 20
"""Maximum number of warnings of one kind about a GPU in one command."""
HOT_MARGIN_C, COOL_MARGIN_C = 3.0, 10.0
"""Degrees below a sensor's critical temperature at which the GPU counts as hot, and at which it counts as cool."""
MOVED_BYTES = 256 << 20
"""Bytes that the driver may move to main memory without a warning. It moves some for a moment when other programs
request memory.
"""
GROWN_BYTES, GROWN_SHARE, FULL_SHARE = 1 << 30, 0.05, 0.9
"""Limits for a warning about shared memory: its growth in bytes, its growth as a share of the card's memory, and the
used share of the card's memory. All must be reached. Growth is measured from the start of training, when shared memory
is as large as pinned buffers need.
"""
SPILL_TIMES_SLOWER = 17
"""Measured slowdown of attention after its tensors spilled to main memory.

Attention of 16,000 tokens on an RX 6800 under Windows took 3,226 ms in place of 187.
"""
WHAT_TO_DO = (
    "Close other programs that use this GPU. Or stop the run and continue with train.gradient_checkpointing: true or "
    "runtime.memory: offload. Or start a new run with a smaller train.batch_size (and more "
    "train.gradient_accumulation_steps) or data.resolution."
)


class Alarms:
    """Watches the readings of one GPU. ``spills`` is explained at ``cards.Cards``."""

    def __init__(self, spills: Literal["moved", "shared", ""]) -> None:
        self._spills = spills
        self._steady, self._over, self._given = Counter[str](), Counter[str](), Counter[str]()
        self._on = set[str]()
        self._before_bytes: float | None = None
        self._training = False

    def on_start(self) -> None:
        """Reset the memory state for a new worker, which uses its memory independently of the previous worker."""
        self._before_bytes, self._training = None, False
        self._end("spilling")

    def on_step(self) -> None:
        """Record that the worker has made an update, so that it is training."""
        self._training = True

    def on_reading(self, reading: TelemetryEvent) -> list[AlarmEvent]:
        """Return the warnings caused by this reading."""
        if reading.asleep:
            return []
        judged = {"hot": self._hot(reading), "slowed": self._slowed(reading), "spilling": self._spilling(reading)}
        found = []
        for kind, (is_so, is_over, text) in judged.items():
            self._steady[kind] = self._steady[kind] + 1 if is_so else 0
            self._over[kind] = self._over[kind] + 1 if is_over else 0
            if self._over[kind] >= STEADY:
                self._end(kind)
            if self._steady[kind] >= STEADY and kind not in self._on and self._given[kind] < MAX_EACH:
                self._on.add(kind)
                self._given[kind] += 1
                text += " This warning is not repeated." if self._given[kind] == MAX_EACH else ""
                found.append(AlarmEvent(kind=kind, gpu=reading.gpu, updates=reading.updates, text=text))
        if not self._training or self._before_bytes is None:
            self._before_bytes = reading.own_main_bytes
        return found

    def _end(self, kind: str) -> None:
        self._on.discard(kind)
        self._steady[kind] = 0

    def _hot(self, reading: TelemetryEvent) -> tuple[bool, bool, str]:
        """Return whether the GPU is hot, whether it is cool again, and the warning.

        Only the temperature is known, not whether the card lowers its clocks.
        """
        limits = {sensor: limit for sensor, limit in reading.limits_c.items() if sensor in reading.temperatures_c}
        near = [(limit - reading.temperatures_c[sensor], sensor) for sensor, limit in limits.items()]
        if not near:
            return False, False, ""
        room_c, sensor = min(near)
        text = (
            f"The GPU {reading.gpu} is hot: its sensor {sensor} reads {reading.temperatures_c[sensor]:.0f} °C, and "
            f"{reading.limits_c[sensor]:.0f} °C is critical. Such a hot card may lower its clocks, or switch itself "
            "off. Check its fans and the airflow in the case, or lower its power limit."
        )
        return room_c <= HOT_MARGIN_C, room_c >= COOL_MARGIN_C, text

    def _slowed(self, reading: TelemetryEvent) -> tuple[bool, bool, str]:
        text = (
            f"The driver has lowered the clocks of the GPU {reading.gpu}: {', '.join(reading.slowed_by)}. Training is "
            "slower. Check its fans, the airflow in the case and the power supply."
        )
        return bool(reading.slowed_by), not reading.slowed_by, text

    def _spilling(self, reading: TelemetryEvent) -> tuple[bool, bool, str]:
        moved_bytes = self._spilled_bytes(reading)
        if moved_bytes is None:
            return False, False, ""
        used, total = reading.memory_bytes, reading.memory_total_bytes
        full = f" ({size_text(used)} of {size_text(total)} are used)" if used is not None and total else ""
        text = (
            f"GPU memory spills: {size_text(moved_bytes)} of this run's data are in main memory, and not on the GPU "
            f"{reading.gpu}{full}. They are used far more slowly there ({SPILL_TIMES_SLOWER} times was measured once). "
            f"{WHAT_TO_DO}"
        )
        return moved_bytes > 0, moved_bytes == 0, text

    def _spilled_bytes(self, reading: TelemetryEvent) -> float | None:
        """Return the bytes that do not fit on the card; 0 if all fit, or None if unknown."""
        if not self._training or not self._spills:
            return None
        if reading.moved_bytes is not None:
            return reading.moved_bytes if reading.moved_bytes >= MOVED_BYTES else 0.0
        now, before, total = reading.own_main_bytes, self._before_bytes, reading.memory_total_bytes
        if now is None or before is None or not total or reading.memory_bytes is None:
            return None
        grown = now - before
        enough = grown >= GROWN_BYTES and grown >= GROWN_SHARE * total
        return grown if enough and reading.memory_bytes >= FULL_SHARE * total else 0.0
