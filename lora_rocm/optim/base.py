"""The optimizer step that all update rules share: gated on the device, without waiting for the host.

The verdict of the transfer check, of the state guard and of the finite check is a number on the device. If it is 1,
then nothing that is trained moves; the host reads it late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lora_rocm.errors import ResumeError
from lora_rocm.kernels.choice import form_for
from lora_rocm.optim.rule import Group, Scalars, TrainedWeights, UpdateRule
from lora_rocm.optim.schedule import learning_rate_factor
from lora_rocm.optim.state_guard import StateGuard
from lora_rocm.recipe.schema import OptimSection

INITIAL_LOSS_SCALE = 2.0**16
LOSS_SCALE_GROWTH_INTERVAL = 2000
SCALARS = "step counts and loss scale"
AVERAGE_ITEMSIZE = 4
"""Bytes for each weight of the average (EMA): float32, whatever the weights are."""


@dataclass
class UpdateStats:
    """What an update says about itself: 0-d tensors on the device, float32."""

    grad_norm: Tensor
    nonfinite: Tensor
    loss_scale: Tensor  # that the gradients were made with
    logged: Mapping[str, Tensor] = field(default_factory=dict)  # see ``UpdateRule.logged``


class GatedOptimizer:
    """An update rule with clipping, loss scale (fp16) and EMA over flat weights; all writes are gated and in place.

    A step waits for nothing.

    Args:
        rule: how weights follow from gradients.
        weights: all trained weights.
        groups: "names" of neighbours in ``weights`` and "lr", their peak learning rate.
        section: the recipe's section of this rule.
        ema_decay: 0 for none.
        use_loss_scale: fp16 training.
        triton: Triton kernels may be used.

    Attributes:
        rule: the update rule with its state.
        ema: name -> its average, a view of one flat tensor; empty if none is kept.
        state_guard: looks whether all of this, and the weights, stay as an update has left them.
    """

    def __init__(
        self,
        rule: type[UpdateRule],
        weights: TrainedWeights,
        groups: Sequence[Mapping[str, Any]],
        section: OptimSection,
        *,
        max_train_steps: int,
        ema_decay: float,
        use_loss_scale: bool,
        triton: bool = False,
    ) -> None:
        self.weights, self.section, self.max_train_steps, self.ema_decay = weights, section, max_train_steps, ema_decay
        device = weights.masters.device
        self._scalars = Scalars(device)
        self.loss_scale = self._scalars.add("loss_scale", INITIAL_LOSS_SCALE if use_loss_scale else 1.0)
        self.growth = self._scalars.add("growth")
        placed = [Group(weights.slice_of(group["names"]), float(group["lr"])) for group in groups]
        self.rule = rule(weights, placed, section, self._scalars)
        self._buffers = {name: weights.views(buffer_N) for name, buffer_N in self.rule.buffers.items()}
        self.use_loss_scale = use_loss_scale
        self._average_N = weights.masters.to(torch.float32, copy=True) if ema_decay else None
        self.ema = weights.views(self._average_N) if self._average_N is not None else {}
        guarded = {"weights": weights.masters, **self.rule.buffers, SCALARS: self._scalars.flat_S}
        if weights.working is not weights.masters:
            guarded = {"weights in the layers": weights.working, **guarded}  # first: just written, so in the cache
        if self._average_N is not None:
            guarded["average of the weights (EMA)"] = self._average_N
        form = form_for(device, triton)
        self.state_guard = StateGuard(guarded, moving=[SCALARS] if use_loss_scale else [], form=form)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Name -> trained weight (the master)."""
        return self.weights.parameters

    @property
    def logged_names(self) -> tuple[str, ...]:
        """What ``UpdateStats.logged`` holds."""
        return tuple(self.rule.logged)

    def learning_rate(self, updates: int) -> float:
        """The recipe's learning rate at this point, for the log (the text encoders' own is its multiple)."""
        return self.section.learning_rate * learning_rate_factor(self.section, updates, self.max_train_steps)

    def step(self, updates: int, blocked: Tensor) -> UpdateStats:
        """One update from the gathered gradients; they are zero afterwards.

        Args:
            updates: updates made so far (confirmed); decides the learning rate.
            blocked: float32 0-d, exactly 0 or 1, on the device; has to be 1 where ``state_guard`` has found a change.
        """
        with torch.no_grad():
            scale = self.loss_scale.clone() if self.use_loss_scale else self.loss_scale
            grad_norm = torch.linalg.vector_norm(self.weights.gradients) / scale
            nonfinite = (~torch.isfinite(grad_norm)).to(torch.float32)
            held = torch.maximum(blocked, nonfinite, out=self.state_guard.held)
            divisor = scale
            if self.section.max_grad_norm:
                divisor = scale * ((grad_norm + 1e-6) / self.section.max_grad_norm).clamp(min=1.0)
            factor = learning_rate_factor(self.section, updates, self.max_train_steps)
            self.rule.step(factor, held, divisor)
            self.weights.publish()
            self._average(updates, held)
            self._rescale(blocked, nonfinite)
            self.weights.drop_gradients()
            self.state_guard.renew()
        return UpdateStats(grad_norm, nonfinite, scale, self.rule.logged)

    def _average(self, updates: int, held: Tensor) -> None:
        """EMA with a short warm-up of the decay (early weights are mostly initialisation)."""
        if self._average_N is None:
            return
        decay = min(self.ema_decay, (1 + updates) / (10 + updates))
        self._average_N.add_((self.weights.masters - self._average_N).mul_((1.0 - decay) * (1.0 - held)))

    def _rescale(self, blocked: Tensor, nonfinite: Tensor) -> None:
        """Dynamic loss scale (arXiv 1710.03740): halved on overflow, doubled after a clean run; held if blocked."""
        if not self.use_loss_scale:
            return
        growth = torch.where(nonfinite > 0, 0.0, self.growth + 1.0)
        grown = growth >= LOSS_SCALE_GROWTH_INTERVAL
        scale = torch.where(
            nonfinite > 0, self.loss_scale * 0.5, torch.where(grown, self.loss_scale * 2, self.loss_scale)
        )
        self.growth.copy_(torch.where(blocked > 0, self.growth, torch.where(grown, 0.0, growth)))
        self.loss_scale.copy_(torch.where(blocked > 0, self.loss_scale, scale))

    def drop_gradients(self) -> None:
        self.weights.drop_gradients()

    def state(self) -> dict[str, Tensor]:
        """Loss scale and numbers of the rule, and its buffers by parameter name: the live tensors, on the device."""
        tensors = dict(self._scalars.views)
        for name in self.parameters:
            tensors |= {f"{name}.{buffer}": views[name] for buffer, views in self._buffers.items()}
        return tensors

    def load(self, tensors: Mapping[str, Tensor], ema: Mapping[str, Tensor] | None = None) -> None:
        """Take over what ``state`` gave, and averages; all are on the device already, checked.

        A run that keeps an average for the first time starts it at the weights as they are.

        Raises:
            ResumeError: "resume-optimizer-changed", the tensors are not the state of this update rule.
        """
        state = self.state()
        if wrong := state.keys() ^ tensors.keys():
            raise ResumeError(
                "resume-optimizer-changed",
                f"The checkpoint does not hold the state of optim.optimizer: {self.section.optimizer}.",
                where=f"{len(wrong)} tensors, such as {min(wrong)}",
                fix="Set optim.optimizer to what the run was started with, or start a new run.",
            )
        with torch.no_grad():
            for name, tensor in state.items():
                tensor.copy_(tensors[name])
            for name, average in self.ema.items():
                average.copy_(ema[name] if ema else self.parameters[name])
            self.state_guard.reset()
