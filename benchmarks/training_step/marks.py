"""Times the parts of a step, by marks around them; on a GPU by the device's own clock."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

SEND, LOSS, STEP = "send", "loss", "step"
PARTS = {
    (f"{LOSS} begins", f"{LOSS} ends"): "forward",
    (f"{LOSS} ends", f"{SEND} begins"): "backward",
    (f"{LOSS} ends", f"{STEP} begins"): "backward",
    (f"{SEND} ends", f"{SEND} begins"): "forward and backward in one graph",
    (f"{SEND} ends", f"{STEP} begins"): "forward and backward in one graph",
    (f"{STEP} begins", f"{STEP} ends"): "optimizer",
}
"""Part between two consecutive marks. A replayed graph does not call our code, so it has no marks inside."""


class Marks:
    """Marks on the step's stream (on a CPU: on the host's clock)."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def put(self, name: str) -> None:
        """Add a mark now; does nothing while a graph is being captured."""
        if not self._on_gpu:
            self._marks.append((name, time.perf_counter()))
        elif not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((name, event))

    @contextmanager
    def around(self, owner: object, method: str, name: str) -> Iterator[None]:
        """Add marks before and after each call of a method of this one object."""
        inner = getattr(owner, method)

        def marked(*args: Any, **kwargs: Any) -> Any:
            self.put(f"{name} begins")
            found = inner(*args, **kwargs)
            self.put(f"{name} ends")
            return found

        with replaced(owner, method, marked):
            yield

    def seconds(self) -> dict[str, float]:
        """Return the total seconds of each part, after waiting for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()
        return sums([(name, self._at(mark)) for name, mark in self._marks])

    def _at(self, mark: Any) -> float:
        first = self._marks[0][1]
        return float(first.elapsed_time(mark) / 1e3 if self._on_gpu else mark)


def sums(marks: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Return the total seconds of each part, from marks in order, each with its time in seconds."""
    found: dict[str, float] = defaultdict(float)
    for (before, begin), (after, end) in pairwise(marks):
        if (before, after) in PARTS:
            found[PARTS[before, after]] += end - begin
    return dict(found)


@contextmanager
def replaced(owner: object, method: str, by: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of this one object inside the context."""
    before = owner.__dict__.get(method)
    setattr(owner, method, by)
    try:
        yield
    finally:
        delattr(owner, method)
        if before is not None:
            setattr(owner, method, before)
