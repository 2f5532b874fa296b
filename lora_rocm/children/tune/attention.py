"""Compares attention backends with the tensor shapes of a recipe: ``python -m lora_rocm.children.tune.attention JOB``.

The output and gradients of each backend are compared with attention by the formula in float32. Correct backends are
timed. If a backend crashes or hangs, the process ends. The parent starts a new one, which continues with the next
backend (``checks.timing``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from lora_rocm.checks.graph_check import capture_on_gpu
from lora_rocm.checks.selftest_attention import NO_BACKEND
from lora_rocm.checks.selftest_base import poison
from lora_rocm.checks.timing import seconds_of
from lora_rocm.children.tune.job import AttentionCall, Prepare, RecipeWork, report_rows
from lora_rocm.device.attention import ORDERS, Context, context_of
from lora_rocm.processes.jobs import TuneAttentionJob

PARTS = ("output", "gradient of q", "gradient of k", "gradient of v")
MAX_EPS = {torch.float32: (256.0, 128.0), torch.float16: (8.0, 2.0), torch.bfloat16: (8.0, 2.0)}
"""Largest errors of a correct backend, in units of eps: (largest error / largest magnitude, norm of error / norm).

In 16 bits, scores, probabilities, their gradients and the result are rounded. Each rounding error is at most eps /
2, and 0.3 eps on average. Four independent errors have a sum with a norm of about 0.6 eps. Rounding a score of 4
changes a probability by up to 2 eps. In float32, kernels build products from TF32 parts.
"""


Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""q, k, v and the gradient of the output, in this order."""


def random_inputs(call: AttentionCall, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Return random inputs with the shapes of an attention call."""
    own = torch.Generator(device).manual_seed(0)

    def random(length: int) -> Tensor:
        shape_BSHD = (call.batch, length, call.heads, call.head_dim)  # the layout of projections in models
        return torch.randn(shape_BSHD, device=device, generator=own).to(dtype).transpose(1, 2)

    q, k, v = (random(length).requires_grad_() for length in (call.queries, call.keys, call.keys))
    return q, k, v, random(call.queries)


def computed(given: Inputs, is_causal: bool, context: Callable[[], AbstractContextManager[Any]]) -> tuple[Tensor, ...]:
    """Return the output of attention and the gradients of q, k and v, computed within ``context()``."""
    q, k, v, gradient = given
    with context():
        output = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    return output, *torch.autograd.grad(output, (q, k, v), gradient)


@dataclass
class Trial:
    """Random inputs of one attention call, with the correct results.

    Attributes:
        count: number of calls with these shapes in a pass.
        given: q, k, v and the gradient of the output, in the run's dtype.
        wanted: the correct output and gradients of q, k and v, in float32.
    """

    call: AttentionCall
    count: int
    given: Inputs
    wanted: tuple[Tensor, ...]

    @classmethod
    def of(cls, call: AttentionCall, count: int, device: torch.device, dtype: torch.dtype) -> Trial:
        given = random_inputs(call, device, dtype)
        return cls(call, count, given, plain(*given, call.is_causal))

    def run(self, context: Callable[[], AbstractContextManager[Any]] = nullcontext) -> tuple[Tensor, ...]:
        """Return the output and the gradients of q, k and v, computed within ``context()``, which selects a backend."""
        return computed(self.given, self.call.is_causal, context)

    def error(self, context: Context) -> float:
        """Return the largest relative error among the output and the gradients.

        It is the norm of the error, divided by the norm of the correct tensor.

        Raises:
            RuntimeError: an error exceeds its limit, or a number is not finite.
        """
        poison(self.given[0].device, *(tensor.nbytes for tensor in self.given))
        errors = []
        for part, found, wanted in zip(PARTS, self.run(context), self.wanted, strict=True):
            off, eps = found.detach().float() - wanted, torch.finfo(found.dtype).eps
            # float() waits for the GPU: the check must end before the time is measured
            largest, norm = float(off.abs().max() / wanted.abs().max()), float(off.norm() / wanted.norm())
            of_one, of_all = MAX_EPS[found.dtype]
            if not (largest <= of_one * eps and norm <= of_all * eps):
                size = f"{norm:.2g} of its norm, and up to {largest:.2g} of its largest number"
                raise RuntimeError(f"wrong: {part} of {self.call} is off by {size}")
            errors.append(norm)
        return max(errors)

    def seconds(self, context: Context, captured: bool) -> float:
        """Return the time of one call with its gradients.

        ``captured``: whether the call is captured as a GPU graph first, as a run with captured passes does.
        """
        with context():  # once, as in a pass
            self._once()
            run = self._once
            if captured:
                with suppress(RuntimeError):  # a pass that cannot be captured stays eager
                    run = capture_on_gpu(self._once)
            return seconds_of(run, self.given[0].device)

    def _once(self) -> None:
        self.run()


def plain(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, is_causal: bool) -> tuple[Tensor, ...]:
    """Return the output and the gradients of q, k and v, computed by attention's formula in float32, head by head."""
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


def prepared(
    backend: str, context: Context, trials: Sequence[Trial], captured: bool, found: dict[str, Any]
) -> Callable[[], float]:
    """Check a backend with every shape. Return a function that times a pass's attention calls (see ``Prepare``)."""
    require_backend(backend, context, trials)
    errors = [trial.error(context) for trial in trials]
    found["error"] = max(errors)

    def seconds() -> float:
        each = [trial.seconds(context, captured) for trial in trials]
        shapes = zip(trials, each, errors, strict=True)
        found["shapes"] = [[str(trial.call), trial.count, time, error] for trial, time, error in shapes]
        return sum(trial.count * time for trial, time in zip(trials, each, strict=True))

    return seconds


def require_backend(backend: str, context: Context, trials: Sequence[Trial]) -> None:
    """Check that a backend's package is installed, and that torch has a kernel for at least one of the shapes.

    If ``backend`` names several backends in order of preference, only the first is checked.

    Raises:
        RuntimeError: the package is missing, or no shape is supported.
    """
    try:
        context()
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"unavailable: {error}") from error
    refused = 0
    for trial in trials if backend in ORDERS else ():
        try:
            trial.run(lambda: sdpa_kernel([ORDERS[backend][0]]))
        except RuntimeError as error:
            if not any(words in str(error) for words in NO_BACKEND):
                raise
            refused += 1
    if (refused and refused == len(trials)) or (
        backend == "sdpa-ck" and not torch.backends.cuda.is_ck_sdpa_available()
    ):
        raise RuntimeError("unavailable: torch has no such kernel for this GPU and these shapes")


def rows(job: TuneAttentionJob, work: RecipeWork) -> Iterator[tuple[dict[str, Any], Prepare]]:
    """Yield (fields, preparation) of a row for each backend."""
    trials = [Trial.of(call, count, work.device, work.dtype) for call, count in work.attention.items()]
    for way in job.ways:
        yield {"way": way}, partial(prepared, way, context_of(way), trials, work.captures)


def main() -> int:
    """Compare the backends of the job, and return the exit code."""
    return report_rows(TuneAttentionJob, rows)


if __name__ == "__main__":
    sys.exit(main())
