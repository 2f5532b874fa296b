"""The optimizer step: gated on the device, without waiting for the host.

AdamW (Loshchilov and Hutter, arXiv 1711.05101), PyTorch's fused kernel. The fused kernel takes a ``found_inf`` tensor:
when it is 1, neither a parameter nor a moment nor the step count moves. That is where the verdict of the transfer check
and of the finite check goes in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lora_rocm.adapters.flat_params import FlatWeights
from lora_rocm.kernels.choice import form_for
from lora_rocm.recipe.schema import OptimSection
from lora_rocm.train.state_guard import StateGuard

INITIAL_LOSS_SCALE = 2.0**16
LOSS_SCALE_GROWTH_INTERVAL = 2000
MOMENTS = ("exp_avg", "exp_avg_sq")
NUMBERS = "step counts and loss scale"
NUMBERS_MULTIPLE = 16
"""Of the room for these: so that fingerprints read it as they read the rest."""


def learning_rate_factor(optim: OptimSection, updates: int, max_train_steps: int) -> float:
    """Share of the peak learning rate for the update after ``updates`` ones: a pure function, so a resume is exact."""
    warmup = optim.lr_warmup_steps
    if updates < warmup:
        return (updates + 1) / (warmup + 1)
    progress = (updates - warmup) / max(1, max_train_steps - warmup)
    if optim.lr_scheduler == "linear":
        return max(0.0, 1.0 - progress)
    if optim.lr_scheduler == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return 1.0


@dataclass
class UpdateStats:
    """What an update says about itself: 0-d tensors on the device, float32."""

    grad_norm: Tensor
    nonfinite: Tensor
    loss_scale: Tensor  # that the gradients were made with


class GatedAdamW:
    """AdamW with clipping, loss scale (fp16) and EMA over flat weights; every write is gated and made in place.

    A step waits for nothing. Gradients are neither unscaled nor clipped in a pass of their own: the fused kernel
    divides by one number for both.

    Args:
        weights: all trained weights.
        groups: "names" of neighbours in ``weights`` and "lr", their peak learning rate.
        optim: the recipe's section.
        ema_decay: 0 for none.
        use_loss_scale: fp16 training.
        triton: Triton kernels may be used.

    Attributes:
        ema: name -> its average, a view of one flat tensor; empty where none is kept.
        state_guard: looks whether all of this, and the weights, stay as an update has left them.
    """

    def __init__(
        self,
        weights: FlatWeights,
        groups: list[dict[str, Any]],
        optim: OptimSection,
        *,
        max_train_steps: int,
        ema_decay: float,
        use_loss_scale: bool,
        triton: bool = False,
    ) -> None:
        self.weights, self.optim, self.max_train_steps, self.ema_decay = weights, optim, max_train_steps, ema_decay
        self.peak_rates = [float(group["lr"]) for group in groups]
        self._slices = [weights.slice_of(group["names"]) for group in groups]
        self._parts = [nn.Parameter(weights.masters[place]) for place in self._slices]
        self.optimizer = torch.optim.AdamW(
            [{"params": [part]} for part in self._parts],
            betas=optim.betas,
            eps=optim.epsilon,
            weight_decay=optim.weight_decay,
            fused=True,
        )
        device = weights.masters.device
        moments = {name: torch.zeros_like(weights.masters) for name in MOMENTS}
        self._moments = {name: weights.views(moment) for name, moment in moments.items()}
        numbers_S = torch.zeros(NUMBERS_MULTIPLE * (2 + len(groups)), device=device)
        self.loss_scale, self.growth = numbers_S[0].fill_(INITIAL_LOSS_SCALE if use_loss_scale else 1.0), numbers_S[1]
        for number, (part, place) in enumerate(zip(self._parts, self._slices, strict=True)):
            # made here: memory must not run out within an update
            self.optimizer.state[part] = {"step": numbers_S[2 + number]} | {
                name: moment[place] for name, moment in moments.items()
            }
        self.use_loss_scale = use_loss_scale
        self._average_N = weights.masters.to(torch.float32, copy=True) if ema_decay else None
        self.ema = weights.views(self._average_N) if self._average_N is not None else {}
        guarded = {"weights": weights.masters, **moments, NUMBERS: numbers_S}
        if weights.working is not weights.masters:
            guarded = {"weights in the layers": weights.working, **guarded}  # first: just written, so in the cache
        if self._average_N is not None:
            guarded["average of the weights (EMA)"] = self._average_N
        form = form_for(device, triton)
        self.state_guard = StateGuard(guarded, moving=[NUMBERS] if use_loss_scale else [], form=form)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Name -> trained weight (the master)."""
        return self.weights.parameters

    def learning_rate(self, updates: int) -> float:
        """The recipe's learning rate at this point, for the log (the text encoders' own is its multiple)."""
        return self.optim.learning_rate * learning_rate_factor(self.optim, updates, self.max_train_steps)

    @torch.no_grad()
    def step(self, updates: int, blocked: Tensor) -> UpdateStats:
        """One update from the gathered gradients; they are zero afterwards.

        Args:
            updates: updates made so far (confirmed); decides the learning rate.
            blocked: float32 0-d, exactly 0 or 1, on the device; has to be 1 where ``state_guard`` has found a change.
        """
        gradients = self.weights.gradients
        scale = self.loss_scale.clone() if self.use_loss_scale else self.loss_scale
        grad_norm = torch.linalg.vector_norm(gradients) / scale
        nonfinite = (~torch.isfinite(grad_norm)).to(torch.float32)
        held = torch.maximum(blocked, nonfinite, out=self.state_guard.held)
        divisor = scale
        if self.optim.max_grad_norm:
            divisor = scale * ((grad_norm + 1e-6) / self.optim.max_grad_norm).clamp(min=1.0)
        factor = learning_rate_factor(self.optim, updates, self.max_train_steps)
        places = zip(self.optimizer.param_groups, self.peak_rates, self._parts, self._slices, strict=True)
        for group, peak, part, place in places:
            group["lr"] = peak * factor
            part.grad = gradients[place].to(part.dtype)
        # GradScaler's contract with fused optimizers
        self.optimizer.found_inf, self.optimizer.grad_scale = held, divisor  # type: ignore[attr-defined]
        self.optimizer.step()
        self.weights.publish()
        self._average(updates, held)
        self._rescale(blocked, nonfinite)
        for part in self._parts:
            part.grad = None
        self.weights.drop_gradients()
        self.state_guard.renew()
        return UpdateStats(grad_norm, nonfinite, scale)

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
        """Moments by parameter name, step counts by group, and the loss scale: the live tensors, on the device."""
        tensors = {"loss_scale": self.loss_scale, "growth": self.growth}
        for number, part in enumerate(self._parts):
            tensors[f"group{number}.step"] = self.optimizer.state[part]["step"]
        for name in self.parameters:
            tensors |= {f"{name}.{moment}": views[name] for moment, views in self._moments.items()}
        return tensors

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], ema: Mapping[str, Tensor] | None = None) -> None:
        """Take over what ``state`` gave, and averages; all are on the device already, checked.

        A run that keeps an average for the first time starts it at the weights as they are.
        """
        for name, tensor in self.state().items():
            tensor.copy_(tensors[name])
        for name, average in self.ema.items():
            average.copy_(ema[name] if ema else self.parameters[name])
        self.state_guard.reset()
