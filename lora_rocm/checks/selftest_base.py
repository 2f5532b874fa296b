"""Base of all checks: the class of a check, problems with known answers, and the comparison with a GPU's result.

Inputs are integers (or multiples of 1/64) that float16 and bfloat16 represent exactly, so the CPU solves the same
problem in float64. Before a kernel runs, memory of the size of its result is filled with NaN and freed. If the kernel
does not write its whole result, NaN is read instead of an earlier correct result. Each variant of a problem is scaled
by another power of two, which is exact, so that the previous variant's answer is wrong for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NAN_BYTE = 0xFF  # two or four such bytes are a NaN in every float format


class WrongAnswerError(Exception):
    """The device's answer differs from the CPU's. The text gives the position and the difference."""


class NotHereError(Exception):
    """The check does not apply to this device. The text gives the reason."""


@dataclass(frozen=True)
class Check:
    """A check of the self-test.

    ``run`` raises ``WrongAnswerError`` or ``NotHereError``, or returns a remark for the result, or None.
    """

    name: str
    """Name in the format "group.detail"."""
    run: Callable[[], str | None]
    timeout_s: float = 60.0
    """Maximum duration in seconds. The first check of a group gets more, as it may compile kernels (see
    ``supervisor.selftest_runner``).
    """


@dataclass(frozen=True)
class Answers:
    """Known answers of several results of one call, float64 on the CPU.

    largest, norms: the largest magnitude and the norm of each one.
    """

    tensors: tuple[Tensor, ...]
    flat_N: Tensor
    largest: Tensor
    norms: Tensor

    @classmethod
    def of(cls, *tensors: Tensor) -> Answers:
        flat = [tensor.double().flatten() for tensor in tensors]
        return cls(tensors, torch.cat(flat), *_sizes(flat))


def all_right(found: Sequence[Tensor], answers: Answers, tolerance: float, norm_tolerance: float) -> bool:
    """Whether ``judge`` and ``judge_norm`` accept all results. The results are copied to the CPU at once.

    For the tolerances see ``judge`` and ``judge_norm``.
    """
    if [part.shape for part in found] != [answer.shape for answer in answers.tensors]:
        return False
    got_N = torch.cat([part.detach().flatten() for part in found]).to("cpu").double()
    largest, norms = _sizes((got_N - answers.flat_N).split([answer.numel() for answer in answers.tensors]))
    # Written so that NaN is wrong, too
    return bool((largest <= tolerance * answers.largest).all() and (norms <= norm_tolerance * answers.norms).all())


def _sizes(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the largest magnitude and the norm of each part."""
    return torch.stack([part.abs().max() for part in parts]), torch.stack([part.norm() for part in parts])


def first_wrong(checks: Iterable[Check]) -> tuple[str, WrongAnswerError] | None:
    """Run checks up to the first with a wrong answer; return its name and error, or None if all are correct."""
    for check in checks:
        try:
            check.run()
        except WrongAnswerError as error:
            return check.name, error
    return None


def judge(found: Tensor, wanted: Tensor, what: str, tolerance: float) -> None:
    """Compare a result with the known answer, element by element, on the CPU.

    Args:
        found: the result, on any device.
        wanted: the known answer on the CPU, float32 or float64.
        what: name of the result, for the message.
        tolerance: maximum error of a number, relative to the largest number of the known answer.

    Raises:
        WrongAnswerError: a number has a larger error or is not finite, or the shape is wrong.
    """
    got = found.detach().to("cpu").to(wanted.dtype)
    if got.shape != wanted.shape:
        raise WrongAnswerError(f"{what}: its shape is {tuple(got.shape)} instead of {tuple(wanted.shape)}")
    allowed = tolerance * float(wanted.abs().max())
    wrong = ~((got - wanted).abs() <= allowed)  # written so that NaN is wrong, too
    count = int(wrong.sum())
    if not count:
        return
    first = tuple(int(side) for side in wrong.nonzero()[0])
    if wanted.numel() > 1 and not got.any():
        raise WrongAnswerError(
            f"{what}: all {wanted.numel()} numbers are zero; {float(wanted[first]):.6g} was expected at {first}"
        )
    zeros, not_finite = int((got[wrong] == 0).sum()), int((~got[wrong].isfinite()).sum())
    raise WrongAnswerError(
        f"{what}: {count} of {wanted.numel()} numbers are wrong ({zeros} of them zero, {not_finite} not finite); "
        f"the first at {first}: {float(got[first]):.6g}, expected {float(wanted[first]):.6g} +- {allowed:.2g}"
    )


def judge_norm(found: Tensor, wanted: Tensor, what: str, tolerance: float) -> None:
    """Compare a result with the known answer by the norm of all errors, which includes errors that ``judge`` tolerates.

    Args:
        found: the result, on any device.
        wanted: the known answer on the CPU, float32 or float64.
        what: name of the result, for the message.
        tolerance: maximum norm of the error, relative to the norm of the known answer.

    Raises:
        WrongAnswerError: the error is larger, or not finite.
    """
    error = float((found.detach().to("cpu").to(wanted.dtype) - wanted).norm() / wanted.norm())
    if not error <= tolerance:
        raise WrongAnswerError(
            f"{what}: its error is {error:.2g} of the answer's norm; at most {tolerance:.2g} is allowed"
        )


def expect(run: Callable[[], Tensor], wanted: Tensor, what: str, tolerance: float, like: Tensor) -> None:
    """Fill memory with NaN, run a calculation in it, and ``judge`` the result.

    ``like``: a tensor with the result's device and dtype.
    """
    poison(like.device, wanted.numel() * like.element_size())
    judge(run(), wanted, what, tolerance)


def poison(device: torch.device, *sizes_bytes: int) -> None:
    """Fill memory with NaN and free it. The allocator will reuse it for tensors of these sizes."""
    spoilt = [torch.full((size,), NAN_BYTE, dtype=torch.uint8, device=device) for size in sizes_bytes]
    del spoilt


def whole_numbers(shape: tuple[int, ...], limit: int, seed: int) -> Tensor:
    """Return random integers from -limit to limit, excluding zero, as float64."""
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.randint(1, limit + 1, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.5, magnitude, -magnitude).double()


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a fault is raised in the check that caused it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_works(device: torch.device) -> bool:
    """Whether the device can still compute after an error."""
    try:
        return (torch.zeros(1, device=device) + 1).cpu().item() == 1.0  # waits: an error shows only then
    except RuntimeError:  # after an illegal access every call fails until the process ends
        return False
