"""The optimizer step that all update rules share. The device itself decides whether to update the weights.

The results of the transfer check, the state guard and the finite check are combined into one number on the device,
without synchronisation. If this number is 1, no trained tensor changes. The host reads it later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lora_rocm.foundation.units import count_text
from lora_rocm.kernels.backend import implementation_for
from lora_rocm.optim.norm_limit import NormLimit
from lora_rocm.optim.registry import rule_of
from lora_rocm.optim.schedule import learning_rate_factor
from lora_rocm.optim.state_guard import StateGuard
from lora_rocm.optim.update_rule import ParameterGroup, Scalars, TrainedWeights, other_state, shown_weights, state_name
from lora_rocm.recipe.optim_sections import OptimSection

INITIAL_LOSS_SCALE = 2.0**16
LOSS_SCALE_GROWTH_INTERVAL = 2000
SCALARS = "step counts and loss scale"
AVERAGE_ITEMSIZE = 4
"""Bytes per weight of the average (EMA), which is always float32."""


@dataclass
class UpdateStats:
    """Statistics of an update: 0-d float32 tensors on the device."""

    grad_norm: Tensor
    nonfinite: Tensor
    loss_scale: Tensor  # the scale of these gradients
    logged: Mapping[str, Tensor] = field(default_factory=dict)  # see ``UpdateRule.logged``


class GatedOptimizer:
    """An update rule with clipping, loss scale (fp16) and EMA over flat weights.

    All tensors are written in place, and only if the update is not blocked. A step does not synchronise.

    Args:
        weights: all trained weights.
        groups: parameter groups. Each has "names" (neighbours in ``weights``) and "lr" (their peak learning rate). A
            group with "stops" is no longer trained after ``OptimSection.embedding_until``.
        section: the recipe's section, which names the update rule.
        max_train_steps: length of the schedule in updates.
        ema_decay: decay of the EMA; 0 for no EMA.
        use_loss_scale: whether to scale the loss, for fp16 training.
        triton: whether Triton kernels may be used.
        limit: limiter of the norm of each module's update, applied after each step; or None.

    Attributes:
        rule: the update rule with its state.
        ema: averaged weights by name, as views of one flat tensor; empty without EMA.
        state_guard: check that weights and optimizer state do not change between updates.
    """

    def __init__(
        self,
        weights: TrainedWeights,
        groups: Sequence[Mapping[str, Any]],
        section: OptimSection,
        *,
        max_train_steps: int,
        ema_decay: float,
        use_loss_scale: bool,
        triton: bool = False,
        limit: NormLimit | None = None,
    ) -> None:
        self.weights, self.section, self.max_train_steps, self.ema_decay = weights, section, max_train_steps, ema_decay
        device = weights.masters.device
        self._scalars = Scalars(device)
        self.loss_scale = self._scalars.add("loss_scale", INITIAL_LOSS_SCALE if use_loss_scale else 1.0)
        self.growth = self._scalars.add("growth")
        placed = [ParameterGroup(weights.slice_of(group["names"]), float(group["lr"])) for group in groups]
        self.rule = rule_of(section)(weights, placed, section, self._scalars)
        self._buffers = {name: weights.views(buffer_N) for name, buffer_N in self.rule.buffers.items()}
        self.use_loss_scale, self._limit = use_loss_scale, limit
        self._stops = [part.place for part, group in zip(placed, groups, strict=True) if group.get("stops")]
        self._until = section.embedding_until(max_train_steps)
        self._average_N = weights.masters.to(torch.float32, copy=True) if ema_decay else None
        self.ema = weights.views(self._average_N) if self._average_N is not None else {}
        guarded = {"weights": weights.masters, **self.rule.buffers, **self.rule.tables, SCALARS: self._scalars.flat_S}
        if weights.working is not weights.masters:
            guarded = {"weights in the layers": weights.working, **guarded}  # first: just written, still in the cache
        if self._average_N is not None:
            guarded["average of the weights (EMA)"] = self._average_N
        implementation = implementation_for(device, triton)
        self.state_guard = StateGuard(
            guarded, moving=[SCALARS] if use_loss_scale else [], implementation=implementation
        )

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The trained weights (masters), keyed by name."""
        return self.weights.parameters

    def learning_rate(self, updates: int) -> float:
        """Return the learning rate after ``updates`` updates, for the log.

        Text encoders have a multiple of this rate.
        """
        return self.section.learning_rate * learning_rate_factor(self.section, updates, self.max_train_steps)

    def step(self, updates: int, blocked: Tensor) -> UpdateStats:
        """Make one update from the gathered gradients, then drop the gradients. Return the update's statistics.

        Args:
            updates: number of confirmed updates so far, which determines the learning rate.
            blocked: whether to block the update: float32 0-d on the device, exactly 0 or 1. Must be 1 if
                ``state_guard`` has found a change.
        """
        with torch.no_grad():
            # The gate: a norm of inf or nan blocks the update, and the state guard reads the same tensor.
            stopped = self._stopped(updates)
            scale = self.loss_scale.clone() if self.use_loss_scale else self.loss_scale
            grad_norm = torch.linalg.vector_norm(self.weights.gradients) / scale
            nonfinite = (~torch.isfinite(grad_norm)).to(torch.float32)
            held = torch.maximum(blocked, nonfinite, out=self.state_guard.held)
            # One divisor for loss scale and clipping; 1e-6 as in PyTorch's ``clip_grad_norm_``.
            divisor = scale
            if self.section.max_grad_norm:
                divisor = scale * ((grad_norm + 1e-6) / self.section.max_grad_norm).clamp(min=1.0)
            # The update of the weights, and its limits.
            factor = learning_rate_factor(self.section, updates, self.max_train_steps)
            self.rule.step(factor, held, divisor)
            if self._limit is not None:
                self._limit.apply(held)
            for place, kept in stopped:
                self.weights.masters[place] = kept
            # Everything that follows from the new weights; the fingerprints last.
            self.weights.publish()
            self._average(updates, held)
            self._rescale(blocked, nonfinite)
            self.weights.drop_gradients()
            self.state_guard.renew()
        return UpdateStats(grad_norm, nonfinite, scale, self.rule.logged)

    def _stopped(self, updates: int) -> list[tuple[slice, Tensor]]:
        """Zero the gradients of weights that are no longer trained.

        Returns:
            (slice, values) of these weights, which must be restored after the update.
        """
        if self._until is None or updates < self._until:
            return []
        for place in self._stops:
            self.weights.gradients[place].zero_()
        return [(place, self.weights.masters[place].clone()) for place in self._stops]

    def _average(self, updates: int, held: Tensor) -> None:
        """Update the EMA unless ``held`` is 1. Its decay starts lower, as early weights are mostly initialisation."""
        if self._average_N is None:
            return
        decay = min(self.ema_decay, (1 + updates) / (10 + updates))
        self._average_N.add_((self.weights.masters - self._average_N).mul_((1.0 - decay) * (1.0 - held)))

    def _rescale(self, blocked: Tensor, nonfinite: Tensor) -> None:
        """Update the dynamic loss scale (arXiv 1710.03740).

        It is halved on overflow, doubled after LOSS_SCALE_GROWTH_INTERVAL updates without overflow, and kept if the
        update is blocked.
        """
        if not self.use_loss_scale:
            return
        growth = torch.where(nonfinite > 0, 0.0, self.growth + 1.0)
        grown = growth >= LOSS_SCALE_GROWTH_INTERVAL
        scale = torch.where(
            nonfinite > 0, self.loss_scale * 0.5, torch.where(grown, self.loss_scale * 2, self.loss_scale)
        )
        self.growth.copy_(torch.where(blocked > 0, self.growth, torch.where(grown, 0.0, growth)))
        self.loss_scale.copy_(torch.where(blocked > 0, self.loss_scale, scale))

    def shown(self) -> Mapping[str, Tensor]:
        """Return the weights that users get, by name: the averages, or ``parameters`` itself if there are none."""
        return shown_weights(type(self.rule), self.section, self.parameters, self.ema, self.state)

    def drop_gradients(self) -> None:
        self.weights.drop_gradients()

    def state(self) -> dict[str, Tensor]:
        """Return the live state tensors for checkpoints, keyed by name.

        They are the loss scale, the rule's scalars and tables, and each weight's part of the rule's buffers.
        """
        tensors = {**self._scalars.views, **self.rule.tables}
        for name in self.parameters:
            tensors |= {state_name(name, buffer): views[name] for buffer, views in self._buffers.items()}
        return tensors

    def load(self, tensors: Mapping[str, Tensor], ema: Mapping[str, Tensor] | None = None) -> None:
        """Load the tensors of ``state``, and the averages. They must already be on the device and verified.

        If there are no averages, they start at the current weights.

        Raises:
            ResumeError: "resume-optimizer-changed", the tensors are not the state of this update rule.
        """
        state = self.state()
        both = state.keys() & tensors.keys()
        if wrong := (state.keys() ^ tensors.keys()) | {x for x in both if state[x].shape != tensors[x].shape}:
            raise other_state(self.section, f"{count_text(len(wrong), 'tensor')}, such as {min(wrong)}")
        with torch.no_grad():
            for name, tensor in state.items():
                tensor.copy_(tensors[name])
            for name, average in self.ema.items():
                average.copy_(ema[name] if ema else self.parameters[name])
            self.state_guard.reset()
