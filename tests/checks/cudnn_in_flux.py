"""Tries an attention route of torch with memory layouts of FLUX.1, each row of the table in a separate process.

usage: python -m tests.checks.cudnn_in_flux [--route cudnn] [--toy] [--timeout-s 40] [--at-once 3]

A row has the layouts of queries, keys and values (``lora_rocm/checks/attention_layouts.py``), and the layouts of the
output's gradient that follow one another. The shapes are FLUX.1's at 1,024 px: 24 heads of 128, 4,608 tokens, bf16. The
first word of each line is

ok: all gradients are near the gradients of plain attention in float32.
wrong: some are not; the line names the first one, and its error relative to the norm.
crash: the process ended, with an error of the device or by a signal.
absent: torch has no such route here.

If torch reads each gradient with the strides of the first one, then exactly the rows with two layouts of the gradient
fail. ``--toy`` rehearses on the CPU, with few tokens. The exit code is 0 if each process gave an answer or crashed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from lora_rocm.checks.attention_layouts import InputLayouts, Layout, laid_out
from lora_rocm.checks.selftest_attention import NO_BACKEND
from lora_rocm.device.attention import ROUTES, grouped

HEADS, TOKENS, WIDTH = 24, 4608, 128
TOY = (2, 96, 64)
LARGEST = 0.02
"""Largest error of a correct gradient, relative to the norm. Four roundings to bf16 give 0.003."""
TAIL = 200  # characters of a crash's last line


@dataclass(frozen=True)
class Row:
    """A row of the table. gradients: layouts of the output's gradient, in turn."""

    inputs: InputLayouts
    gradients: tuple[Layout, ...]
    where: str

    @property
    def name(self) -> str:
        return f"{'/'.join(self.inputs)} {','.join(self.gradients)}"


PACKED = InputLayouts("tokens", "tokens", "tokens")
OURS = InputLayouts("tokens", "tokens", "wide")
MERGED = InputLayouts("wide", "wide", "wide")
PLAIN = InputLayouts("heads", "heads", "heads")
ROWS = (
    Row(PLAIN, ("heads",), "the self-test"),
    Row(PACKED, ("tokens",), "our blocks with two streams"),
    Row(OURS, ("tokens",), "our blocks with one stream"),
    Row(MERGED, ("tokens",), "merged projections without rotation"),
    Row(PACKED, ("wide",), "diffusers' blocks with one stream alone"),
    Row(OURS, ("wide",), "our blocks with one stream before, if proj_out is trained"),
    Row(PACKED, ("expanded",), "the sum of an output"),
    Row(PACKED, ("wide", "tokens"), "diffusers: blocks with one stream come first in the backward pass"),
    Row(PACKED, ("tokens", "wide"), "the same in the other order"),
    Row(PACKED, ("tokens", "heads"), "contiguous gradients after packed ones"),
    Row(PLAIN, ("heads", "tokens"), "packed gradients after contiguous ones"),
)


def tried(row: Row, route: str, toy: bool) -> str:
    """Return the line of a row: compute its gradients in this process."""
    device, (heads, tokens, width) = torch.device("cpu" if toy else "cuda"), TOY if toy else (HEADS, TOKENS, WIDTH)
    own = torch.Generator(device).manual_seed(0)

    def random() -> Tensor:
        return torch.randn(1, heads, tokens, width, device=device, generator=own).to(torch.bfloat16)

    values, given = [random() for _ in range(3)], random()
    q, k, v = (laid_out(tensor, its).requires_grad_() for tensor, its in zip(values, row.inputs, strict=True))
    try:
        with sdpa_kernel([ROUTES[route]]):
            output = F.scaled_dot_product_attention(q, k, v)
    except RuntimeError as error:
        if any(words in str(error) for words in NO_BACKEND):
            return f"absent  {row.name}: {row.where}"
        raise
    for number, layout in enumerate(row.gradients, 1):
        wanted = given if layout != "expanded" else torch.ones((), dtype=given.dtype, device=device).expand_as(given)
        gradient = wanted if layout == "expanded" else laid_out(given, layout)
        found = torch.autograd.grad(output, (q, k, v), gradient, retain_graph=number < len(row.gradients))
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a fault belongs to this gradient
        for name, one, other in zip("qkv", found, _correct(values, wanted), strict=True):
            error = float((one.float() - other).norm() / other.norm())
            if not error <= LARGEST:
                return f"wrong   {row.name}: {row.where}; gradient of {name} for {number}. {layout}: off by {error:.2g}"
    return f"ok      {row.name}: {row.where}"


def _correct(values: Sequence[Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients by plain attention in float32, some heads at a time."""
    leaves = [tensor.float().requires_grad_() for tensor in values]
    output = grouped()(*leaves, False, None)
    return torch.autograd.grad(output, leaves, gradient.float().contiguous())


def in_a_process(row: Row, command: Sequence[str], timeout_s: float) -> str:
    """Return the line of a row, computed by a separate process; ``command`` is without the row's name."""
    try:
        ended = subprocess.run(
            [*command, "--only", row.name], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"crash   {row.name}: {row.where}; no end after {timeout_s:g} s"
    lines = [line for line in ended.stdout.splitlines() if row.name in line]
    if ended.returncode == 0 and lines:
        return lines[-1]
    last = ended.stderr.strip().splitlines() or [""]
    named = next((line for line in reversed(last) if "rror" in line), last[-1])
    return f"crash   {row.name}: {row.where}; exit code {ended.returncode}: {named[:TAIL]}"


def lines_of(rows: Sequence[Row], command: Sequence[str], timeout_s: float, at_once: int) -> Iterator[str]:
    """Yield a line for each row, in order; ``at_once`` processes compute at a time."""
    with ThreadPoolExecutor(at_once) as processes:
        yield from processes.map(lambda row: in_a_process(row, command, timeout_s), rows)


def main() -> int:
    """Print the table, or the line of one row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--route", choices=sorted(ROUTES), default="cudnn")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--timeout-s", type=float, default=40.0)
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--only", choices=[row.name for row in ROWS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only is not None:
        _say(tried(next(row for row in ROWS if row.name == options.only), options.route, options.toy))
        return 0
    if not options.toy:
        cudnn = torch.backends.cudnn.version()
        _say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {cudnn}, route {options.route}")
    command = [sys.executable, "-m", "tests.checks.cudnn_in_flux", "--route", options.route]
    command += ["--toy"] if options.toy else []
    for line in lines_of(ROWS, command, options.timeout_s, options.at_once):
        _say(line)
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
