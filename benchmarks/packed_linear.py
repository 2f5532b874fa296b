"""Time of one linear layer with a LoRA, forward and backward, with a dense and with packed weights. Needs a GPU.

usage: python benchmarks/packed_linear.py [--rank 16] [--dtype bfloat16]

Shapes are from SDXL at 1024 px and FLUX.1 at 1024 px: rows, inputs, outputs. ``unpack`` is the time to make the
dense weight once; a step makes it twice.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from lora_rocm.kernels.backend import Implementation  # noqa: E402
from lora_rocm.kernels.base_product import BaseProduct, UnpackedProduct  # noqa: E402
from lora_rocm.kernels.fused_lora import lora_linear  # noqa: E402
from lora_rocm.kernels.quantised import quantised  # noqa: E402

SHAPES = {
    "SDXL attention, 640": (4096, 640, 640),
    "SDXL attention, 1280": (1024, 1280, 1280),
    "SDXL GEGLU, 1280": (1024, 1280, 10240),
    "SDXL feed-forward, 1280": (1024, 5120, 1280),
    "FLUX attention": (4608, 3072, 3072),
    "FLUX feed-forward": (4096, 3072, 12288),
    "FLUX single block": (4608, 15360, 3072),
}
FORMS: tuple[Implementation, ...] = ("eager", "triton")
REPEATS = 20


def milliseconds(run: Callable[[], object]) -> float:
    """The median time of a call on the GPU."""
    for _ in range(3):
        run()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
    for begin, end in marks:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in marks)[REPEATS // 2]


def main() -> None:
    """Print a line for each shape and format."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    for title, shape in SHAPES.items():
        for line in compared(*shape, options.rank, getattr(torch, options.dtype)):
            print(f"{title:24} {line}")


def compared(rows: int, inputs: int, outputs: int, rank: int, dtype: torch.dtype) -> Iterator[str]:
    """Lines with the time of a layer, dense, and in each format with each implementation."""
    with torch.device("cuda"):
        x, dy, a, b, weight = (
            torch.randn(shape, dtype=dtype, requires_grad=True)
            for shape in ((rows, inputs), (rows, outputs), (rank, inputs), (outputs, rank), (outputs, inputs))
        )
    layer = nn.Linear(inputs, outputs, bias=False, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)

    def step(weight_OI: Tensor | None, product: BaseProduct | None = None) -> None:
        torch.autograd.grad(lora_linear(x, weight_OI, None, a, b, 1.0, product), (x, a, b), dy)

    plain = milliseconds(partial(step, layer.weight))
    yield f"dense       {plain:7.3f} ms"
    for name in ("int8", "fp8", "nf4"):
        packed = quantised(name, "").packed(layer)
        for form in FORMS:
            unpack = partial(packed.dense, dtype, form)
            once, found = milliseconds(unpack), milliseconds(partial(step, None, UnpackedProduct(unpack)))
            yield f"{name:4} {form:6} {found:7.3f} ms, {found / plain:4.2f} x, unpack {once:.3f} ms"


if __name__ == "__main__":
    main()
