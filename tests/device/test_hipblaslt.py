"""Where the variables switch hipBLASLt off, torch prefers rocBLAS, even if torch infers something else from them."""

from __future__ import annotations

import os

import pytest
import torch

from lora_rocm.checks.selftest import run_check
from lora_rocm.checks.selftest_maths import gemm_checks
from lora_rocm.device import hipblaslt
from lora_rocm.device.backend_settings import apply
from lora_rocm.hardware.settings import Settings
from lora_rocm.rules.environment import plan
from tests.hardware.situations import fast, situation, with_torch
from tests.wording import says

CPU = torch.device("cpu")
CUBLASLT, HIPBLASLT = hipblaslt.VARIABLES


class Library:
    """Torch before 2.12 on RDNA 4: it prefers hipBLASLt until it is set otherwise."""

    def __init__(self, obeys: bool = True) -> None:
        self.preferred, self.obeys = "Cublaslt", obeys

    def __call__(self, backend: str | None = None) -> str:
        if backend is not None and self.obeys:
            self.preferred = backend.capitalize()
        return f"_BlasBackend.{self.preferred}"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", made)
    for name in hipblaslt.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return made


@pytest.mark.parametrize(
    ("environ", "is_off"),
    [
        ({HIPBLASLT: "0"}, True),
        ({CUBLASLT: "0"}, True),
        ({CUBLASLT: "0", HIPBLASLT: "0"}, True),
        ({CUBLASLT: "1", HIPBLASLT: "0"}, False),  # torch asks this name first
        ({CUBLASLT: "0", HIPBLASLT: "1"}, False),
        ({HIPBLASLT: "1"}, False),
        ({HIPBLASLT: ""}, False),
        ({}, False),
    ],
)
def test_the_two_names_of_the_switch(
    environ: dict[str, str], is_off: bool, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert hipblaslt.hipblaslt_is_off(os.environ) is is_off
    apply(Settings(), CPU)  # as every heavy process does at its start
    assert hipblaslt.preferred() == ("cublas" if is_off else "cublaslt")


def of_library() -> tuple[str, str]:
    checks = [check for check in gemm_checks(CPU) if check.name == "gemm.hipblaslt-off"]
    results = [run_check(check, CPU)[0] for check in checks]
    return next(((result.status, result.detail) for result in results), ("left out", ""))


def test_the_self_test_reads_the_preference_back_and_says_it(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_library()[0] == "left out", "nothing is switched off"
    monkeypatch.setenv(HIPBLASLT, "0")
    status, detail = of_library()
    assert status == "failed" and "cublaslt" in detail
    apply(Settings(), CPU)
    status, detail = of_library()
    assert status == "passed" and says(detail, "device/hipblaslt-is-off")


def test_a_torch_that_does_not_obey_is_noticed(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HIPBLASLT, "0")
    library.obeys = False
    apply(Settings(), CPU)
    assert of_library()[0] == "failed"


def test_this_torch_takes_the_preference() -> None:
    before = hipblaslt.preferred()
    assert before in ("cublas", "default")
    hipblaslt.prefer_rocblas_if_off({HIPBLASLT: "0"})
    assert hipblaslt.preferred() == "cublas"


@pytest.mark.parametrize("version", ["2.11.0+rocm7.2", "2.13.0+rocm7.2"])
def test_the_plan_of_the_profile_safe_switches_it_off(version: str) -> None:
    facts = with_torch("linux-rx9070xt", version=version)

    def off(**exported: str) -> bool:
        environ = {**facts.variables, **exported}
        return hipblaslt.hipblaslt_is_off(plan(situation(facts, environ)).applied_to(environ))

    assert off() and off(**{HIPBLASLT: "0"})
    assert not off(**{HIPBLASLT: "1"}) and not off(**{CUBLASLT: "1"}), "the user's value wins, and is warned about"
    assert not hipblaslt.hipblaslt_is_off(plan(fast(facts)).applied_to({}))
