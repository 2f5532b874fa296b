"""Child process of ``lora-rocm bench transfer`` and ``bench compute``: measures copies, or a recipe's operations.

Command: ``python -m lora_rocm.children.bench.device_child JOB.json``. The operations are those in a recipe's pass:
matrix products, attention with each backend, and convolutions with each library. ``lora-rocm tune`` and the start
of a run measure the same calls (``children.tune.job``).

It writes events to standard output, one JSON object per line: ``machine`` once, then ``begin`` before each row and
``row`` after it. If a row crashes or hangs, the process ends. The parent starts a new one, which continues with the
next row.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.attention import sdpa_kernel

from lora_rocm.checks.timing import Call, MeasuredRow, measure, seconds_of
from lora_rocm.children.bench import copies
from lora_rocm.children.measuring import machine, run_reported
from lora_rocm.children.tune.attention import computed, random_inputs
from lora_rocm.children.tune.job import AttentionCall, Convolution, Product, RecipeWork
from lora_rocm.device.attention import ROUTES
from lora_rocm.device.backend_settings import apply
from lora_rocm.device.precision import choose_device
from lora_rocm.hardware.settings import settings_from
from lora_rocm.processes.jobs import ComputeJob, TransferJob, job_of
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.rundir.event_types import MachineEvent
from lora_rocm.rundir.events import emit

BACKENDS_OF = {"cpu": ("math", "flash"), "hip": ("math", "efficient", "flash"), "cuda": tuple(ROUTES)}


def main() -> int:
    """Run the job and return the exit code. An unexpected error leaves a traceback on standard error for the parent."""
    return run_reported(_measure)


def _measure() -> None:
    job, settings = job_of(TransferJob, ComputeJob), settings_from(os.environ)
    if isinstance(job, ComputeJob):
        work = RecipeWork.of(recipe_from(job.recipe))
        emit(MachineEvent(**machine(work.device, settings)))
        measure(all_works(work), job.start, partial(seconds_of, device=work.device))
        return
    device = choose_device("auto")
    apply(settings, device)  # same settings as in training
    emit(MachineEvent(**machine(device, settings)))
    copies.run(device, job.start)


def all_works(work: RecipeWork) -> list[MeasuredRow]:
    """Return all rows to measure for a recipe."""
    return [*_products(work), *_attentions(work), *_convolutions(work)]


def _products(work: RecipeWork) -> Iterator[MeasuredRow]:
    """Yield a row for each matrix product in a pass, in order.

    The rows are numbered, because some differ only in strides.
    """
    for number, (product, count) in enumerate(work.products.items(), 1):
        left, right = product.inputs[-2:]
        fields = _fields(
            "gemm", f"{number} {product.name}", f"{count} in a pass", (*left.shape, right.shape[-1]), right.dtype
        )
        yield MeasuredRow(fields, product.flops, partial(_product, work.device, product))


def _product(device: torch.device, product: Product) -> Call:
    own = torch.Generator(device).manual_seed(0)
    return partial(product.run, [laid.random(device, own) for laid in product.inputs])


def _attentions(work: RecipeWork) -> Iterator[MeasuredRow]:
    """Yield a row for each attention call and backend. A row measures the call and its gradients.

    The FLOP count is four multiplications per pair for the forward pass and eight for the backward pass.
    Recomputation in a backend is not counted.
    """
    names = BACKENDS_OF["cpu" if work.device.type == "cpu" else "hip" if torch.version.hip else "cuda"]
    for number, (call, count) in enumerate(work.attention.items(), 1):
        shape = (call.batch, call.heads, call.queries, call.keys, call.head_dim)
        amount = 12.0 * call.batch * call.heads * call.queries * call.keys * call.head_dim
        for backend in names:
            name = f"{number} {'causal' if call.is_causal else 'full'}, {count} in a pass"
            yield MeasuredRow(
                _fields("attention", name, backend, shape, work.dtype), amount, partial(_attention, work, call, backend)
            )


def _attention(work: RecipeWork, call: AttentionCall, backend: str) -> Call:
    given = random_inputs(call, work.device, work.dtype)
    return partial(computed, given, call.is_causal, lambda: sdpa_kernel(ROUTES[backend]))


def _convolutions(work: RecipeWork) -> Iterator[MeasuredRow]:
    """Yield two rows for each convolution: with MIOpen or cuDNN ("on") and with torch's own kernels ("off").

    On a CPU, yield one.
    """
    library = "MIOpen" if torch.version.hip else "cuDNN"
    ways = ((f"{library} on", True), (f"{library} off", False)) if work.device.type == "cuda" else (("CPU", True),)
    for number, (call, count) in enumerate(work.convolutions.items(), 1):
        for way, enabled in ways:
            name = f"{number} {'x'.join(map(str, call.kernel.shape))}, {count} in a pass"
            fields = _fields("convolution", name, way, call.pixels.shape, call.pixels.dtype)
            yield MeasuredRow(fields, call.flops, partial(convolution, work.device, call, enabled))


def convolution(device: torch.device, what: Convolution, enabled: bool) -> Call:
    """Return a function that runs a convolution. ``enabled``: whether it uses MIOpen or cuDNN."""
    own = torch.Generator(device).manual_seed(0)
    pixels, kernel = what.pixels.random(device, own), what.kernel.random(device, own)

    def call() -> None:
        with torch.backends.cudnn.flags(enabled=enabled, benchmark=False, allow_tf32=False):
            what.run(pixels, kernel)

    return call


def _fields(group: str, name: str, backend: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    return {
        "group": group,
        "name": name,
        "way": backend,
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
    }


if __name__ == "__main__":
    sys.exit(main())
