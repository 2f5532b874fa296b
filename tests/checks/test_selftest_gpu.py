"""On a GPU: the whole self-test passes on sound hardware, with its time printed; wrong kernels on it are noticed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from lora_rocm.checks import selftest_copies
from lora_rocm.checks.selftest import run_check
from lora_rocm.checks.selftest_attention import attention_checks
from lora_rocm.checks.selftest_base import Check, poison
from lora_rocm.checks.selftest_copies import copy_checks
from lora_rocm.checks.selftest_maths import conv_checks, gemm_checks
from lora_rocm.checks.selftest_training import training_checks
from lora_rocm.processes.jobs import SelfTestJob
from lora_rocm.supervisor.selftest_runner import run_checks
from tests.device.broken import ATTENTION, CONVOLUTIONS, PRODUCTS, Broken, Fault, one_bit, one_nan, stale, tail_of_zeros

GPU = torch.device("cuda", 0)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


def test_a_sound_gpu_passes(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    started = time.monotonic()
    found = run_checks(SelfTestJob(), os.environ, said.append)
    seconds = time.monotonic() - started
    slowest = sorted(found, key=lambda result: -result.seconds)[:10]
    lines = [
        f"self-test of {torch.cuda.get_device_name(GPU)}, torch {torch.__version__}: {seconds:.1f} s in all",
        *said,
        *(f"  {result.seconds:.2f} s {result.name}" for result in slowest),
        *(f"  {result.name}: {result.detail}" for result in found if result.status == "skipped"),
    ]
    with capsys.disabled():
        sys.stdout.write("\n" + "\n".join(lines) + "\n")
    assert [result for result in found if not result.ok] == []
    assert all(result.detail for result in found if result.status == "skipped")
    skipped = {result.name.rpartition(".")[0] for result in found if result.status == "skipped"}
    assert skipped <= {f"attention.{backend}" for backend in ("flash", "efficient", "cudnn")}


def only(table: Callable[[torch.device], Iterator[Check]], *names: str) -> list[Check]:
    return [check for check in table(GPU) if check.name.startswith(names)]


@pytest.mark.parametrize("fault", [tail_of_zeros, one_bit, one_nan, stale])
@pytest.mark.parametrize(
    ("kernels", "checks"),
    [
        (PRODUCTS, lambda: only(gemm_checks, "gemm.square", "gemm.lora-bf16-TN", "gemm.tall", "gemm.batched")),
        (PRODUCTS, lambda: only(training_checks, "training")),
        (CONVOLUTIONS, lambda: only(conv_checks, "conv")),
        (ATTENTION, lambda: only(attention_checks, "attention.efficient.bf16-d64", "attention.flash.bf16-d64")),
    ],
    ids=["gemm", "training", "conv", "attention"],
)
def test_wrong_kernels_are_noticed(kernels: set[str], checks: Callable[[], list[Check]], fault: Fault) -> None:
    with Broken(kernels, fault) as broken:
        found = [run_check(check, GPU)[0] for check in checks()]
    assert broken.hits
    assert {result.status for result in found} <= {"failed", "skipped"}, found
    assert any(result.status == "failed" for result in found)


def zeroed(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor)


def one_byte(tensor: Tensor) -> Tensor:
    tensor.view(torch.uint8)[-1] ^= 1
    return tensor


@pytest.mark.parametrize("damage", [zeroed, one_byte])
def test_wrong_copies_are_noticed(damage: Callable[[Tensor], Tensor]) -> None:
    def send(tensor: Tensor, device: torch.device, method: str) -> Tensor:
        return damage(selftest_copies.send(tensor, device, method))

    def read(tensor: Tensor, method: str) -> Tensor:
        return damage(selftest_copies.read(tensor, method))

    for there, back, words in (
        (send, selftest_copies.read, "to the device"),
        (selftest_copies.send, read, "to the host"),
    ):
        found = [run_check(check, GPU)[0] for check in copy_checks(GPU, there, back) if check.name.endswith("1MiB")]
        assert all(result.status == "failed" and words in result.detail for result in found), found


def test_memory_that_was_poisoned_is_what_the_next_tensor_gets() -> None:
    """The allocator hands out the block that was just given back: an answer never written reads as NaN."""
    poison(GPU, 4 * 1000)
    assert torch.empty(1000, device=GPU).isnan().all()


FAULTY_CHILD = """
import torch
from lora_rocm.checks import selftest
from lora_rocm.checks.selftest_base import Check

def fault():
    torch.zeros(1, device="cuda")[torch.tensor([5], device="cuda")].cpu()

def hang():
    torch.cuda._sleep(10**13)

sound = lambda: None
checks = [Check("a.fault", fault), Check("a.sound", sound), Check("b.hang", hang, 1.0), Check("b.sound", sound)]
raise SystemExit(selftest.main(table=lambda device: checks))
"""


def test_a_kernel_that_faults_or_hangs_has_a_name_and_the_rest_is_tested() -> None:
    found = run_checks(
        SelfTestJob(),
        os.environ,
        lambda text: None,
        lambda job: [sys.executable, "-c", FAULTY_CHILD, str(job)],
    )
    assert {result.name: result.status for result in found} == {
        "a.fault": "crashed",
        "a.sound": "passed",
        "b.hang": "timeout",
        "b.sound": "passed",
    }
