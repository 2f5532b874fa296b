"""The check at load detects kernels that return wrong numbers, do not compile or crash the device, and accepts correct
ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lora_rocm.checks import kernel_choice
from lora_rocm.checks.kernel_check import (
    CASES,
    FINGERPRINTS,
    IN_FP16,
    LARGE,
    SMALL,
    TOLERANCE,
    Case,
    ExactCase,
    cases_for,
    first_wrong,
)  # fmt: skip
from lora_rocm.checks.kernel_choice import choose
from lora_rocm.kernels import backend
from lora_rocm.kernels.quantised import quantised
from tests.event_lines import hearing
from tests.wording import says, worded

pytest.importorskip("triton")
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def trusted(device: torch.device, dtype: torch.dtype, said: list[str]) -> bool:
    return choose(device, dtype, None, context=hearing(said)).triton


def with_kernel(case: Case, kernel: Callable[..., Any]) -> Case:
    """The case, with ``kernel(plain outputs)`` in place of the Triton kernel."""

    def run(form: str, norm: Any, *inputs: Tensor) -> Any:
        outputs = case.run("eager", norm, *inputs)
        return kernel(outputs) if form == "triton" else outputs

    return replace(case, run=run)


def sound(outputs: Any) -> Any:
    return outputs


class LastLine(torch.autograd.Function):
    """Multiplies the last line of the output, or of the gradient, by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.factor, y = backward, x.clone()
        y[-1] *= forward
        return y

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor, None, None]:
        dx = dy[0].clone()
        dx[-1] *= ctx.factor
        return dx, None, None


def spoiling(forward: float, backward: float) -> Callable[[Any], Any]:
    def kernel(outputs: Any) -> Any:
        first, *others = outputs if isinstance(outputs, tuple) else (outputs,)
        return (LastLine.apply(first, forward, backward), *others)

    return kernel


def raising(error: Exception) -> Callable[[Any], Any]:
    def kernel(outputs: Any) -> Any:
        raise error

    return kernel


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("number", range(len(SMALL)), ids=lambda number: SMALL[number].name)
def test_a_kernel_that_lies_is_named(number: int, dtype: torch.dtype) -> None:
    case = SMALL[number]
    assert first_wrong(CPU, dtype, [with_kernel(case, sound)]) is None, "the control"
    for kernel, what in ((spoiling(0, 1), "output 1"), (spoiling(1, 0), "gradient 1"), (spoiling(1, 1.3), "gradient")):
        said = first_wrong(CPU, dtype, [with_kernel(SMALL[0], sound), with_kernel(case, kernel)])
        assert said is not None and said.startswith(str(case)) and what in said


@pytest.mark.parametrize("output", FINGERPRINTS.run("eager", CPU))
def test_a_fingerprint_that_is_off_by_one_is_named(output: str) -> None:
    def lying(form: str, device: torch.device, by: int) -> dict[str, Tensor]:
        found = FINGERPRINTS.run("eager", device)
        if form == "triton":
            found[output].view(-1)[-1] += by
        return found

    sound, wrong = (ExactCase("sums", lambda form, device, by=by: lying(form, device, by)) for by in (0, 1))  # type: ignore[misc]
    assert first_wrong(CPU, torch.bfloat16, [sound]) is None, "the control"
    assert first_wrong(CPU, torch.bfloat16, [sound, wrong]) == worded(
        "checks/sums-has-wrong-numbers-output", output=output
    )


def test_fingerprints_that_cannot_be_compiled_are_no_end() -> None:
    def run(form: str, device: torch.device) -> dict[str, Tensor]:
        if form == "triton":
            raise KeyError("gfx1100")
        return {}

    said = first_wrong(CPU, torch.bfloat16, [ExactCase("sums", run)])
    assert said is not None and says(said, "checks/sums-cannot-be-computed-keyerror")


def test_numbers_that_are_none_are_wrong() -> None:
    said = first_wrong(CPU, torch.bfloat16, [with_kernel(SMALL[-1], spoiling(float("nan"), 1))])
    assert said is not None and "off by nan" in said


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
        OSError(28, "No space left on device"),
        ImportError("cannot import name 'driver'"),
        AssertionError("libamdhip64.so cannot found!"),
        KeyError("gfx1100"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_cannot_be_compiled_is_no_end(error: Exception) -> None:
    said = first_wrong(CPU, torch.bfloat16, [with_kernel(SMALL[1], raising(error))])
    assert said is not None and says(said, "checks/layernorm-of-3x5x70-in-bfloat16-cannot-be")
    assert type(error).__name__ in said


def test_triton_s_own_errors_are_no_end() -> None:
    from triton.runtime.errors import OutOfResources

    said = first_wrong(CPU, torch.float16, [with_kernel(SMALL[1], raising(OutOfResources(9, 8, "shared memory")))])
    assert said is not None and "shared memory" in said


def test_a_target_that_triton_refuses_is_said_in_words() -> None:
    """Its reason is in 70 lines on standard error; the error itself does not name it."""
    error = RuntimeError("PassManager::run failed")
    said = first_wrong(CPU, torch.bfloat16, [with_kernel(SMALL[1], raising(error))])
    assert (
        said is not None
        and f"Triton {backend.triton_version()}" in said
        and says(said, "checks/does-not-know-this-gpu")
    )
    assert "PassManager" not in said and "\n" not in said


@pytest.mark.parametrize(
    "said",
    [
        "HIP error: an illegal memory access was encountered",
        "Triton Error [HIP]:  Code: 719, Messages: unspecified launch failure",
        "HIP out of memory. Tried to allocate 2.00 GiB",
    ],
)
def test_a_fault_of_the_device_is_not_swallowed(said: str) -> None:
    with pytest.raises(RuntimeError, match="HIP"):
        first_wrong(CPU, torch.bfloat16, [with_kernel(SMALL[0], raising(RuntimeError(said)))])


def test_the_generator_of_the_run_is_not_moved() -> None:
    before = torch.random.get_rng_state()
    first_wrong(CPU, torch.float32, [with_kernel(case, sound) for case in SMALL])
    assert torch.equal(torch.random.get_rng_state(), before)


def test_it_is_said_where_they_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(kernel_choice, "first_wrong", lambda *_: None)
    assert not trusted(CPU, torch.bfloat16, said) and said == [], "no GPU: nothing to say"
    assert trusted(GPU, torch.bfloat16, said) and len(said) == 1, "what takes long is announced"
    said.clear()
    monkeypatch.setattr(kernel_choice, "first_wrong", lambda *_: "GEGLU of 3x5x140 in bfloat16 has wrong numbers")
    assert not trusted(GPU, torch.bfloat16, said) and "GEGLU" in said.pop() and len(said) == 1
    said.clear()
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    assert not trusted(GPU, torch.bfloat16, said) and "no Triton" in said.pop() and said == []
    assert not trusted(CPU, torch.bfloat16, said) and said == []


def test_kernels_with_a_float32_stream_are_proven_for_float16_alone() -> None:
    for dtype in TOLERANCE:
        names = [str(case) for case in cases_for(None, dtype)]
        assert names == list(map(str, (*CASES, *(IN_FP16 if dtype is torch.float16 else ()))))


@pytest.mark.parametrize("case", [*SMALL, *LARGE, *IN_FP16], ids=str)
def test_a_case_launches_the_kernels_that_it_names(case: Case) -> None:
    """Found by a pass over tensors without numbers, as the kernels of a step are."""
    meta, dtype = torch.device("meta"), torch.float16 if case in IN_FP16 else torch.bfloat16
    norm = None if case.norm is None else case.norm().to(meta, dtype)
    with backend.kernels_seen() as seen, torch.no_grad():
        if case.kernel.startswith("quantised."):  # numbers cannot be packed without their values
            for shape in case.shapes:
                layer = torch.nn.Linear(shape[1], 64, bias=False, dtype=dtype)
                packed = quantised(case.kernel.rpartition(" ")[2], "").packed(layer).to(meta)
                packed.implementation = "triton"
                packed(torch.empty(shape, dtype=dtype, device=meta))
        else:
            case.run("triton", norm, *(torch.empty(shape, dtype=dtype, device=meta) for shape in case.shapes))
    assert seen == {case.kernel}


def test_a_variant_without_a_case_of_its_own_is_compared_by_all_cases_of_its_function() -> None:
    cases = cases_for(["rotary.norm_rotary: halves, norm"], torch.bfloat16)
    assert cases == (LARGE[12], FINGERPRINTS)
    cases = cases_for(["rotary.norm_rotary: thirds, norm"], torch.bfloat16)
    assert len(cases) == 1 + len([case for case in LARGE if case.name.startswith("heads")]) > 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_sound_gpu_passes(dtype: torch.dtype) -> None:
    said: list[str] = []
    assert trusted(GPU, dtype, said), said
