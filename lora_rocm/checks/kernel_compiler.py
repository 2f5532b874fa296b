"""Child process that compiles kernels into Triton's cache, for a GPU that it does not open (``kernel_processes``).

It runs the cases of the comparison with tensors in main memory. Each kernel is compiled with the arguments of its
launch, and is not launched. So Triton stores it under the key that the launch looks up later, in another process.

Cases have small sizes. The kernels of a step are compiled for its own sizes, so the step launches others of the same
names. Another process has recorded these launches (``recorded_launches``). So this process needs no model, and imports
neither transformers nor diffusers.

Its job, requests and answers are in ``processes.jobs``. The process ends when its standard input closes, even while it
compiles.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from lora_rocm.checks.kernel_check import CANNOT, IN_EIGHT_BITS, Case, ExactCase, cases_for, launched
from lora_rocm.checks.recorded_launches import argument, kernel_of
from lora_rocm.errors import LoraRocmError
from lora_rocm.kernels.backend import nothing_plain
from lora_rocm.processes.jobs import compile_request, job_of, request_line
from lora_rocm.processes.start_jobs import (
    CaseCompiled,
    CaseRequest,
    CompileAnswer,
    CompileJob,
    CompileTarget,
    Launch,
    LaunchCompiled,
)
from lora_rocm.rundir.event_types import ErrorEvent
from lora_rocm.rundir.events import emit

if TYPE_CHECKING:
    from triton import JITFunction
    from triton.compiler import CompiledKernel

DRIVERS = {
    "cuda": ("triton.backends.nvidia.driver", "CudaLauncher"),
    "hip": ("triton.backends.amd.driver", "HIPLauncher"),
}


def target_here() -> CompileTarget:
    """Return the target of this process's GPU."""
    from triton.runtime.driver import driver

    found = driver.active.get_current_target()
    return CompileTarget(found.backend, str(found.arch), found.warp_size)


class NoDevice:
    """Replaces Triton's driver. It names the GPU to compile for, and opens none."""

    def __init__(self, target: CompileTarget) -> None:
        from triton.backends.compiler import GPUTarget

        arch = int(target.arch) if target.arch.isdecimal() else target.arch
        self._target = GPUTarget(target.backend, arch, target.warp_size)

    def get_current_target(self) -> object:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(target: CompileTarget) -> None:
    """Let this process compile kernels for ``target``, and launch none from now on."""
    from triton import JITFunction
    from triton.runtime.driver import driver

    run = JITFunction.run

    def compiled(kernel: JITFunction, *arguments: object, grid: object, warmup: bool, **options: object) -> None:
        _build_launcher(run(kernel, *arguments, grid=grid, warmup=True, **options), target)

    driver.set_active(NoDevice(target))
    JITFunction.run = compiled


def _build_launcher(kernel: CompiledKernel, target: CompileTarget) -> None:
    """Compile the C function that launches a kernel into the cache. Newer versions of Triton have one for all."""
    name, launcher = DRIVERS[target.backend]
    module = import_module(name)
    if hasattr(module, "make_launcher"):
        try:
            getattr(module, launcher)(kernel.src, kernel.metadata)
        except CANNOT:  # the comparison has the same error, and reports it
            traceback.print_exc()


def compile_case(case: Case | ExactCase, dtype: torch.dtype) -> None:
    """Compile the kernels of a case. An error is only printed: the comparison has the same one, and reports it."""
    from triton.errors import TritonError

    try:
        with nothing_plain(), torch.enable_grad():
            launched(case, torch.device("cpu"), dtype)
    except (TritonError, *CANNOT):
        traceback.print_exc()


def compile_launch(launch: Launch) -> None:
    """Compile the kernel of a launch. An error is only printed: the step has the same one, and reports it."""
    from triton.errors import TritonError

    try:
        options = {name: argument(value) for name, value in launch.options.items()}
        kernel_of(launch).run(*map(argument, launch.arguments), grid=(1,), warmup=True, **options)
    except (TritonError, *CANNOT):
        traceback.print_exc()


def main() -> int:
    """Compile the cases and launches that standard input names, until it closes."""
    try:
        job = job_of(CompileJob)
    except LoraRocmError as error:
        emit(ErrorEvent(**error.to_event()))
        return error.exit_code
    dtype = getattr(torch, job.dtype)
    torch.set_num_threads(1)
    compile_only(job.target)
    cases = {str(case): case for case in (*cases_for(None, dtype), *IN_EIGHT_BITS)}
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin.buffer:
            lines.put(line)
        os._exit(0)  # the parent has ended, or does not need the rest

    threading.Thread(target=read, daemon=True, name="requests").start()
    while True:
        answer: CompileAnswer
        match compile_request(lines.get()):
            case Launch() as launch:
                compile_launch(launch)
                answer = LaunchCompiled(launch.kernel)
            case CaseRequest(name):
                compile_case(cases[name], dtype)
                answer = CaseCompiled(name)
        sys.stdout.buffer.write(request_line(answer))
        sys.stdout.buffer.flush()
