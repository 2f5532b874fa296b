"""The examined machine, as ``lora-rocm doctor --quick`` finds it. It never asks a GPU to compute, nor loads HIP."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lora_rocm.commands.doctor import DoctorResult, Examined
    from lora_rocm.doctor.finding import Finding

FRESH_S = 60.0
"""Age up to which findings are shown again, so that pages after one another examine the machine once."""


@dataclass(frozen=True)
class ExaminedMachine:
    """An examined machine.

    Attributes:
        result: the document of ``lora-rocm doctor``.
        remark: what training without an AMD GPU means; empty if one is used.
        sizes: amounts of memory and disk in bytes, with the key of the text that names each (``machine.size.KEY``).
    """

    result: DoctorResult
    remark: str
    sizes: tuple[tuple[str, int], ...]

    @property
    def worst(self) -> Finding | None:
        """The most harmful finding; None if there are only notes."""
        return None if self.result.healthy else self.result.findings[0]


@dataclass
class _Kept:
    found: ExaminedMachine | None = None
    at_s: float = 0.0


_kept, _lock = _Kept(), threading.Lock()


def examined(*, afresh: bool = False) -> ExaminedMachine:
    """Return what ``doctor`` finds on this machine without the self-test.

    Args:
        afresh: whether to examine the machine now, even if it was examined within FRESH_S.

    Raises:
        LoraRocmError: the machine cannot be examined.
    """
    from lora_rocm.commands.doctor import doctor

    with _lock:
        if _kept.found is None or afresh or time.monotonic() - _kept.at_s > FRESH_S:
            found = doctor(quick=True)
            _kept.found, _kept.at_s = _examined(found), time.monotonic()
        return _kept.found


def _examined(found: Examined) -> ExaminedMachine:
    from lora_rocm.commands.doctor import result_of
    from lora_rocm.doctor.text import second_class_text

    return ExaminedMachine(result_of(found), second_class_text(found.situation), _sizes(found))


def _sizes(found: Examined) -> tuple[tuple[str, int], ...]:
    facts, gpu = found.situation.facts, found.situation.gpu
    shared = gpu is not None and gpu.integrated is True
    gpu_bytes = None if gpu is None else gpu.vram_bytes
    if shared and gpu is not None and gpu.gtt_bytes:
        gpu_bytes = max(gpu_bytes or 0, gpu.gtt_bytes)
    sizes = {
        "shared" if shared else "gpu": gpu_bytes,
        "main": facts.memory_bytes,
        "disk": facts.disk_free_bytes,
    }
    return tuple((key, num_bytes) for key, num_bytes in sizes.items() if num_bytes)
