"""Compares the project's Triton kernels with the eager implementations, on the run's device and in its dtype.

The kernels run on GPUs and compilers with which they were not tested. So before they are used, the kernels of the run's
step are compiled and compared here, forward and backward. Integer kernels must match bit for bit. If a kernel fails,
the run uses the eager implementations and sends a notice (``kernel_choice``). A case that passed is not compared again
until its code, the libraries, the driver or the GPU change.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from lora_rocm.checks.kernel_proof import Proof, source_of
from lora_rocm.checks.packed_cases import EXACT, codes_of, packed_products
from lora_rocm.checks.selftest_base import Check, WrongAnswerError, poison
from lora_rocm.checks.selftest_base import first_wrong as first_wrong_of
from lora_rocm.device.torch_errors import device_fault, out_of_memory
from lora_rocm.kernels.backend import BROKEN, Implementation, nothing_plain, triton_version
from lora_rocm.kernels.fingerprint import add_fingerprints, compare, renew
from lora_rocm.kernels.fingerprint_weights import TILE
from lora_rocm.kernels.gated import activated, gated
from lora_rocm.kernels.norms import Branch, RowNorm, add_branch, add_layer_norm, add_norm, group_norm, residual
from lora_rocm.kernels.rotary import Rotation, norm_rotary
from lora_rocm.kernels.token_loss import to_loss_gradient

TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Maximum error of each number, compared with the eager float32 result, relative to its magnitude plus the root mean
square of all numbers. Rounding causes at most half of this. A number that was not written or not masked is off by 0.5.
"""
SEED = 20
CANNOT = (*BROKEN, subprocess.SubprocessError)
"""Errors, in addition to Triton's own, of a compiler that does not know the GPU or lacks a component (a C compiler,
headers, a linker, a driver library, or a writable folder).
"""
REFUSED = "PassManager::run failed"
"""Triton's whole error message for an unknown GPU. Triton writes the reason to standard error, in 70 lines."""

Outputs = tuple[Tensor, ...]
Run = Callable[..., Tensor | Outputs]
Made = TypeVar("Made")


@dataclass(frozen=True)
class Case:
    """One call of a kernel, to compare with its eager implementation.

    kernel: name of the kernels that it launches (see ``backend.launches``).
    run: function (implementation, norm, *inputs) -> outputs.
    norm: creates the norm layer, or None.
    mean: mean of the random inputs. Inputs with four dimensions are in channels_last.
    """

    name: str
    kernel: str
    run: Run
    shapes: tuple[tuple[int, ...], ...]
    norm: Callable[[], nn.Module] | None = None
    mean: float = 0.0

    @property
    def kernels(self) -> tuple[str, ...]:
        return (self.kernel,)

    def __str__(self) -> str:
        return f"{self.name} of {' and '.join('x'.join(map(str, shape)) for shape in self.shapes)}"


@dataclass(frozen=True)
class ExactCase:
    """A call of integer kernels, for which both implementations must give identical results.

    run: function (implementation, device) -> outputs by name.
    kernels: names of the kernels, all of one module (see ``backend.launches``). Other cases may run all but the first.
    """

    name: str
    run: Callable[[Implementation, torch.device], dict[str, Tensor]]
    kernels: tuple[str, ...] = ("fingerprint.add_fingerprints: int32",)

    def __str__(self) -> str:
        return self.name


def _gate(implementation: Implementation, norm: None, ag: Tensor) -> Tensor:
    return gated("gelu", implementation, ag.clone())  # a copy, because the backward pass overwrites its input


def _swiglu(implementation: Implementation, norm: None, ga: Tensor) -> Tensor:
    g, a = ga.clone().chunk(2, dim=-1)  # as a merged product gives them
    return gated("silu", implementation, a, g)


def _geglu_by_tanh(implementation: Implementation, norm: None, a: Tensor, g: Tensor) -> Tensor:
    return gated("gelu-tanh", implementation, a.clone(), g.clone())


def _gelu(implementation: Implementation, norm: None, g: Tensor) -> Tensor:
    return activated("gelu", implementation, g.clone())


def _gelu_by_tanh(implementation: Implementation, norm: None, g: Tensor) -> Tensor:
    return activated("gelu-tanh", implementation, g.clone())


def _norm_alone(implementation: Implementation, norm: nn.LayerNorm, x: Tensor) -> Tensor:
    return add_layer_norm(x, None, norm, implementation)[1]


def _sum_and_norm(
    implementation: Implementation, norm: nn.LayerNorm, x: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor]:
    return add_layer_norm(x, delta, norm, implementation)


def _modulated_norm(implementation: Implementation, norm: None, x: Tensor, y: Tensor, *rows: Tensor) -> Outputs:
    gate, scale, shift = rows
    return add_norm(x, Branch(y, gate), RowNorm(1 + scale, shift, 1e-6, centred=True), implementation)


def _norm_of_stream(implementation: Implementation, norm: None, x: Tensor, y: Tensor, *rows: Tensor) -> Outputs:
    return _modulated_norm(implementation, norm, x.float(), y, *rows)


def _sandwich_norm(
    implementation: Implementation, norm: None, x: Tensor, y: Tensor, gate: Tensor, weight: Tensor
) -> Outputs:
    return add_norm(x, Branch(y, gate, 1e-5), RowNorm(weight, None, 1e-5), implementation)


def _sandwich_of_one_plus(
    implementation: Implementation, norm: None, x: Tensor, y: Tensor, gate: Tensor, weight: Tensor
) -> Outputs:
    rows = RowNorm(1 + weight.float(), None, 1e-5, dtype=weight.dtype)
    return add_norm(x, Branch(y, 1 + gate.float(), 1e-5), rows, implementation)


def _norm_by_rows(implementation: Implementation, norm: None, x: Tensor, *rows: Tensor) -> Outputs:
    scale, shift = rows
    return add_norm(x, None, RowNorm(1 + scale, shift, 1e-6, centred=True), implementation)


def _norm_by_rows_of_stream(implementation: Implementation, norm: None, x: Tensor, *rows: Tensor) -> Outputs:
    return _norm_by_rows(implementation, norm, x.float(), *rows)


def _rms_norm(implementation: Implementation, norm: None, x: Tensor, weight: Tensor) -> Outputs:
    return add_norm(x, None, RowNorm(weight, None, 1e-5), implementation)


def _sum_and_rms_norm(implementation: Implementation, norm: None, x: Tensor, y: Tensor, weight: Tensor) -> Outputs:
    return add_norm(x, Branch(y), RowNorm(weight, None, 1e-5), implementation)


def _gated_branch_of_stream(implementation: Implementation, norm: None, x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    return add_branch(x.float(), Branch(y, gate), implementation)


def _gated_branch(implementation: Implementation, norm: None, x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    return add_branch(x, Branch(y, gate), implementation)


def _normed_branch(implementation: Implementation, norm: None, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return add_branch(x, Branch(y, weight, 1e-5), implementation)


def _neighbours(implementation: Implementation, norm: nn.RMSNorm, text: Tensor, image: Tensor) -> Tensor:
    both = [(x, norm.weight) for x in (text, image)]
    return norm_rotary(both, 1e-6, _rotation(text, interleaved=True), implementation)


def _halves(implementation: Implementation, norm: nn.RMSNorm, qk: Tensor) -> Tensor:
    query = qk.chunk(2, dim=2)[0]  # as a merged product gives it
    return norm_rotary([(query, norm.weight)], 1e-6, _rotation(qk, interleaved=False), implementation)


def _token_loss(cap: float | None, implementation: Implementation, norm: None, logits: Tensor) -> Outputs:
    """Return two tensors: the logits multiplied by the gradient of their loss, and the losses.

    The gradient of the first tensor is the gradient of the loss.
    """
    labels = torch.arange(-1, len(logits) - 1, device=logits.device) * 5 % logits.shape[1]
    labels[0] = -100
    gradient = logits.detach().clone()
    losses = to_loss_gradient(gradient, labels, -100, implementation, 1.5, cap)
    return gradient * logits, losses + logits.sum() * 0


def _turned_alone(implementation: Implementation, norm: None, qk: Tensor) -> Tensor:
    turn = _rotation(qk, interleaved=False)
    rounded = Rotation(turn.cos.to(qk.dtype), turn.sin.to(qk.dtype), interleaved=False)  # as language models have it
    return norm_rotary([(qk.chunk(2, dim=2)[0], None)], 0.0, rounded, implementation)


def _rotation(x: Tensor, interleaved: bool) -> Rotation:
    """Return rotation angles in the layout that model families use for ``interleaved`` pairs or for halves."""
    tokens, dim = 2 * x.shape[1] if interleaved else x.shape[1], x.shape[3]
    angles = torch.arange(tokens * dim, dtype=torch.float32, device=x.device).view(tokens, dim)
    pairs = slice(None, None, 2) if interleaved else slice(dim // 2)
    return Rotation(angles.cos()[:, pairs], angles.sin()[:, pairs], interleaved)


def _group_norm(implementation: Implementation, norm: nn.GroupNorm, x: Tensor) -> Tensor:
    return group_norm(x, norm, implementation)[0]


def _group_norm_and_input(implementation: Implementation, norm: nn.GroupNorm, x: Tensor) -> tuple[Tensor, Tensor]:
    return group_norm(x, norm, implementation, silu=False)


def _shifted_group_norm(
    implementation: Implementation, norm: nn.GroupNorm, x: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    return group_norm(x, norm, implementation, shift)


def _residual(implementation: Implementation, norm: nn.GroupNorm, x: Tensor, y: Tensor) -> Tensor:
    return residual(x, y, norm.bias, implementation)


def _fingerprints(implementation: Implementation, device: torch.device) -> dict[str, Tensor]:
    """Run all fingerprint kernels on buffers, one with a wrong fingerprint, and return their results by name."""
    rng = torch.Generator().manual_seed(SEED)
    words = [torch.randint(-(2**31), 2**31, (count,), generator=rng).to(device, torch.int32) for count in WORDS]
    found_K = torch.zeros(len(WORDS), dtype=torch.int64, device=device)
    changed_K, stays_K = torch.zeros(len(WORDS), device=device), torch.ones(len(WORDS), device=device)
    changed, held = torch.zeros((), device=device), torch.ones((), device=device)
    # one mismatch, in the second sum, has to be found
    add_fingerprints(words, found_K, implementation)
    sums_K, known_K = found_K.clone(), found_K.clone()
    known_K[1] += 1
    stays_K[2] = 0
    compare(found_K, known_K, changed_K, changed, implementation)
    # renew all sums but the third
    add_fingerprints(words, found_K, implementation)
    known_K[2] += 1
    renew(found_K, known_K, held, stays_K, implementation)
    return {"sums": sums_K, "verdicts": changed_K, "verdict": changed, "sums that stay": known_K, "left": found_K}


def _groups(number: int, channels: int) -> Callable[[], nn.Module]:
    return lambda: nn.GroupNorm(number, channels)


def _heads(dim: int) -> Callable[[], nn.Module]:
    return lambda: nn.RMSNorm(dim)


PACKED = {name: partial(packed_products, name) for name in ("int8", "fp8", "nf4")}
SMALL: tuple[Case, ...] = (
    Case("GEGLU", "gated.gated: gelu", _gate, ((3, 5, 140),)),
    Case(
        "LayerNorm",
        "norms.add_norm: nothing added, LayerNorm",
        _norm_alone,
        ((3, 5, 70),),
        lambda: nn.LayerNorm(70),
        mean=3,
    ),
    Case(
        "sum and LayerNorm",
        "norms.add_norm: sum, LayerNorm",
        _sum_and_norm,
        ((4, 70), (4, 70)),
        lambda: nn.LayerNorm(70),
        mean=1.5,
    ),
    Case("GroupNorm", "norms.group_norm: one input, SiLU", _group_norm, ((2, 72, 9, 8),), _groups(4, 72), mean=5),
    Case(
        "GroupNorm without SiLU",
        "norms.group_norm: one input, no SiLU",
        _group_norm_and_input,
        ((2, 72, 5, 8),),
        _groups(4, 72),
        mean=5,
    ),
    Case(
        "sum and GroupNorm",
        "norms.group_norm: sum, SiLU",
        _shifted_group_norm,
        ((2, 72, 9, 7), (2, 72)),
        _groups(4, 72),
        mean=2.5,
    ),
    Case("residual sum", "norms.residual: bias", _residual, ((2, 72, 5, 8), (2, 72, 5, 8)), _groups(4, 72)),
    Case("SwiGLU", "gated.gated: silu", _swiglu, ((3, 5, 140),)),
    Case(
        "gated sum and modulated LayerNorm",
        "norms.add_norm: gated sum, LayerNorm, rows",
        _modulated_norm,
        (*[(2, 3, 70)] * 2, *[(2, 70)] * 3),
        mean=1.5,
    ),
    Case(
        "gated sum with an RMSNorm and RMSNorm",
        "norms.add_norm: gated sum with an RMSNorm, RMSNorm, rows",
        _sandwich_norm,
        (*[(2, 3, 70)] * 2, (2, 70), (70,)),
        mean=1.5,
    ),
    Case(
        "sum with an RMSNorm",
        "norms.add_branch: gated sum with an RMSNorm, no norm",
        _normed_branch,
        ((4, 70), (4, 70), (70,)),
    ),
    Case(
        "heads of two streams turned by neighbours",
        "rotary.norm_rotary: neighbours, norm",
        _neighbours,
        ((2, 3, 3, 12), (2, 3, 3, 12)),
        _heads(12),
    ),
    Case("heads turned by halves", "rotary.norm_rotary: halves, norm", _halves, ((2, 3, 6, 12),), _heads(12)),
    *(Case(f"product of {name}", f"quantised.unpack: {name}", run, ((5, 136),)) for name, run in PACKED.items()),
    Case("gated sum", "norms.add_branch: gated sum, no norm, rows", _gated_branch, (*[(2, 3, 70)] * 2, (2, 70))),
    Case("GEGLU by tanh", "gated.gated: gelu-tanh", _geglu_by_tanh, ((3, 5, 70), (3, 5, 70))),
    Case(
        "heads turned by halves without a norm", "rotary.norm_rotary: halves, no norm", _turned_alone, ((2, 3, 6, 12),)
    ),
    Case(
        "sum with an RMSNorm and RMSNorm, of 1 + weight",
        "norms.add_norm: gated sum with an RMSNorm, RMSNorm",
        _sandwich_of_one_plus,
        (*[(4, 70)] * 2, (70,), (70,)),
    ),
    Case("loss of tokens", "token_loss.to_loss_gradient: no cap", partial(_token_loss, None), ((3, 4190),)),
    Case("loss of tokens with a cap", "token_loss.to_loss_gradient: cap", partial(_token_loss, 2.0), ((2, 70),)),
    Case("GELU", "gated.activated: gelu", _gelu, ((3, 5, 140),)),
    Case("GELU by tanh", "gated.activated: gelu-tanh", _gelu_by_tanh, ((3, 5, 70),)),
    Case(
        "modulated LayerNorm",
        "norms.add_norm: nothing added, LayerNorm, rows",
        _norm_by_rows,
        ((2, 3, 70), *[(2, 70)] * 2),
        mean=1.5,
    ),
    Case("RMSNorm", "norms.add_norm: nothing added, RMSNorm", _rms_norm, ((4, 70), (70,))),
    Case(
        "RMSNorm with a weight for each sample",
        "norms.add_norm: nothing added, RMSNorm, rows",
        _rms_norm,
        ((2, 3, 70), (2, 70)),
    ),
    Case("sum and RMSNorm", "norms.add_norm: sum, RMSNorm", _sum_and_rms_norm, (*[(4, 70)] * 2, (70,))),
    Case(
        "sum with an RMSNorm with a gate for each sample",
        "norms.add_branch: gated sum with an RMSNorm, no norm, rows",
        _normed_branch,
        (*[(2, 3, 70)] * 2, (2, 70)),
    ),
)
"""Cases with odd sizes: no row, width or number of pixels is a multiple of the kernel's block."""
LARGE: tuple[Case, ...] = (
    replace(SMALL[0], shapes=((3, 53, 2560),)),
    replace(SMALL[1], shapes=((3, 53, 640),), norm=lambda: nn.LayerNorm(640)),
    replace(SMALL[2], shapes=((159, 1280), (159, 1280)), norm=lambda: nn.LayerNorm(1280)),
    replace(SMALL[3], shapes=((1, 320, 160, 164),), norm=_groups(32, 320)),
    replace(SMALL[4], shapes=((2, 1280, 16, 15),), norm=_groups(32, 1280)),
    replace(SMALL[5], shapes=((2, 640, 32, 31), (2, 640)), norm=_groups(32, 640)),
    replace(SMALL[6], shapes=((2, 640, 32, 31), (2, 640, 32, 31)), norm=_groups(32, 640)),
    replace(SMALL[7], shapes=((3, 21, 20480),)),
    replace(SMALL[8], shapes=(*[(3, 21, 3072)] * 2, *[(3, 3072)] * 3)),
    replace(SMALL[9], shapes=(*[(3, 21, 3840)] * 2, (3, 3840), (3840,))),
    replace(SMALL[10], shapes=((127, 3840), (127, 3840), (3840,))),
    replace(SMALL[11], shapes=((1, 61, 24, 128), (1, 61, 24, 128)), norm=_heads(128)),
    replace(SMALL[12], shapes=((1, 61, 32, 128),), norm=_heads(128)),
    replace(SMALL[16], shapes=(*[(3, 21, 3072)] * 2, (3, 3072))),
    replace(SMALL[17], shapes=((3, 21, 10240), (3, 21, 10240))),
    replace(SMALL[18], shapes=((1, 61, 64, 128),)),
    replace(SMALL[19], shapes=(*[(127, 2560)] * 2, (2560,), (2560,))),
    replace(SMALL[20], shapes=((7, 32064),)),
    Case("loss of tokens with a cap", "token_loss.to_loss_gradient: cap", partial(_token_loss, 30.0), ((7, 32064),)),
    replace(SMALL[22], shapes=((3, 21, 8192),)),
    replace(SMALL[23], shapes=((1, 61, 12288),)),
    replace(SMALL[24], shapes=((3, 21, 3072), *[(3, 3072)] * 2)),
    replace(SMALL[25], shapes=((127, 4096), (4096,))),
    replace(SMALL[26], shapes=((3, 21, 3840), (3, 3840))),
    replace(SMALL[27], shapes=(*[(127, 4096)] * 2, (4096,))),
    replace(SMALL[28], shapes=(*[(3, 21, 3840)] * 2, (3, 3840))),
    *(
        Case(f"product of {name}", f"quantised.unpack: {name}", run, ((1, 1152), (1024, 320)))
        for name, run in PACKED.items()
    ),
)
"""Cases with the widths of an SDXL UNet and of transformers, for which Triton generates different code. The largest
image uses the larger chunks. Only the widths of a vocabulary and of a head are multiples of the block.
"""
WORDS = (16, 3 * TILE + 48, TILE, 64 * TILE)
FINGERPRINTS = ExactCase("fingerprint of trained state", _fingerprints)
CASES: tuple[Case | ExactCase, ...] = (*SMALL, *LARGE, FINGERPRINTS)
IN_FP16 = (
    Case(
        "gated sum in float32 and modulated LayerNorm",
        "norms.add_norm: gated sum, LayerNorm, rows, float32 stream",
        _norm_of_stream,
        LARGE[8].shapes,
        mean=1.5,
    ),
    Case(
        "gated sum in float32",
        "norms.add_branch: gated sum, no norm, rows, float32 stream",
        _gated_branch_of_stream,
        LARGE[13].shapes,
    ),
    Case(
        "modulated LayerNorm of float32",
        "norms.add_norm: nothing added, LayerNorm, rows, float32 stream",
        _norm_by_rows_of_stream,
        LARGE[21].shapes,
        mean=1.5,
    ),
)
"""Further cases for float16 models, which have a residual stream in float32."""


IN_EIGHT_BITS: tuple[Case | ExactCase, ...] = (
    *(ExactCase(f"codes and scales of {name}", partial(codes_of, name), kernels) for name, kernels in EXACT.items()),
    *(
        Case(
            f"product in {name} with 64 and 1168 outputs",
            f"eight_bit.product: {name}",
            partial(packed_products, name, outputs=(64, 1168), compute=name),
            ((37, 144), (1037, 1536)),
        )
        for name in EXACT
    ),
)
"""Cases of runs with ``model.compute``. Only a run that names their kernels compares them: some GPUs stop at a product
of int8 matrices.
"""


def cases_for(kernels: Collection[str] | None, dtype: torch.dtype) -> tuple[Case | ExactCase, ...]:
    """Return the cases that test these kernels in a dtype, at the widths of real models.

    None returns all cases except ``IN_EIGHT_BITS``. A kernel variant without its own case is tested by all cases of its
    function. The fingerprint case is always included.
    """
    more = IN_FP16 if dtype is torch.float16 else ()
    if kernels is None:
        return (*CASES, *more)
    every = (*LARGE, FINGERPRINTS, *more, *(case for case in IN_EIGHT_BITS if case.kernels[0] in kernels))
    others = {*kernels} - {kernel for case in every for kernel in case.kernels}
    functions = {kernel.partition(":")[0] for kernel in others}
    return tuple(
        case
        for case in every
        if case is FINGERPRINTS
        or {*case.kernels} & {*kernels}
        or functions & {kernel.partition(":")[0] for kernel in case.kernels}
    )


def proof_of(case: Case | ExactCase, dtype: torch.dtype) -> Proof:
    """Return the record for a case. It is invalid after the kernel, its plain implementation or the check changes."""
    run = case.run.func if isinstance(case.run, partial) else case.run
    code = [source_of(part) for part in (run, _near, _exact, _KernelInputs, poison)]
    told = [str(case), *code, repr(TOLERANCE[dtype]), repr(getattr(case, "mean", 0.0))]
    return Proof(dtype, "\n".join(told), [case.kernels[0].partition(".")[0]])


def first_wrong(
    device: torch.device, dtype: torch.dtype, cases: Sequence[Case | ExactCase] | None = None
) -> str | None:
    """Compare the cases; return a text about the first kernel that fails, or None if all are correct.

    A kernel fails if it cannot be compiled or run, or if its results differ from its eager implementation.
    ``cases``: None means all cases for the dtype.

    Raises:
        RuntimeError: the device is full, or reported a fault, after which this process can no longer use it.
    """
    given = f" in {str(dtype).removeprefix('torch.')}"
    checks = (
        Check(str(case), partial(_exact, case, device))
        if isinstance(case, ExactCase)
        else Check(f"{case}{given}", partial(_near, case, device, dtype))
        for case in (cases_for(None, dtype) if cases is None else cases)
    )
    with nothing_plain(), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        wrong = first_wrong_of(checks)
    return None if wrong is None else " ".join(map(str, wrong))


def launched(case: Case | ExactCase, device: torch.device, dtype: torch.dtype) -> None:
    """Compute a case with its Triton kernels, and compare nothing."""
    if isinstance(case, ExactCase):
        case.run("triton", device)
    else:
        _KernelInputs(case, device, dtype).outcome("triton", dtype)


def _near(case: Case, device: torch.device, dtype: torch.dtype) -> None:
    given = _KernelInputs(case, device, dtype)
    wanted = given.outcome("eager", torch.float32)
    poison(device, *(tensor.numel() * dtype.itemsize for _, tensor in wanted))
    found = _computed(lambda: given.outcome("triton", dtype))
    for (what, one), (_, other) in zip(found, wanted, strict=True):
        size = other.abs() + other.square().mean().sqrt()
        off = float(((one - other).abs() / size).max())  # waits: a wrong kernel must not be used
        if not off <= TOLERANCE[dtype]:  # NaN fails, too
            told = f"{what} is off by {off:.2g} of its size; at most {TOLERANCE[dtype]:g} is allowed"
            raise WrongAnswerError(f"gives wrong numbers ({told})")


def _exact(case: ExactCase, device: torch.device) -> None:
    wanted, found = case.run("eager", device), _computed(lambda: case.run("triton", device))
    wrong = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    if wrong:
        raise WrongAnswerError(f"gives wrong numbers ({', '.join(wrong)})")


def _computed(compute: Callable[[], Made]) -> Made:
    """Run a kernel and return its result.

    Raises:
        WrongAnswerError: the kernel cannot be compiled or run. The text explains why.
        RuntimeError: the device is full, or reported a fault, after which this process can no longer use it.
    """
    from triton.errors import TritonError

    try:
        return compute()
    except (TritonError, *CANNOT) as error:
        if device_fault(error) is not None or out_of_memory(error) is not None:
            raise
        if REFUSED in str(error):
            unknown = (
                f"Triton {triton_version()}; most likely it does not know this GPU (Triton's message is in the log)"
            )
            raise WrongAnswerError(f"cannot be compiled by {unknown}") from error
        raise WrongAnswerError(f"raises an error ({type(error).__name__}: {_last_line(error)})") from error


class _KernelInputs:
    """Random inputs and output gradients of a case, on the device, the same for both implementations."""

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype) -> None:
        self._case, self._device, self._dtype = case, device, dtype
        self._rng = torch.Generator(device).manual_seed(SEED)
        with torch.random.fork_rng(devices=[]), torch.device(device):
            self._norm = None if case.norm is None else case.norm().requires_grad_(False).to(dtype)
        if self._norm is not None:
            for parameter in self._norm.parameters():
                parameter.copy_(self._normal(parameter.shape, dtype))
        self._inputs = [self._normal(shape, dtype, case.mean) for shape in case.shapes]

    def outcome(self, implementation: Implementation, dtype: torch.dtype) -> list[tuple[str, Tensor]]:
        """Run the case; return all outputs and the inputs' gradients as (name, float32 tensor)."""
        leaves = [tensor.to(dtype).detach().requires_grad_() for tensor in self._inputs]
        norm = None if self._norm is None else self._norm.to(dtype)
        outputs = self._case.run(implementation, norm, *leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        rng = torch.Generator(self._device).manual_seed(SEED + 1)
        weights = [torch.randn(output.shape, generator=rng, device=self._device) for output in outputs]
        torch.autograd.backward(outputs, [weight.to(self._dtype).to(dtype) for weight in weights])
        return list(self._named(outputs, leaves))

    def _named(self, outputs: tuple[Tensor, ...], leaves: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        for number, output in enumerate(outputs, 1):
            yield f"output {number}", output.detach().float()
        for number, leaf in enumerate(leaves, 1):
            assert leaf.grad is not None, "every input has a gradient"
            yield f"gradient {number}", leaf.grad.float()

    def _normal(self, shape: Sequence[int], dtype: torch.dtype, mean: float = 0.0) -> Tensor:
        drawn = (torch.randn(tuple(shape), generator=self._rng, device=self._device) + mean).to(dtype)
        return drawn.contiguous(memory_format=torch.channels_last) if drawn.ndim == 4 else drawn


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[-1][:200]
