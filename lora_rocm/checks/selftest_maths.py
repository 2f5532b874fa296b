"""Self-test of matrix products and convolutions, compared with the CPU in float64.

Sums of products of small integers are exact in float32, in any order. So a float32 product must match bit for bit, and
a 16-bit product may differ only by the rounding of its result.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache, partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from lora_rocm.checks.selftest_base import Check, WrongAnswerError, expect, judge, poison, synchronize, whole_numbers
from lora_rocm.device import hipblaslt
from lora_rocm.device.precision import FLOATS

Sizes = tuple[int, int, int]
LAYOUTS = ("NN", "NT", "TN", "TT")
LIMITS = {"fp32": 300, "fp16": 4, "bf16": 4}
"""Largest input. Sums of 4096 products of numbers up to 300 stay below 2**24 by a margin of six standard deviations."""
ROUNDINGS = 4.0
"""Tolerance of 16-bit formats in units of eps. The result is rounded once; if a kernel splits K, partial sums are
rounded too.
"""
CONV_TOLERANCES = {"fp32": 256.0, "fp16": 8.0, "bf16": 8.0}
"""Tolerance in units of eps. Winograd kernels multiply the inputs by fractions, which loses some bits."""
CONV_TIMEOUT_S = 120.0  # MIOpen compiles kernels


def gemm_checks(device: torch.device) -> Iterator[Check]:
    """Yield checks of matrix products: square, LoRA-shaped, tall, batched, with a bias, and two in a row.

    If hipBLASLt is disabled, the first check is that torch does not prefer it.
    """
    if hipblaslt.hipblaslt_is_off(os.environ):
        yield Check("gemm.hipblaslt-off", _library)
    large = device.type == "cuda"
    rows, width, square = (4096, 4096, 256) if large else (96, 160, 64)
    lora: list[Sizes] = []
    for rank in (4, 16, 64):
        lora += [(rows, width, rank), (rows, rank, width), (rank, rows, width)]  # down, up, gradient of a weight
    for number, (dtype, layout) in enumerate(product(FLOATS, LAYOUTS)):
        scale = (-1.0) ** number * 2.0 ** -(number // 2)
        run = partial(products, device, dtype, layout, scale=scale)
        yield Check(f"gemm.square-{dtype}-{layout}", partial(run, ((square, square, square),)))
        yield Check(f"gemm.lora-{dtype}-{layout}", partial(run, tuple(lora)))
    tall = 600_000 if large else 30_000  # beyond 2**19 rows: ROCm#6595, rocm-libraries#8645
    for inner, columns in ((4, 4), (8, 32)):
        yield Check(
            f"gemm.tall-fp32-{columns}", partial(products, device, "fp32", "NN", ((tall, inner, columns),), scale=1.0)
        )
    for dtype in ("fp16", "bf16"):  # ROCm#6461: the second product of a process fails
        yield Check(f"gemm.twice-{dtype}", partial(_twice, device, dtype, square))
    for dtype in FLOATS:
        yield Check(f"gemm.batched-{dtype}", partial(_batched, device, dtype))  # TheRock#7403
        yield Check(f"gemm.bias-{dtype}", partial(_bias, device, dtype, rows // 2, width // 2))


def conv_checks(device: torch.device) -> Iterator[Check]:
    """Yield checks of convolutions and both gradients, by MIOpen (cuDNN) and by torch's own kernels."""
    channels, height, width = (128, 64, 72) if device.type == "cuda" else (8, 16, 24)
    for number, (library, dtype) in enumerate(product(("miopen", "native"), FLOATS)):
        for side in (3, 1):
            sizes = (channels, height, width, side)
            run = partial(convolution, device, dtype, library == "miopen", sizes, scale=2.0**-number)
            yield Check(f"conv.{library}.{side}x{side}-{dtype}", run, CONV_TIMEOUT_S)


def _library() -> str:
    """Check that torch prefers rocBLAS, and return a remark for the result.

    It is called only if hipBLASLt is disabled.
    """
    library = hipblaslt.preferred()
    if library != "cublas":
        raise WrongAnswerError(f"hipBLASLt is switched off, but torch still prefers {library}")
    return "hipBLASLt is off: torch prefers rocBLAS"


@cache
def _problem(sizes: Sizes, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return float64 operands [M, K] and [K, N] and their product, which is exact in float32."""
    rows, inner, columns = sizes
    a_MK, b_KN = whole_numbers((rows, inner), limit, seed=1), whole_numbers((inner, columns), limit, seed=2)
    return a_MK, b_KN, (a_MK @ b_KN).float()


def _tolerance(dtype: str) -> float:
    return 0.0 if dtype == "fp32" else ROUNDINGS * torch.finfo(FLOATS[dtype]).eps


def _laid_out(matrix: Tensor, letter: str) -> Tensor:
    """Return the same matrix; for "T" it is stored by columns, so that BLAS has to transpose it."""
    return matrix.t().contiguous().t() if letter == "T" else matrix


def products(device: torch.device, dtype: str, layout: str, shapes: tuple[Sizes, ...], *, scale: float) -> None:
    """Check a matrix product for each size (M, K, N). ``layout`` has a letter for each operand, see ``_laid_out``."""
    for sizes in shapes:
        a_MK, b_KN, wanted_MN = _problem(sizes, LIMITS[dtype])
        a = _laid_out((a_MK * scale).to(FLOATS[dtype]).to(device), layout[0])
        b = _laid_out(b_KN.to(FLOATS[dtype]).to(device), layout[1])
        what = f"{layout} product {sizes} {dtype}"
        expect(partial(torch.matmul, a, b), wanted_MN * scale, what, _tolerance(dtype), a)


def _twice(device: torch.device, dtype: str, side: int) -> None:
    a_MK, b_KN, wanted_MN = _problem((side, side, side), LIMITS[dtype])
    a, b = a_MK.to(FLOATS[dtype]).to(device), b_KN.to(FLOATS[dtype]).to(device)
    first = a @ b
    second = (-a) @ b
    judge(first, wanted_MN, f"first of two products {dtype}", _tolerance(dtype))
    judge(second, -wanted_MN, f"second of two products {dtype}", _tolerance(dtype))


def _batched(device: torch.device, dtype: str) -> None:
    a_BMK, b_BKN = whole_numbers((6, 77, 64), LIMITS[dtype], seed=3), whole_numbers((6, 64, 130), LIMITS[dtype], seed=4)
    bias_BMN = whole_numbers((6, 77, 130), LIMITS[dtype], seed=5)
    a, b, bias = (tensor.to(FLOATS[dtype]).to(device) for tensor in (a_BMK, b_BKN, bias_BMN))
    wanted, tolerance = torch.bmm(a_BMK, b_BKN), _tolerance(dtype)
    expect(lambda: torch.bmm(a, b), wanted, f"bmm {dtype}", tolerance, a)
    expect(lambda: torch.baddbmm(bias, -a, b), bias_BMN - wanted, f"baddbmm {dtype}", tolerance, a)


def _bias(device: torch.device, dtype: str, rows: int, width: int) -> None:
    a_MK, b_KN, wanted_MN = _problem((rows, 64, width), LIMITS[dtype])
    bias_N = whole_numbers((width,), LIMITS[dtype], seed=6)
    a, b, bias = (tensor.to(FLOATS[dtype]).to(device) for tensor in (a_MK, b_KN, bias_N))
    wanted, tolerance = bias_N.float(), _tolerance(dtype)
    expect(lambda: torch.addmm(bias, a, b), wanted + wanted_MN, f"addmm {dtype}", tolerance, a)
    expect(lambda: F.linear(-a, b.t(), bias), wanted - wanted_MN, f"linear with bias {dtype}", tolerance, a)


@cache
def _convolved(channels: int, height: int, width: int, side: int) -> tuple[Tensor, ...]:
    """Return image, weight and gradient of the result, then the result and the gradients of image and weight."""
    x_BCHW = whole_numbers((1, channels, height, width), 4, seed=7).requires_grad_()
    weight = whole_numbers((channels, channels, side, side), 4, seed=8).requires_grad_()
    grad_BCHW = whole_numbers((1, channels, height, width), 4, seed=9)
    y_BCHW = F.conv2d(x_BCHW, weight, padding=side // 2)
    found = torch.autograd.grad(y_BCHW, (x_BCHW, weight), grad_BCHW)
    return x_BCHW.detach(), weight.detach(), grad_BCHW, y_BCHW.detach(), *found


def convolution(
    device: torch.device, dtype: str, through_library: bool, sizes: tuple[int, int, int, int], *, scale: float
) -> None:
    """Check a convolution and both gradients. ``sizes``: channels, height, width, side of the kernel."""
    x_BCHW, weight, grad_BCHW, wanted_y, wanted_dx, wanted_dw = _convolved(*sizes)
    tolerance = CONV_TOLERANCES[dtype] * torch.finfo(FLOATS[dtype]).eps
    x = (x_BCHW * scale).to(FLOATS[dtype]).to(device).requires_grad_()
    w = weight.to(FLOATS[dtype]).to(device).requires_grad_()
    grad = (grad_BCHW * scale).to(FLOATS[dtype]).to(device)
    poison(device, x.numel() * x.element_size())
    with torch.backends.cudnn.flags(enabled=through_library, benchmark=False, allow_tf32=False):
        y = F.conv2d(x, w, padding=sizes[3] // 2)
        poison(device, x.numel() * x.element_size(), w.numel() * w.element_size())
        dx, dw = torch.autograd.grad(y, (x, w), grad)
        synchronize(device)
    what = f"convolution {sizes[3]}x{sizes[3]} {dtype}"
    judge(y, wanted_y * scale, what, tolerance)
    judge(dx, wanted_dx * scale, f"{what}, gradient of the input", tolerance)
    judge(dw, wanted_dw * scale * scale, f"{what}, gradient of the weight", tolerance)
