"""The meaning of torch's errors. No process leaves while the GPU works, not even after an error."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from lora_rocm.children import model_child
from lora_rocm.device.torch_errors import device_fault, out_of_memory, settle, translated
from lora_rocm.errors import MachineError
from lora_rocm.processes.jobs import ChatJob
from lora_rocm.processes.tool import write_job
from lora_rocm.rules.mitigations import seen_of_code
from lora_rocm.train import worker


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU in use; each wait for it."""
    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: found.append("waited"))
    return found


def test_a_gpu_in_use_is_waited_for(waits: list[str]) -> None:
    settle()
    assert waits == ["waited"]


def test_a_gpu_that_nobody_used_is_left_alone(waits: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    settle()
    assert waits == []


def test_a_lost_gpu_is_no_second_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise RuntimeError("HIP error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    settle()


def test_a_worker_that_fails_waits(waits: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(worker, "Session", full)
    assert worker.main([str(tmp_path)]) != 0
    assert waits == ["waited"]


def test_a_tool_that_fails_waits(waits: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["tools", str(tmp_path / "missing.json")])
    assert model_child.main() != 0
    assert waits == ["waited"]


def test_a_tool_that_is_done_waits(waits: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = write_job(tmp_path, ChatJob(adapter=tmp_path, recipe=tmp_path))
    monkeypatch.setattr(model_child, "chat", lambda asked, registry: None)
    monkeypatch.setattr("sys.argv", ["tools", str(job)])
    assert model_child.main() == 0 and waits == ["waited"]


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("HIP out of memory. Tried to allocate 3.31 GiB. GPU 0 has a total capacity of 128.00 GiB"),
    RuntimeError("HIP out of memory. Tried to allocate 2.00 MiB"),  # as older PyTorch words and types it
    RuntimeError("HIP error: out of memory\nSearch for `hipErrorOutOfMemory' in https://rocm.docs.amd.com"),
    torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in"),
    RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("miopenStatusAllocFailed"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("could not create a primitive"),
    MemoryError(),
]
FAULTS = [
    torch.AcceleratorError("HIP error: an illegal memory access was encountered\nSearch for `hipErrorIllegalAddress'"),
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("HIP error: unspecified launch failure\nHIP kernel errors might be asynchronously reported"),
    RuntimeError("Unspecified error: hipErrorLaunchFailure"),
    RuntimeError("HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime failed to allocate the necessary resources"),
    RuntimeError("HIP error: invalid argument"),
    RuntimeError("CUDA error: HIPBLAS_STATUS_INTERNAL_ERROR when calling `hipblasGemmEx`"),
    RuntimeError("miopenStatusUnknownError"),
]
NEITHER = [
    RuntimeError("could not create a primitive descriptor for the matmul forward propagation"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    RuntimeError("HIP error: no kernel image is available for execution on the device"),
    RuntimeError("HIP error: invalid device function"),
    ValueError("HIP error: an illegal memory access was encountered"),  # not from torch
    KeyError("out of memory"),
]
OTHERWISE = MachineError("internal", "unknown")


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: str(error)[:60] or "MemoryError")
def test_memory_that_ran_out_is_known_by_all_its_names(error: Exception) -> None:
    found = translated(error, "run", OTHERWISE)
    assert found.code == "out-of-memory" and device_fault(error) is None
    assert found.where and "\n" not in found.where and "--resume latest" in found.fix


@pytest.mark.parametrize("error", FAULTS, ids=lambda error: str(error)[:60])
def test_a_fault_of_the_device_is_known_by_its_names(error: Exception) -> None:
    found = translated(error, "run", OTHERWISE)
    assert found.code == "device-fault" and out_of_memory(error) is None
    assert "\n" not in found.where and "doctor" in found.fix
    assert found.exit_code == MachineError.exit_code


@pytest.mark.parametrize("error", NEITHER, ids=lambda error: str(error)[:60])
def test_what_a_new_start_does_not_cure_is_neither(error: Exception) -> None:
    assert translated(error, "run", OTHERWISE) is OTHERWISE


def test_the_supervisor_knows_both_codes() -> None:
    assert seen_of_code("out-of-memory") == "out-of-memory" and seen_of_code("device-fault") == "illegal-access"


def test_the_real_error_of_a_full_machine() -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert out_of_memory(caught.value) is not None


def test_a_gpu_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: answered.wait(120.0))
    started = time.perf_counter()
    settle(limit_s=0.1)
    assert time.perf_counter() - started < 60.0
    answered.set()
