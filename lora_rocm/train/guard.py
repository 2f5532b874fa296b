"""What has to hold before anything is written: kernels right, the base unchanged, every weight and moment finite."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lora_rocm.device.canary import Canary
from lora_rocm.errors import NonFiniteError
from lora_rocm.train.optim import GatedAdamW

NAMED = 3  # how many tensors an error names


@dataclass
class Guard:
    """Looks at kernels and state, and raises before a file could be made of them."""

    canary: Canary
    optimizer: GatedAdamW
    emit: Callable[..., Any]
    _sound_at: int | None = field(default=None, init=False)  # updates when the canary last passed

    def check_kernels(self, updates: int) -> None:
        """Let the canary look, unless it has passed and no update was made since.

        Raises:
            CanaryError: kernels give wrong answers, or the base's weights have changed.
        """
        if updates == self._sound_at:
            return
        started = time.perf_counter()
        failure = self.canary.failure()
        self.emit(
            "canary",
            updates=updates,
            passed=failure is None,
            checks=self.canary.checks,
            detail=failure.where if failure else "",
            seconds=round(time.perf_counter() - started, 6),
        )
        if failure:
            raise failure
        self._sound_at = updates

    def check_all(self, updates: int) -> None:
        """Kernels, and then that the state is finite, with one wait for all of it.

        Raises:
            CanaryError: see ``check_kernels``.
            NonFiniteError: a weight, its average or a moment is not finite.
        """
        self.check_kernels(updates)
        optimizer = self.optimizer
        parts = {"weight": optimizer.parameters, "average of": optimizer.ema, "moment": optimizer.state()}
        tensors = {f"{part} {name}": tensor for part, found in parts.items() for name, tensor in found.items()}
        finite_K = torch.stack([tensor.detach().isfinite().all() for tensor in tensors.values()])
        bad = [name for name, finite in zip(tensors, finite_K.tolist(), strict=True) if not finite]
        if bad:
            raise NonFiniteError(
                "state-nonfinite",
                f"{len(bad)} of {len(tensors)} tensors of the trained state are not finite, so nothing was written; "
                "the checkpoint before stays valid.",
                where=f"after {updates} updates: {', '.join(bad[:NAMED])}",
                fix="Run lora-rocm doctor, then the same command with --resume latest, which goes on from there. "
                "If it comes again, lower optim.learning_rate and add --accept-changes.",
            )
