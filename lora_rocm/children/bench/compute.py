"""Benchmarks matrix products, attention by each backend, and convolutions with and without MIOpen.

The sizes are those of image models at 1024 px with a LoRA of rank 16. M: rows (tokens), K: input width, N: output
width; H: heads, S: tokens, D: width of a head; C: channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import conv2d, scaled_dot_product_attention

from lora_rocm.checks.timing import Call, Work, measure, seconds_of
from lora_rocm.device.attention import ROUTES

DTYPES = {
    "cuda": (torch.bfloat16, torch.float16, torch.float32),
    "cpu": (torch.bfloat16, torch.float32),  # most processors compute float16 one number at a time
}
BACKENDS_OF = {"cpu": ("math", "flash"), "hip": ("math", "efficient", "flash"), "cuda": tuple(ROUTES)}
CPU_SHRINK = 8
"""Divides the sides of images on a CPU, so that the benchmark takes seconds; widths stay."""
RANK = 16
LINEARS = (  # name, M, K, N
    ("attention 640", 4096, 640, 640),
    ("attention 1280", 1024, 1280, 1280),
    ("cross attention", 77, 2048, 1280),
    ("feed forward", 1024, 1280, 10240),
)
ATTENTIONS = (("self 640", 10, 4096), ("self 1280", 20, 1024))  # name, H, S
HEAD_WIDTH = 64
CONVOLUTIONS = (  # name, C, pixels per side; a VAE computes in float32
    ("UNet 3x3", 320, 128),
    ("UNet 3x3", 640, 64),
    ("UNet 3x3", 1280, 32),
    ("VAE 3x3", 128, 1024),
    ("VAE 3x3", 512, 256),
)


def run(device: torch.device, start: int) -> None:
    """Measure all rows from ``start`` on and emit them as events."""
    measure(all_works(device), start, partial(seconds_of, device=device))


def all_works(device: torch.device) -> list[Work]:
    """Return all rows for a device."""
    shrink = 1 if device.type == "cuda" else CPU_SHRINK
    return [*_gemms(device, shrink), *_attentions(device, shrink), *_convolutions(device, shrink)]


def _gemms(device: torch.device, shrink: int) -> Iterator[Work]:
    """Yield a linear layer's y = x W^T and dx = dy W, and dW = dy^T x for trained layers (the base is frozen)."""
    for name, tokens, ins, outs in LINEARS:
        rows = max(16, tokens // shrink**2)
        for part, k, n, products in (
            ("base", ins, outs, ("y", "dx")),
            ("LoRA A", ins, RANK, ("y", "dx", "dW")),
            ("LoRA B", RANK, outs, ("y", "dx", "dW")),
        ):
            for product in products:
                for dtype in DTYPES[device.type]:
                    fields = _fields("gemm", f"{name}, {part}", product, (rows, k, n), dtype)
                    yield Work(fields, 2.0 * rows * k * n, partial(gemm, device, dtype, product, rows, k, n))


def gemm(device: torch.device, dtype: torch.dtype, product: str, rows: int, width_in: int, width_out: int) -> Call:
    """Return a call of one of the three products of a linear layer."""
    x_MK, w_NK = _random(device, dtype, rows, width_in), _random(device, dtype, width_out, width_in)
    dy_MN = _random(device, dtype, rows, width_out)
    if product == "y":
        return lambda: x_MK @ w_NK.T
    if product == "dx":
        return lambda: dy_MN @ w_NK
    return lambda: dy_MN.T @ x_MK


def _attentions(device: torch.device, shrink: int) -> Iterator[Work]:
    names = BACKENDS_OF["cpu" if device.type == "cpu" else "hip" if torch.version.hip else "cuda"]
    for name, heads, long in ATTENTIONS:
        tokens = long // shrink**2
        forward = 4.0 * heads * tokens * tokens * HEAD_WIDTH
        shape = (1, heads, tokens, HEAD_WIDTH)
        for backend in names:
            for both in (False, True):
                for dtype in DTYPES[device.type]:
                    what = f"{backend}, {'and back' if both else 'forward'}"
                    call = partial(attention, device, dtype, ROUTES[backend], shape, both)
                    yield Work(_fields("attention", name, what, shape, dtype), forward * (3 if both else 1), call)


def attention(
    device: torch.device, dtype: torch.dtype, backend: SDPBackend, shape_BHSD: tuple[int, ...], both: bool
) -> Call:
    """Return a call of attention by one backend, with its gradient if ``both``.

    The FLOP count is four multiplications per pair forward and eight backward, regardless of recomputation in the
    backend.
    """
    queries, keys, values = (_random(device, dtype, *shape_BHSD).requires_grad_(both) for _ in range(3))
    gradient = _random(device, dtype, *shape_BHSD)

    def call() -> None:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(queries, keys, values)
            if both:
                torch.autograd.grad(out, (queries, keys, values), gradient)

    return call


def _convolutions(device: torch.device, shrink: int) -> Iterator[Work]:
    """Yield convolutions through MIOpen or cuDNN ("on") and by torch's own kernels ("off"); a CPU has only its own."""
    library = "MIOpen" if torch.version.hip else "cuDNN"
    ways = ((f"{library} on", True), (f"{library} off", False)) if device.type == "cuda" else (("CPU", True),)
    for name, channels, side in CONVOLUTIONS:
        shape = (1, channels, side // shrink, side // shrink)
        for way, enabled in ways:
            for dtype in (torch.float32,) if name.startswith("VAE") else DTYPES[device.type]:
                fields = _fields("convolution", f"{name}, {channels} channels", way, shape, dtype)
                amount = 2.0 * 9 * channels * channels * shape[2] * shape[3]
                yield Work(fields, amount, partial(convolution, device, dtype, shape, enabled))


def convolution(device: torch.device, dtype: torch.dtype, shape_BCHW: tuple[int, ...], enabled: bool) -> Call:
    """Return a call of a 3x3 convolution, with the library on or off."""
    channels = shape_BCHW[1]
    pixels_BCHW, kernel = _random(device, dtype, *shape_BCHW), _random(device, dtype, channels, channels, 3, 3)

    def call() -> Tensor:
        with torch.backends.cudnn.flags(enabled=enabled, benchmark=False, allow_tf32=False):
            return conv2d(pixels_BCHW, kernel, padding=1)

    return call


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype)


def _fields(group: str, name: str, way: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    return {
        "group": group,
        "name": name,
        "way": way,
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
    }
