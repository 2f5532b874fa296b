"""Time and error of a frozen layer with a LoRA: products in bf16, and in eight bits with their scaling.

usage: python benchmarks/eight_bit_products.py [--only flux,z-image,sdxl,llama] [--json FILE] [--limit-s 240] [--toy]

Layers of FLUX.1, Z-Image and SDXL at 1,024 px, batch 1, and of Llama 8B with 4,096 tokens; with random weights and a
LoRA of rank 16. One input in 100 is 20 times as large, as activations of transformers are. Times are of
the base product alone, forward and backward (the gradient of the input), as a captured graph of several calls. ``bf16``
is a dense bf16 weight, ``unpacked`` the stored weight unpacked for each pass, and ``eight bit`` the product of codes
with all of its parts: ``rows`` scaling (and in int8 the rotation of inputs), ``turned`` the transposed codes, and the
product itself. In int8 the gradient is rotated back in the kernel that scales the sums.

Errors are relative to the stored weight's exact product in float64: of the output, the gradient of the input, and the
gradients of A and B. They contain no rounding of the weights. ``--toy`` rehearses on the CPU. After ``--limit-s``
seconds no further layer is measured, and the program reports how many are missing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from lora_rocm.errors import MachineError  # noqa: E402
from lora_rocm.kernels import eight_bit_library  # noqa: E402
from lora_rocm.kernels.backend import implementation_for  # noqa: E402
from lora_rocm.kernels.eight_bit import EightBitProduct, scaled_rows, turned  # noqa: E402
from lora_rocm.kernels.fused_lora import lora_linear  # noqa: E402
from lora_rocm.kernels.quantised import quantised  # noqa: E402
from lora_rocm.kernels.weight_format import PackedLinear, dense_weight, product_of, unpacked_product  # noqa: E402

RANK, CALLS, REPEATS = 16, 10, 5
FORMATS = ("fp8", "int8")


@dataclass(frozen=True)
class Shape:
    """A layer of a model. rows: tokens of a sample."""

    family: str
    layer: str
    rows: int
    inputs: int
    outputs: int


SHAPES = (
    Shape("flux", "qkv of a double block", 4096, 3072, 3072),
    Shape("flux", "first of an MLP", 4096, 3072, 12288),
    Shape("flux", "second of an MLP", 4096, 12288, 3072),
    Shape("flux", "out of a single block", 4608, 15360, 3072),
    Shape("z-image", "qkv", 4352, 3840, 3840),
    Shape("z-image", "gate of an MLP", 4352, 3840, 10240),
    Shape("z-image", "down of an MLP", 4352, 10240, 3840),
    Shape("sdxl", "qkv at 64 px", 4096, 640, 640),
    Shape("sdxl", "qkv at 32 px", 1024, 1280, 1280),
    Shape("sdxl", "GEGLU at 32 px", 1024, 1280, 10240),
    Shape("llama", "query", 4096, 4096, 4096),
    Shape("llama", "gate of an MLP", 4096, 4096, 14336),
    Shape("llama", "down of an MLP", 4096, 14336, 4096),
)
TOY = (Shape("toy", "a layer", 40, 96, 64),)


def milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the time of one call: on a GPU the fastest replay of a captured graph of several calls."""
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - started)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            run()
    taken = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) / CALLS)
    return min(taken)


@dataclass
class Layer:
    """A layer with random numbers for its passes."""

    shape: Shape
    device: torch.device
    name: str

    def __post_init__(self) -> None:
        shape, rng = self.shape, torch.Generator(self.device).manual_seed(0)
        drawn: Callable[..., Tensor] = partial(torch.randn, generator=rng, device=self.device)
        dense = nn.Linear(shape.inputs, shape.outputs, bias=False, device="meta")
        weight_OI = drawn(shape.outputs, shape.inputs).mul_(shape.inputs**-0.5).bfloat16()
        dense.weight = nn.Parameter(weight_OI, requires_grad=False)
        self.dense_OI = weight_OI
        self.packed: PackedLinear = quantised(self.name, "", self.name).packed(dense)
        self.packed.implementation = implementation_for(self.device)
        self.x_MI = drawn(shape.rows, shape.inputs)
        self.x_MI[:, ::100] *= 20
        self.x_MI = self.x_MI.bfloat16()
        self.dy_MO = drawn(shape.rows, shape.outputs).bfloat16()
        self.a_RI = drawn(RANK, shape.inputs).mul_(shape.inputs**-0.5).bfloat16()
        self.b_OR = drawn(shape.outputs, RANK).mul_(0.1).bfloat16()

    def errors(self) -> dict[str, float]:
        """Return the relative errors of output and gradients, for products in eight bits and with the dense weight."""
        exact = [leaf.double().requires_grad_() for leaf in (self.x_MI, self.a_RI, self.b_OR)]
        x, a, b = exact
        y = x @ dense_weight(self.packed).double().t() + x @ a.t() @ b.t()
        wanted = [y.detach(), *torch.autograd.grad(y, exact, self.dy_MO.double())]
        found: dict[str, float] = {}
        products = {"eight": product_of([self.packed], torch.bfloat16),
                    "unpacked": unpacked_product([self.packed], torch.bfloat16)}  # fmt: skip
        for title, product in products.items():
            leaves = [leaf.detach().clone().requires_grad_() for leaf in (self.x_MI, self.a_RI, self.b_OR)]
            y = lora_linear(leaves[0], None, None, leaves[1], leaves[2], 1.0, product)
            made = [y.detach(), *torch.autograd.grad(y, leaves, self.dy_MO)]
            for what, one, other in zip(("output", "dx", "da", "db"), made, wanted, strict=True):
                found[f"{title}_{what}"] = float((one.double() - other).norm() / other.norm())
        return found

    def times(self) -> dict[str, float]:
        """Return milliseconds of the base product and of its parts."""
        layer, rows = self.packed, [self.shape.outputs]
        eight, unpacked = product_of([layer], torch.bfloat16), unpacked_product([layer], torch.bfloat16)
        assert isinstance(eight, EightBitProduct)
        code, scale, group = eight.code, layer.get_buffer("weight_scale"), eight.group
        parts: dict[str, Callable[[], object]] = {
            "bf16_forward": lambda: self.x_MI @ self.dense_OI.t(),
            "bf16_backward": lambda: self.dy_MO @ self.dense_OI,
            "unpacked_forward": lambda: unpacked.outputs(self.x_MI, None, rows, False),
            "unpacked_backward": lambda: unpacked.input_gradient([self.dy_MO], None),
            "eight_forward": lambda: eight.outputs(self.x_MI, None, rows, False),
            "eight_backward": lambda: eight.input_gradient([self.dy_MO], None),
            "rows_forward": lambda: scaled_rows(self.x_MI, code, None, group, layer.implementation),
            "rows_backward": lambda: scaled_rows(self.dy_MO, code, scale, 0, layer.implementation),
            "turned": lambda: turned(layer.weight, layer.implementation),
        }
        with torch.no_grad():
            return {f"{name}_ms": milliseconds(run, self.device) for name, run in parts.items()}


def measured(shape: Shape, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield a row for each format that the device multiplies."""
    for name in FORMATS:
        try:
            eight_bit_library.require(name, device)
        except MachineError as error:
            print(f"{shape.family}: {error.what}", flush=True)
            continue
        layer = Layer(shape, device, name)
        yield {**vars(shape), "format": name, **layer.errors(), **layer.times()}


def text_of(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    title = f"{row['family']}, {row['layer']}"
    turned_ms = row["turned_ms"]
    size = f"{row['rows']} x {row['inputs']} x {row['outputs']}"
    passes = (
        f"{way} {row[f'bf16_{way}_ms']:.3f} -> {row[f'eight_{way}_ms']:.3f} ms "
        f"({100 * (row[f'eight_{way}_ms'] / row[f'bf16_{way}_ms'] - 1):+.0f} %, rows {row[f'rows_{way}_ms']:.3f}"
        f"{'' if way == 'forward' else f', turned {turned_ms:.3f}'})"
        for way in ("forward", "backward")
    )
    errors = ", ".join(f"{what} {100 * row[f'eight_{what}']:.2f}" for what in ("output", "dx", "da", "db"))
    return f"{title:34}{size:22}{row['format']:6}{'  '.join(passes)}  errors in %: {errors}"


def main() -> None:
    """Measure and print, row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit-s", type=float, default=240.0)
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    started, rows = time.monotonic(), list[dict[str, Any]]()
    device = torch.device("cpu" if options.toy else "cuda")
    chosen = TOY if options.toy else [each for each in SHAPES if each.family in (options.only or each.family)]
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}", flush=True)
    for number, shape in enumerate(chosen):
        if time.monotonic() - started > options.limit_s:
            print(f"stopped after {options.limit_s:.0f} s: {len(chosen) - number} layers are not measured", flush=True)
            break
        for row in measured(shape, device):
            rows.append(row)
            print(text_of(row), flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
