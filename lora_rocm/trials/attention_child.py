"""Child process that tries ways of attention at a recipe's shapes: ``python -m lora_rocm.trials.attention_child JOB``.

Of each way, output and gradients are compared with plain attention in float32, and a right one is timed. It reports
rows as events (``checks.timing``). A way that crashes or hangs ends the process; the parent continues after it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from lora_rocm.bench.device_child import told
from lora_rocm.checks.selftest_attention import NO_BACKEND, TOLERANCES
from lora_rocm.checks.selftest_base import DTYPES, poison
from lora_rocm.checks.timing import Work, measure, own_seconds, seconds_of
from lora_rocm.device.attention import ORDERS, Context, context_of
from lora_rocm.device.backend_settings import apply
from lora_rocm.device.precision import choose_device, compute_dtype
from lora_rocm.families.base import family_for
from lora_rocm.families.registry import PRODUCT, Registry
from lora_rocm.hardware.settings import settings_from
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.trials.step_calls import AttentionCall, count_calls

PARTS = ("output", "gradient of q", "gradient of k", "gradient of v")
BOUND = {DTYPES[name]: tolerance * torch.finfo(DTYPES[name]).eps for name, tolerance in TOLERANCES.items()}
"""Allowed error, relative to the largest number of a tensor; see ``TOLERANCES``."""


@dataclass
class Trial:
    """The inputs of one call with the known results, output and gradients, in float32.

    Attributes:
        count: of such calls in a pass.
        given: q, k, v and the gradient of the output, in the dtype of the run.
    """

    call: AttentionCall
    count: int
    given: tuple[Tensor, Tensor, Tensor, Tensor]
    wanted: tuple[Tensor, ...]

    @classmethod
    def of(cls, call: AttentionCall, count: int, device: torch.device, dtype: torch.dtype) -> Trial:
        own = torch.Generator(device).manual_seed(0)
        sides = (call.queries, call.keys, call.keys, call.queries)

        def random(length: int) -> Tensor:
            shape_BSHD = (call.batch, length, call.heads, call.head_dim)  # as models lay out their projections
            return torch.randn(shape_BSHD, device=device, generator=own).to(dtype).transpose(1, 2)

        q, k, v, gradient = map(random, sides)
        given = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), gradient)
        return cls(call, count, given, plain(*given, call.is_causal))

    def run(self, context: Callable[[], AbstractContextManager[Any]]) -> tuple[Tensor, ...]:
        """Output and gradients by one way."""
        q, k, v, gradient = self.given
        with context():
            output = F.scaled_dot_product_attention(q, k, v, is_causal=self.call.is_causal)
        return output, *torch.autograd.grad(output, (q, k, v), gradient)

    def error(self, context: Callable[[], AbstractContextManager[Any]]) -> float:
        """The largest error of a tensor, relative to its largest number.

        Raises:
            RuntimeError: an error exceeds the bound, or a number is not finite.
        """
        poison(self.given[0].device, *(tensor.nbytes for tensor in self.given))
        worst = 0.0
        for part, found, wanted in zip(PARTS, self.run(context), self.wanted, strict=True):
            error = float((found.detach().float() - wanted).abs().max() / wanted.abs().max())
            if not error <= BOUND[found.dtype]:
                raise RuntimeError(f"wrong: {part} of {self.call} is off by {error:.2g} of its largest number")
            worst = max(worst, error)
        return worst


def plain(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, is_causal: bool) -> tuple[Tensor, ...]:
    """Output and gradients by the formula in float32, one head after the other."""
    results = []
    for heads in zip(*(tensor.detach().flatten(0, 1) for tensor in (q, k, v, gradient)), strict=True):
        q_SD, k_TD, v_TD, d_out_SD = (tensor.float() for tensor in heads)
        for tensor in (q_SD, k_TD, v_TD):
            tensor.requires_grad_()
        scores_ST = q_SD @ k_TD.T * q_SD.shape[-1] ** -0.5
        if is_causal:
            scores_ST = scores_ST.masked_fill(torch.ones_like(scores_ST, dtype=torch.bool).triu(1), float("-inf"))
        output_SD = scores_ST.softmax(-1) @ v_TD
        results.append((output_SD.detach(), *torch.autograd.grad(output_SD, (q_SD, k_TD, v_TD), d_out_SD)))
    return tuple(torch.stack(part).unflatten(0, q.shape[:2]) for part in zip(*results, strict=True))


def prepared(way: str, context: Context, trials: Sequence[Trial], found: dict[str, Any]) -> Callable[[], float]:
    """Check a way at every shape; return a function that times a pass's attention by it, in seconds.

    Raises:
        RuntimeError: torch has no such backend here, or a result is wrong.
    """
    require_backend(way, context, trials)
    errors = [trial.error(context) for trial in trials]
    found["error"] = max(errors)

    def seconds() -> float:
        device = trials[0].given[0].device
        each = [seconds_of(partial(trial.run, context), device) for trial in trials]
        shapes = zip(trials, each, errors, strict=True)
        found["shapes"] = [[str(trial.call), trial.count, time, error] for trial, time, error in shapes]
        return sum(trial.count * time for trial, time in zip(trials, each, strict=True))

    return seconds


def require_backend(way: str, context: Context, trials: Sequence[Trial]) -> None:
    """Check that a package is installed, and that the first backend of an order computes at least one of the shapes.

    Raises:
        RuntimeError: it is not, or computes none.
    """
    try:
        context()
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"not here: {error}") from error
    refused = 0
    for trial in trials if way in ORDERS else ():
        try:
            trial.run(lambda: sdpa_kernel([ORDERS[way][0]]))
        except RuntimeError as error:
            if not any(words in str(error) for words in NO_BACKEND):
                raise
            refused += 1
    if refused and refused == len(trials):
        raise RuntimeError("not here: torch has no such kernel for this GPU and these shapes")


def main(made: Callable[[str], Context] = context_of, registry: Registry = PRODUCT) -> int:
    """Try the ways of the job file named by the last argument."""
    job = json.loads(Path(sys.argv[-1]).read_text(encoding="utf-8"))
    return told(partial(_try, job, made, registry))


def _try(job: dict[str, Any], made: Callable[[str], Context], registry: Registry) -> None:
    recipe, settings = recipe_from(job["recipe"], registry), settings_from(os.environ)
    device = choose_device(recipe.runtime.device, settings)
    apply(settings, device)
    dtype = compute_dtype(recipe.train.mixed_precision, device, settings)
    calls = count_calls(recipe, family_for(recipe), dtype, settings, device.type == "cuda").attention
    trials = [Trial.of(call, count, device, dtype) for call, count in calls.items()]
    works = []
    for way in job["ways"]:
        found: dict[str, Any] = {}
        works.append(Work({"way": way}, 1.0, partial(prepared, way, made(way), trials, found), found))
    measure(works, job["start"], own_seconds, job["limit_s"])


if __name__ == "__main__":
    sys.exit(main())
