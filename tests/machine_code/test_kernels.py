"""Every Triton kernel of the program, run as the machine code of AMD cards and compared with its eager
implementation.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from lora_rocm.checks import kernel_check
from lora_rocm.checks.kernel_check import (
    CASES,
    FINGERPRINTS,
    IN_EIGHT_BITS,
    IN_FP16,
    LARGE,
    SMALL,
    Case,
    ExactCase,
    first_wrong,
)
from lora_rocm.hardware.archs import triton_takes, triton_versions
from lora_rocm.kernels import eight_bit
from lora_rocm.kernels.gated import Activation, activated
from lora_rocm.kernels.quantised import quantised
from lora_rocm.kernels.rotation import rotated

triton = pytest.importorskip("triton")

from tests.machine_code.card import Card, in_use  # noqa: E402  (needs triton)

ROOT = Path(__file__).parents[2]
QUICK = (("gfx1100", "bfloat16"), ("gfx942", "float16"))
ARCHS = ("gfx1100", "gfx942", "gfx1151", "gfx1201", "gfx1030", "gfx1010", "gfx90a", "gfx908", "gfx950", "gfx906")
FORMATS = ("bfloat16", "float16", "float32")
LARGE_ARCHS = ("gfx1100", "gfx1201", "gfx942")
OF_EIGHT_BITS = [case for case in IN_EIGHT_BITS if isinstance(case, ExactCase)]
"""The products themselves are torch's, and their sums of int8 are in float32 on the CPU."""
TINY: tuple[Case | ExactCase, ...] = (*SMALL, FINGERPRINTS, *OF_EIGHT_BITS)
OF_FORMAT = {"float16": IN_FP16}
OF_BFLOAT16 = {"activated_forward", "activated_backward"}
TOO_LARGE = (1, 320, 160, 164)


def skip_refused(arch: str) -> None:
    if triton_takes(triton.__version__, arch) is False:
        pytest.skip(f"Triton {triton.__version__} refuses {arch}; {triton_versions(arch)} compile for it")


def kernels() -> set[str]:
    """The names of all kernels of the package."""
    found = set()
    for path in (ROOT / "lora_rocm").rglob("*.py"):
        if "@triton.jit" not in path.read_text(encoding="utf-8"):
            continue
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        jitted = {name for name, value in vars(module).items() if isinstance(value, triton.JITFunction)}
        found |= {name for name in jitted if not name.startswith("_")}  # the others are parts of kernels
    return found


def run(card: Card, cases: Sequence[Case | ExactCase], dtype: str) -> str | None:
    with in_use(card):
        return first_wrong(torch.device("cpu"), getattr(torch, dtype), cases)


@pytest.mark.parametrize(("arch", "dtype"), QUICK)
def test_every_kernel_is_right_in_machine_code(arch: str, dtype: str) -> None:
    card = Card(arch)
    assert run(card, (*TINY, *OF_FORMAT.get(dtype, ())[:1]), dtype) is None
    assert set(card.launched) == kernels() - (set() if dtype == "bfloat16" else OF_BFLOAT16)


def test_a_wrong_rotation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the codes of inputs, and in the gradient that is rotated back."""
    (case,) = [case for case in OF_EIGHT_BITS if "eight_bit.scaled_sums: int8" in case.kernels]
    monkeypatch.setattr(eight_bit, "rotated", lambda x, group: rotated(x, group // 4 if group == 64 else group))
    wrong = run(Card("gfx1201"), [case], "bfloat16")
    assert wrong is not None and sorted(set(re.findall(r"codes|sums|256|64|16", wrong))) == ["64", "codes", "sums"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_is_right_on_the_other_cards_and_in_the_other_formats(arch: str, dtype: str) -> None:
    skip_refused(arch)
    assert run(Card(arch), (*TINY, *OF_FORMAT.get(dtype, ())[:1]), dtype) is None


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("arch", LARGE_ARCHS)
def test_kernels_are_right_at_the_widths_of_a_model(arch: str, dtype: str) -> None:
    skip_refused(arch)
    cases = [case for case in LARGE if case.shapes[0] != TOO_LARGE]
    assert len(cases) == len(LARGE) - 1
    assert run(Card(arch), [*cases, *OF_FORMAT.get(dtype, ())[1:]], dtype) is None


@pytest.mark.parametrize("name", ["int8", "fp8", "nf4"])
def test_unpacked_weights_have_the_bits_of_plain_pytorch(name: str) -> None:
    layer = torch.nn.Linear(136, 64, bias=False).bfloat16().requires_grad_(False)
    packed = quantised(name, "").packed(layer)
    plain = packed.dense(torch.bfloat16)
    with in_use(Card("gfx1100")):
        assert torch.equal(packed.dense(torch.bfloat16, "triton"), plain)
    assert not torch.equal(layer.weight, plain), "the control"


@pytest.mark.parametrize(("activation", "approximate"), [("gelu", "none"), ("gelu-tanh", "tanh")])
def test_slopes_kept_as_bytes_are_those_of_the_activation(activation: Activation, approximate: str) -> None:
    g = torch.linspace(-8, 8, 1500).bfloat16()
    exact = g.double().requires_grad_()
    wanted = torch.nn.functional.gelu(exact, approximate=approximate)
    (slopes,) = torch.autograd.grad(wanted.sum(), exact)
    leaf = g.clone().requires_grad_()
    with in_use(Card("gfx1100")):
        output = activated(activation, "triton", leaf.clone())
        (found,) = torch.autograd.grad(output, leaf, torch.ones_like(g))
    torch.testing.assert_close(output.double(), wanted, rtol=2**-8, atol=1e-6)
    off = found.double() - slopes
    rounded = slopes.bfloat16().double() - slopes
    assert off.abs().max() < 0.0025 + 2**-8 and abs(off.mean()) < 2e-4 and off.norm() < 2 * rounded.norm()
    assert found[:50].eq(0).all() and found[-50:].eq(1).all(), "the bytes have 0 and 1 exactly"
    assert (slopes * 200).floor().div(200).sub(slopes).mean().abs() > 2e-3, "the control: rounded down"


def outcome(card: Card, case: Case) -> list[torch.Tensor]:
    with in_use(card):
        made = kernel_check._KernelInputs(case, torch.device("cpu"), torch.bfloat16).outcome("triton", torch.bfloat16)
    return [tensor for _, tensor in made]


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=() if c is SMALL[5] else pytest.mark.slow) for c in SMALL]
)
@pytest.mark.parametrize("arch", ("gfx1100", "gfx942"))
def test_no_kernel_reads_a_register_that_it_did_not_write(arch: str, case: Case) -> None:
    one, other = (outcome(Card(arch, noise), case) for noise in (1, 2))
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def test_no_kernel_multiplies_matrices() -> None:
    """Matrix instructions are not modelled."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "lora_rocm").rglob("*.py")]
    with_kernels = [source for source in sources if "@triton.jit" in source]
    assert with_kernels and not any("tl.dot" in source for source in with_kernels)


def test_the_cases_hold_every_case_of_the_check() -> None:
    assert set(CASES) == {*SMALL, *LARGE, FINGERPRINTS}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("folder", os.environ.get("LORA_ROCM_OTHER_TRITON", "").split(os.pathsep))
def test_kernels_are_right_as_another_triton_compiles_them(folder: str) -> None:
    if not folder:
        pytest.skip("LORA_ROCM_OTHER_TRITON names no folder")
    command = [sys.executable, "-m", "pytest", str(Path(__file__).parent), "-m", "not gpu", "-k", "not another_triton"]
    env = {**os.environ, "PYTHONPATH": folder, "LORA_ROCM_OTHER_TRITON": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, encoding="utf-8", timeout=3600)
    assert done.returncode == 0, done.stdout[-3000:]
