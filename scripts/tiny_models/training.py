"""One training by the clock or by steps, with a learning rate that warms up and falls, and averaged weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import torch


class Clock:
    """Warm-up, then cosine, over steps or seconds, whichever is used up first."""

    def __init__(self, steps: int, seconds: float, peak: float, warmup: int, floor: float = 0.02) -> None:
        self.steps, self.seconds, self.peak, self.warmup, self.floor = steps, seconds, peak, warmup, floor
        self.step, self.start = 0, time.time()

    def progress(self) -> float:
        """0 at the start, 1 at the end."""
        spent = (time.time() - self.start) / self.seconds if self.seconds else 0.0
        return min(1.0, max(self.step / max(1, self.steps), spent))

    @property
    def done(self) -> bool:
        """Whether the budget is used up."""
        return self.progress() >= 1.0

    def lr(self) -> float:
        """The learning rate now."""
        ramp = min(1.0, (self.step + 1) / max(1, min(self.warmup, self.steps // 4 or 1)))
        cosine = 0.5 * (1 + math.cos(math.pi * self.progress()))
        return self.peak * ramp * (self.floor + (1 - self.floor) * cosine)

    def tick(self) -> None:
        """Count a step."""
        self.step += 1


class Ema:
    """A running average of weights; it starts fast, so that the first, random weights are soon forgotten."""

    def __init__(self, parameters: list[torch.nn.Parameter], decay: float) -> None:
        self.parameters, self.decay, self.step = parameters, decay, 0
        self.shadow = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the current weights."""
        self.step += 1
        decay = min(self.decay, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(self.shadow, [p.detach() for p in self.parameters], 1 - decay)

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Copy the averaged weights into the model."""
        torch._foreach_copy_([p.detach() for p in self.parameters], self.shadow)


def half(device: torch.device) -> torch.autocast:
    """Autocast to bf16 on a GPU; most CPUs are slower in it."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


class Graphed:
    """Forward and backward passes as CUDA graphs on a GPU: a tiny model's kernels take less time than their launches.

    compute: computes gradients from the number of a pool, all of one shape, and from row numbers in it; it returns the
        value to be shown.
    """

    def __init__(self, compute: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        self.compute = compute
        self.captured: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}

    def __call__(self, pool: int, rows: torch.Tensor) -> torch.Tensor:
        """The value to be shown; the gradients are in the parameters."""
        if rows.device.type != "cuda":
            return self.compute(pool, rows)
        if pool not in self.captured:
            side, own = torch.cuda.Stream(), rows.clone()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self.compute(pool, own)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                shown = self.compute(pool, own)
            self.captured[pool] = graph, own, shown
        graph, own, shown = self.captured[pool]
        own.copy_(rows)
        graph.replay()
        return shown


class Draws:
    """Batches of rows, each of one pool, which is drawn by its size."""

    def __init__(self, sizes: list[int], seed: tuple[int, int], device: torch.device) -> None:
        self.sizes, self.rng, self.device = sizes, np.random.default_rng(seed), device
        self.share = np.asarray(sizes, float) / sum(sizes)

    def __call__(self, batch: int) -> tuple[int, torch.Tensor]:
        """The number of a pool, and some of its rows."""
        number = int(self.rng.choice(len(self.sizes), p=self.share))
        return number, torch.from_numpy(self.rng.integers(0, self.sizes[number], batch)).to(self.device)


def backward(loss: torch.Tensor, parameters: list[torch.nn.Parameter]) -> None:
    """Gradients in the tensors that hold them since the start, so that a graph finds them again."""
    torch._foreach_zero_([p.grad for p in parameters if p.grad is not None])
    loss.backward()


def optimise(
    name: str,
    passes: Callable[[], torch.Tensor],
    modules: dict[torch.nn.Module, float],
    clock: Clock,
    decay: float,
    weight_decay: float = 0.01,
) -> dict[str, float]:
    """Optimise until the clock is done; the modules end holding the averaged weights.

    Args:
        name: the name in log lines and results.
        passes: computes the gradients of a new batch by ``backward``, and returns the value to show.
        modules: the trained modules, each with the factor of its learning rate.
        clock: steps, seconds and learning rate.
        decay: of the average of the weights.
        weight_decay: AdamW's.
    """
    groups = [{"params": list(module.parameters()), "factor": factor} for module, factor in modules.items()]
    optimizer = torch.optim.AdamW(groups, lr=clock.peak, betas=(0.9, 0.99), weight_decay=weight_decay, fused=True)
    parameters = [p for group in groups for p in group["params"]]
    for module in modules:
        module.train()
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    ema, start, shown = Ema(parameters, decay), time.time(), torch.zeros((), device=parameters[0].device)
    while not clock.done:
        for group in optimizer.param_groups:
            group["lr"] = clock.lr() * group["factor"]
        seen = passes()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        ema.update()
        shown = shown.lerp(seen, 0.02 if clock.step > 50 else 0.5)
        clock.tick()
        if clock.step % 200 == 0 or clock.step == 10:
            line = f"{name} {clock.step} {float(shown):.4f} lr {clock.lr():.1e} {time.time() - start:.0f}s"
            print(line, flush=True)
    ema.copy_to_model()
    for module in modules:
        module.eval()
    return {f"{name}_steps": clock.step, f"{name}_loss": float(shown), f"{name}_seconds": time.time() - start}
