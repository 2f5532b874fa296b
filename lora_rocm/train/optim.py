"""The optimizer step: gated on the device, without waiting for the host.

AdamW (Loshchilov and Hutter, arXiv 1711.05101), PyTorch's fused kernel. The fused kernel takes a ``found_inf`` tensor:
when it is 1, neither a parameter nor a moment nor the step count moves. That is where the verdict of the transfer check
and of the finite check goes in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lora_rocm.recipe.schema import OptimSection

INITIAL_LOSS_SCALE = 2.0**16
LOSS_SCALE_GROWTH_INTERVAL = 2000
ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")


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
    """AdamW with clipping, loss scale (fp16) and EMA; every write is gated by ``blocked`` and made in place.

    A step waits for nothing, so it can be captured in a graph (with ``capturable`` in PyTorch's parameter groups): the
    learning rate and the EMA's decay are then those of the capture.

    Args:
        parameters: name -> float32 parameter.
        groups: PyTorch parameter groups over the same parameters; "lr" of each is its peak.
        optim: the recipe's section.
        ema_decay: 0 for none.
        use_loss_scale: fp16 training.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        groups: list[dict[str, object]],
        optim: OptimSection,
        *,
        max_train_steps: int,
        ema_decay: float,
        use_loss_scale: bool,
    ) -> None:
        self.parameters, self.optim, self.max_train_steps, self.ema_decay = (
            parameters,
            optim,
            max_train_steps,
            ema_decay,
        )
        self.peak_rates = [float(group["lr"]) for group in groups]  # type: ignore[arg-type]
        self.optimizer = torch.optim.AdamW(
            groups, betas=optim.betas, eps=optim.epsilon, weight_decay=optim.weight_decay, fused=True
        )
        for parameter in parameters.values():  # as the first step would: memory must not run out within an update
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }
        device = next(iter(parameters.values())).device
        self.loss_scale = torch.tensor(INITIAL_LOSS_SCALE if use_loss_scale else 1.0, device=device)
        self.growth = torch.zeros((), device=device)
        self.use_loss_scale = use_loss_scale
        self.ema = {name: p.detach().clone() for name, p in parameters.items()} if ema_decay else {}

    def learning_rate(self, updates: int) -> float:
        """The recipe's learning rate at this point, for the log (the text encoders' own is its multiple)."""
        return self.optim.learning_rate * learning_rate_factor(self.optim, updates, self.max_train_steps)

    @torch.no_grad()
    def step(self, updates: int, blocked: Tensor) -> UpdateStats:
        """One update from the accumulated gradients; they are dropped afterwards.

        Args:
            updates: updates made so far (confirmed); decides the learning rate.
            blocked: float32 0-d, exactly 0 or 1, on the device.
        """
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        scale = self.loss_scale.clone() if self.use_loss_scale else self.loss_scale
        torch._foreach_mul_(grads, 1.0 / scale)
        grad_norm = torch.nn.utils.get_total_norm(grads)
        nonfinite = (~torch.isfinite(grad_norm)).to(torch.float32)
        if self.optim.max_grad_norm:
            torch._foreach_mul_(grads, (self.optim.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0))
        held = torch.maximum(blocked, nonfinite)
        factor = learning_rate_factor(self.optim, updates, self.max_train_steps)
        for group, peak in zip(self.optimizer.param_groups, self.peak_rates, strict=True):
            group["lr"] = peak * factor
        self.optimizer.found_inf = held  # type: ignore[attr-defined]  # GradScaler's contract with fused optimizers
        self.optimizer.step()
        self._average(updates, held)
        self._rescale(blocked, nonfinite)
        self.optimizer.zero_grad(set_to_none=True)
        return UpdateStats(grad_norm, nonfinite, scale)

    def _average(self, updates: int, held: Tensor) -> None:
        """EMA with a short warm-up of the decay (early weights are mostly initialisation)."""
        if not self.ema:
            return
        decay = min(self.ema_decay, (1 + updates) / (10 + updates))
        averages = list(self.ema.values())
        steps = torch._foreach_sub(list(self.parameters.values()), averages)
        torch._foreach_mul_(steps, (1.0 - decay) * (1.0 - held))
        torch._foreach_add_(averages, steps)

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
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts by parameter name, and the loss scale: the live tensors, on the device."""
        tensors = {"loss_scale": self.loss_scale, "growth": self.growth}
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{name}.{key}"] = value
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what ``state`` gave; ``tensors`` are on the device already, checked."""
        self.loss_scale, self.growth = tensors["loss_scale"], tensors["growth"]
        for name, parameter in self.parameters.items():
            found = {key: tensors[f"{name}.{key}"] for key in ADAM_STATE if f"{name}.{key}" in tensors}
            if found:
                self.optimizer.state[parameter] = found
