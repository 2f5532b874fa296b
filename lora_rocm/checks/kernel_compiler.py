"""Child process that compiles kernels into Triton's cache, for a GPU that it does not open (``kernel_processes``).

It runs the cases of the comparison with tensors in main memory. Each kernel is compiled with the arguments of its
launch, and is not launched. So Triton stores it under the key that the launch looks up later, in another process.

Command: ``... kernel_compiler DTYPE TARGET``. Each line of standard input is the name of a case, and is answered by a
line on standard output. The process ends when its standard input closes, even while it compiles.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from lora_rocm.checks.kernel_check import CANNOT, Case, ExactCase, cases_for, launched
from lora_rocm.kernels.backend import nothing_plain

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

FINISHED = "finished "
"""Start of an answer. The name of the case follows."""
DRIVERS = {
    "cuda": ("triton.backends.nvidia.driver", "CudaLauncher"),
    "hip": ("triton.backends.amd.driver", "HIPLauncher"),
}


@dataclass(frozen=True)
class Target:
    """A GPU to compile for, as Triton describes it. arch: compute capability (90), or the name of an AMD GPU."""

    backend: str
    arch: int | str
    warp_size: int

    @classmethod
    def of_this_process(cls) -> Target:
        """Return the target of this process's GPU."""
        from triton.runtime.driver import driver

        found = driver.active.get_current_target()
        return cls(found.backend, found.arch, found.warp_size)

    def to_text(self) -> str:
        return json.dumps([self.backend, self.arch, self.warp_size])

    @classmethod
    def from_text(cls, text: str) -> Target:
        return cls(*json.loads(text))


class NoDevice:
    """Replaces Triton's driver. It names the GPU to compile for, and opens none."""

    def __init__(self, target: Target) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget(target.backend, target.arch, target.warp_size)

    def get_current_target(self) -> object:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(target: Target) -> None:
    """Let this process compile each kernel for ``target``, and launch none from now on."""
    from triton import JITFunction
    from triton.runtime.driver import driver

    run = JITFunction.run

    def compiled(kernel: object, *arguments: object, grid: object, warmup: bool, **options: object) -> None:
        _build_launcher(run(kernel, *arguments, grid=grid, warmup=True, **options), target)

    driver.set_active(NoDevice(target))
    JITFunction.run = compiled


def _build_launcher(kernel: CompiledKernel, target: Target) -> None:
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


def main() -> int:
    """Compile the cases that standard input names, until it closes."""
    dtype, target = getattr(torch, sys.argv[1]), Target.from_text(sys.argv[2])
    torch.set_num_threads(1)
    compile_only(target)
    cases = {str(case): case for case in cases_for(None, dtype)}
    names: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            names.put(line.rstrip("\n"))
        os._exit(0)  # the parent has ended, or does not need the rest

    threading.Thread(target=read, daemon=True, name="names").start()
    while True:
        name = names.get()
        compile_case(cases[name], dtype)
        sys.stdout.write(f"{FINISHED}{name}\n")
        sys.stdout.flush()
