"""Matrix products at the shapes of a LoRA on SDXL, attention by each backend, convolutions with and without MIOpen.

Sizes: M rows (tokens of a batch), K width in, N width out, R rank; B batch, H heads, S tokens, T tokens attended to,
D width of a head; C channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import conv2d, scaled_dot_product_attention

from lora_rocm.checks.selftest_attention import BACKENDS
from lora_rocm.checks.timing import Call, Work, measure, seconds_of

DTYPES = {
    "cuda": (torch.bfloat16, torch.float16, torch.float32),
    "cpu": (torch.bfloat16, torch.float32),  # most processors compute float16 a number at a time
}
BACKENDS_OF = {"cpu": ("math", "flash"), "hip": ("math", "efficient", "flash"), "cuda": tuple(BACKENDS)}
LATENT_STEP_PX = 8  # pixels a side that one number of SDXL's latents stands for
TEXT_TOKENS = 77
CPU_RESOLUTION = 128
"""Without a GPU the shapes keep their widths and shrink in tokens, so that a look takes seconds."""
DEFAULT_SHAPES = {"rank": 16, "resolution": 1024, "batch_size": 1}


@dataclass(frozen=True)
class Layer:
    """A projection of SDXL's UNet. ``scale``: it works on latents smaller by so much; None: on the caption's tokens."""

    name: str
    scale: int | None
    width_in: int
    width_out: int


LAYERS = (
    Layer("attention 640", 2, 640, 640),
    Layer("attention 1280", 4, 1280, 1280),
    Layer("cross attention", None, 2048, 1280),
    Layer("feed forward", 4, 1280, 10240),
)
HEAD_WIDTH = 64
ATTENTIONS = (("self 640", 2, 640), ("self 1280", 4, 1280))  # name, scale, width
UNET_CONVS = ((1, 320), (2, 640), (4, 1280))  # scale, channels
VAE_CONVS = ((1, 128), (4, 512))  # scale of the picture, channels; in float32, as the latents are cached


def run(device: torch.device, start: int, shapes: Mapping[str, int]) -> None:
    """Measure, as events."""
    works = all_works(device, {**DEFAULT_SHAPES, **shapes})
    measure(works, start, partial(seconds_of, device=device))


def all_works(device: torch.device, shapes: Mapping[str, int]) -> list[Work]:
    """Every row for a device."""
    resolution = shapes["resolution"] if device.type == "cuda" else min(shapes["resolution"], CPU_RESOLUTION)
    side, batch = max(8, resolution // LATENT_STEP_PX), shapes["batch_size"]
    return [
        *_gemms(device, side, batch, shapes["rank"]),
        *_attentions(device, side, batch),
        *_convolutions(device, side, batch),
    ]


def _tokens(side: int, scale: int | None, batch: int) -> int:
    return batch * (TEXT_TOKENS if scale is None else (side // scale) ** 2)


def _gemms(device: torch.device, side: int, batch: int, rank: int) -> Iterator[Work]:
    """A linear layer's y = x W^T, dx = dy W and, of what is trained, dW = dy^T x; the base is frozen."""
    for layer in LAYERS:
        rows = _tokens(side, layer.scale, batch)
        parts = (
            ("base", layer.width_in, layer.width_out, False),
            ("LoRA A", layer.width_in, rank, True),
            ("LoRA B", rank, layer.width_out, True),
        )
        for part, width_in, width_out, trained in parts:
            for product in ("y", "dx", "dW")[: 3 if trained else 2]:
                for dtype in DTYPES[device.type]:
                    fields = _fields("gemm", f"{layer.name}, {part}", product, (rows, width_in, width_out), dtype)
                    call = partial(gemm, device, dtype, product, rows, width_in, width_out)
                    yield Work(fields, 2.0 * rows * width_in * width_out, call)


def gemm(device: torch.device, dtype: torch.dtype, product: str, rows: int, width_in: int, width_out: int) -> Call:
    """A call of one of the three products of a linear layer."""
    x_MK, w_NK = _random(device, dtype, rows, width_in), _random(device, dtype, width_out, width_in)
    dy_MN = _random(device, dtype, rows, width_out)
    if product == "y":
        return lambda: x_MK @ w_NK.T
    if product == "dx":
        return lambda: dy_MN @ w_NK
    return lambda: dy_MN.T @ x_MK


def _attentions(device: torch.device, side: int, batch: int) -> Iterator[Work]:
    names = BACKENDS_OF["cpu" if device.type == "cpu" else "hip" if torch.version.hip else "cuda"]
    for name, scale, width in ATTENTIONS:
        tokens, heads = (side // scale) ** 2, width // HEAD_WIDTH
        forward = 4.0 * batch * heads * tokens * tokens * HEAD_WIDTH
        shape = (batch, heads, tokens, HEAD_WIDTH)
        for backend in names:
            for both in (False, True):
                for dtype in DTYPES[device.type]:
                    what = f"{backend}, {'and back' if both else 'forward'}"
                    call = partial(attention, device, dtype, BACKENDS[backend], shape, both)
                    yield Work(_fields("attention", name, what, shape, dtype), forward * (3 if both else 1), call)


def attention(
    device: torch.device, dtype: torch.dtype, backend: SDPBackend, shape_BHSD: tuple[int, ...], both: bool
) -> Call:
    """A call of attention by one backend, also its gradient where ``both``.

    It counts as four and eight multiplications a pair, whatever the backend computes anew.
    """
    queries, keys, values = (_random(device, dtype, *shape_BHSD).requires_grad_(both) for _ in range(3))
    gradient = _random(device, dtype, *shape_BHSD)

    def call() -> None:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(queries, keys, values)
            if both:
                torch.autograd.grad(out, (queries, keys, values), gradient)

    return call


def _convolutions(device: torch.device, side: int, batch: int) -> Iterator[Work]:
    """On and off: through MIOpen or cuDNN, and by torch's own kernels; a CPU knows only its own."""
    library = "MIOpen" if torch.version.hip else "cuDNN"
    ways = ((f"{library} on", True), (f"{library} off", False)) if device.type == "cuda" else (("CPU", True),)
    shapes = [("UNet 3x3", batch, channels, side // scale, DTYPES[device.type]) for scale, channels in UNET_CONVS]
    picture = side * LATENT_STEP_PX
    shapes += [("VAE 3x3", 1, channels, picture // scale, (torch.float32,)) for scale, channels in VAE_CONVS]
    for name, count, channels, pixels, dtypes in shapes:
        for way, enabled in ways:
            for dtype in dtypes:
                shape = (count, channels, pixels, pixels)
                fields = _fields("convolution", f"{name}, {channels} channels", way, shape, dtype)
                amount = 2.0 * 9 * count * channels * channels * pixels * pixels
                yield Work(fields, amount, partial(convolution, device, dtype, shape, enabled))


def convolution(device: torch.device, dtype: torch.dtype, shape_BCHW: tuple[int, ...], enabled: bool) -> Call:
    """A call of a 3x3 convolution, with the library on or off."""
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
