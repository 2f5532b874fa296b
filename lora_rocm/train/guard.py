"""Checks before a file is written: kernels are correct, and the base and the trained state are intact and finite."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from lora_rocm.checks.canary import ENTRIES_ARE_LOST, Canary
from lora_rocm.checks.graph_check import Capture
from lora_rocm.checks.selftest_base import WrongAnswerError
from lora_rocm.device.allocator import afterwards
from lora_rocm.device.placement.base import Placement, Resident
from lora_rocm.device.torch_errors import machine_error
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.errors import NonFiniteError, resume_advice
from lora_rocm.optim.base import GatedOptimizer
from lora_rocm.rundir.event_types import CanaryEvent
from lora_rocm.rundir.run_context import RunContext

NAMED = 3  # tensors that an error names
ENCODERS = "encoders' weights"


def check_kernels(canary: Canary, updates: int, context: RunContext) -> None:
    """Run the canary once, and emit a ``canary`` event with its result.

    Raises:
        CanaryError: kernels give wrong results, or frozen weights have changed.
    """
    started = time.perf_counter()
    failure = canary.failure()
    context.emit(
        CanaryEvent(
            updates=updates,
            passed=failure is None,
            checks=canary.checks,
            detail=failure.where if failure else "",
            seconds=round(time.perf_counter() - started, 6),
        )
    )
    if failure:
        raise failure


@dataclass
class CacheGuard:
    """Checks kernels (in float32, the encoders' dtype) and the encoders' weights while caches are filled.

    Attributes:
        rank: the rank of the recipe's LoRA.
        updates: number of updates made before this start.
    """

    rank: int
    updates: int
    context: RunContext
    _canaries: dict[torch.device, Canary] = field(default_factory=dict, init=False)

    def __call__(self, placement: Placement) -> None:
        """Check the device of this placement, and the weights placed there.

        Raises:
            CanaryError: see ``check_kernels``.
        """
        device = placement.transfer.device
        if device not in self._canaries:  # one canary for all checks: each check expects other results
            self._canaries[device] = Canary(device, torch.float32, self.rank, placement, ENCODERS, ENTRIES_ARE_LOST)
        canary = self._canaries[device]
        canary.placement = placement

        def let_go() -> None:
            canary.placement = Resident(DeviceTransfer(device, pin=False))  # so that the encoders can be freed

        with afterwards(let_go):
            check_kernels(canary, self.updates, self.context)


@dataclass
class Guard:
    """Checks kernels and trained state, and raises an error before wrong results are written to a file."""

    canary: Canary
    optimizer: GatedOptimizer
    context: RunContext
    _sound_at: int | None = field(default=None, init=False)  # updates when the canary last passed

    def check_kernels(self, updates: int) -> None:
        """Run the canary, unless it has passed since the last update.

        Raises:
            CanaryError: kernels give wrong results, or the base model's weights have changed.
        """
        if updates == self._sound_at:
            return
        check_kernels(self.canary, updates, self.context)
        self._sound_at = updates

    def use_graphs(self, capture: Capture | None) -> None:
        """Capture the checks of base and trained state as graphs. Without ``capture``, they launch kernels one by one.

        Raises:
            CanaryError: "canary-graph", a captured check gives wrong results.
        """
        self.canary.capture = capture
        try:
            self.optimizer.state_guard.use_graphs(capture)
        except (WrongAnswerError, RuntimeError) as error:
            if machine_error(error) is not None:
                raise
            raise self.canary.graph_failure(error) from error

    def check_state(self, updates: int) -> None:
        """Compare weights and optimizer state with their fingerprints from the last update; waits for the device.

        Call it again after the state has been read for a checkpoint, to be sure that it did not change during the read.

        Raises:
            StateError: the weights or the optimizer state have changed.
        """
        self.optimizer.state_guard.check()
        failure = self.optimizer.state_guard.failure(updates)
        if failure:
            raise failure

    def check_all(self, updates: int) -> None:
        """Check the kernels, then check that the trained state is unchanged and finite.

        Raises:
            CanaryError: see ``check_kernels``.
            StateError: see ``check_state``.
            NonFiniteError: a weight, its moving average or the optimizer state is not finite.
        """
        self.check_kernels(updates)
        self.check_state(updates)
        optimizer = self.optimizer
        parts = {"weight": optimizer.parameters, "average of": optimizer.ema, "optimizer state": optimizer.state()}
        tensors = {f"{part} {name}": tensor for part, found in parts.items() for name, tensor in found.items()}
        finite_K = torch.stack([tensor.detach().isfinite().all() for tensor in tensors.values()])
        # One transfer, and so one wait, for the flags of all tensors
        bad = [name for name, finite in zip(tensors, finite_K.tolist(), strict=True) if not finite]
        if bad:
            raise NonFiniteError(
                "state-nonfinite",
                f"{len(bad)} of {len(tensors)} tensors of the trained state are not finite, so nothing was written; "
                "the previous checkpoint stays valid.",
                where=f"after {updates} updates: {', '.join(bad[:NAMED])}",
                **resume_advice(
                    "Run lora-rocm doctor, then the same command with --resume latest, to continue from there. "
                    "If this happens again, lower optim.learning_rate and add --accept-changes."
                ),
            )
