"""The examined machine, as ``lora-rocm doctor --quick`` finds it. It never asks a GPU to compute, nor loads HIP."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lora_rocm.commands.doctor import DoctorResult

FRESH_S = 60.0
"""Age up to which findings are shown again, so that pages after one another examine the machine once."""


@dataclass
class _Kept:
    found: DoctorResult | None = None
    at_s: float = 0.0


_kept, _lock = _Kept(), threading.Lock()


def examined(*, afresh: bool = False) -> DoctorResult:
    """Return what ``doctor`` finds on this machine without the self-test.

    Args:
        afresh: whether to examine the machine now, even if it was examined within FRESH_S.

    Raises:
        LoraRocmError: the machine cannot be examined.
    """
    from lora_rocm.commands.doctor import doctor, result_of

    with _lock:
        if _kept.found is None or afresh or time.monotonic() - _kept.at_s > FRESH_S:
            _kept.found, _kept.at_s = result_of(doctor(quick=True)), time.monotonic()
        return _kept.found
