"""Processes that compile kernels beforehand, while this process encodes samples and reads weights.

They open no GPU (``kernel_compiler``). They fill Triton's cache, from which the comparison (``kernel_choice``) and the
first step take the kernels. A kernel that they do not compile is compiled there.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import psutil
import torch

from lora_rocm.checks.kernel_check import CANNOT, Case, ExactCase, cases_for, proof_of
from lora_rocm.checks.kernel_compiler import target_here
from lora_rocm.errors import MachineError, StorageError
from lora_rocm.foundation.files import write_json
from lora_rocm.foundation.json_text import parse_json
from lora_rocm.foundation.safe_path import python_environment
from lora_rocm.hardware.app_dir import own_app_dir
from lora_rocm.kernels.backend import refusal
from lora_rocm.processes.jobs import (
    CHILDREN,
    CaseCompiled,
    CaseRequest,
    CompileCasesJob,
    CompileRequest,
    CompileStepJob,
    CompileTarget,
    StepCompiled,
    StepRequest,
    argument_of,
    compile_answer,
    name_of,
    request_line,
)
from lora_rocm.processes.process import heavy_command

MAX_PROCESSES = 8
MEMORY_EACH = 2**30
"""Bytes of main memory that one process takes, with torch and the compiler."""
POLL_S, CASE_LIMIT_S, STEP_LIMIT_S = 0.1, 120.0, 60.0
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1", "HF_HUB_OFFLINE": "1"}
"""The processes open no GPU, and download no base in addition to the training process."""
AnyCase = Case | ExactCase


def process_count(cores: int, free_bytes: int) -> int:
    """Return the number of processes for a machine: half of its cores, as far as its memory allows."""
    return max(min(MAX_PROCESSES, max(cores // 2, 1), free_bytes // 2 // MEMORY_EACH), 0)


def count_here() -> int:
    """Return ``process_count`` for this machine."""
    return process_count(os.cpu_count() or 1, psutil.virtual_memory().available)


class KernelCompilers:
    """Compiling processes. They start in a thread, because Triton may first have to build its driver.

    Args:
        dtype: the run's dtype.
        count: number of processes.
        target: returns the GPU to compile for.
        step: the run's step, or None to compile cases only. Each process compiles a share of the step before its cases.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        count: int,
        target: Callable[[], CompileTarget] = target_here,
        *,
        step: StepRequest | None = None,
    ) -> None:
        self._dtype, self._target, self._kind = dtype, target, CompileCasesJob if step is None else CompileStepJob
        self._steps = [] if step is None else [replace(step, share=share, shares=count) for share in range(count)]
        self._num_steps_left = len(self._steps)
        self._changed = threading.Condition()
        self._waiting, self._taken, self._finished = list[str](), set[str](), set[str]()
        self._children, self._is_closed = list[subprocess.Popen[bytes]](), False
        self._threads = [threading.Thread(target=self._serve, daemon=True, name="kernels") for _ in range(count)]
        self._starting = threading.Thread(target=self._start, daemon=True, name="kernels")
        self._starting.start()

    @property
    def finished(self) -> int:
        """Number of cases that the processes have compiled."""
        with self._changed:
            return len(self._finished)

    def add(self, cases: Collection[AnyCase]) -> None:
        """Let the processes compile these cases, unless they were added before."""
        with self._changed:
            known = {*self._waiting, *self._taken, *self._finished}
            self._waiting += [str(case) for case in cases if str(case) not in known]
            self._changed.notify_all()

    def wait(self, case: AnyCase, beat: Callable[[], None]) -> None:
        """Wait until a process has compiled a case. Return at once if none has begun with it: none will then.

        ``beat``: called while waiting. A process that takes longer than ``CASE_LIMIT_S`` is not waited for.
        """
        name, ends_at = str(case), time.monotonic() + CASE_LIMIT_S
        with self._changed:
            if name in self._waiting:
                self._waiting.remove(name)
            while name in self._taken and time.monotonic() < ends_at:
                self._changed.wait(POLL_S)
                beat()

    def wait_for_step(self, beat: Callable[[], None]) -> None:
        """Wait until each process has compiled its share of the step, or has ended; at most ``STEP_LIMIT_S``.

        ``beat``: called while waiting.
        """
        ends_at = time.monotonic() + STEP_LIMIT_S
        with self._changed:
            while self._num_steps_left > 0 and not self._is_closed and time.monotonic() < ends_at:
                self._changed.wait(POLL_S)
                beat()

    def close(self) -> None:
        """End the processes."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._starting.join()
        for child in self._children:
            child.kill()
            child.wait()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        for child in self._children:
            for pipe in (child.stdin, child.stdout):
                with suppress(OSError):  # a line that the process did not read
                    if pipe is not None:
                        pipe.close()

    def _start(self) -> None:
        """Find the target, then start the serving threads. Without a target, the comparison compiles all cases."""
        try:
            self._job = self._kind(str(self._dtype).removeprefix("torch."), self._target())
        except CANNOT:  # the comparison has the same error, and reports it
            with self._changed:
                self._num_steps_left = 0
                self._changed.notify_all()
            return
        for thread in self._threads:
            thread.start()

    def _serve(self) -> None:
        """Start one process. Give it a share of the step, then one case after the other until it ends or ``close``.

        If the system refuses the process, the others or the comparison compile the cases.
        """
        with self._changed:
            if self._is_closed:
                return
            step = self._steps.pop() if self._steps else None
            try:
                child = subprocess.Popen(
                    # input: its input has the cases
                    heavy_command(CHILDREN[name_of(self._job)].module, argument_of(self._job), reads_input=True),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=python_environment({**os.environ, **ENVIRONMENT}),
                )
            except OSError as error:
                sys.stderr.write(f"no process to compile kernels: {error}\n")
                self._num_steps_left -= step is not None
                self._changed.notify_all()
                return
            self._children.append(child)
        if step is not None:
            try:
                is_alive = self._compiled(child, step)
            finally:  # a start does not wait for a thread that has ended
                with self._changed:
                    self._num_steps_left -= 1
                    self._changed.notify_all()
            if not is_alive:
                return
        while (name := self._next()) is not None:
            is_compiled = self._compiled(child, CaseRequest(name))
            with self._changed:
                self._taken.discard(name)
                if is_compiled:
                    self._finished.add(name)
                self._changed.notify_all()
            if not is_compiled:
                return

    def _next(self) -> str | None:
        """Wait for a case, and take it. The comparison begins at the other end of the list."""
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return None
            name = self._waiting.pop()
            self._taken.add(name)
            return name

    def _compiled(self, child: subprocess.Popen[bytes], request: CompileRequest) -> bool:
        """Let a process compile a case or a share of the step. Return whether it answered: it may have been killed.

        The cases of a step's kernels are added.
        """
        assert child.stdin is not None and child.stdout is not None
        with suppress(OSError, ValueError, MachineError):  # it has ended, and its answer is missing or torn
            child.stdin.write(request_line(request))
            child.stdin.flush()
            match compile_answer(child.stdout.readline(), name_of(self._job)):
                case StepCompiled(kernels):
                    self.add(unproven_cases(kernels, self._dtype))
                    return isinstance(request, StepRequest)
                case CaseCompiled(name):
                    return request == CaseRequest(name)
        return False


def unproven_cases(kernels: Collection[str], dtype: torch.dtype) -> Sequence[AnyCase]:
    """Return the cases of these kernels that have not passed on this machine yet."""
    return [case for case in cases_for(kernels, dtype) if not proof_of(case, dtype).is_known]


class KernelMemory:
    """Names of the kernels that the last run of a kind used. With them, a start knows its cases at its beginning.

    ``kind``: the values that decide about kernels, such as the family and the format of the weights. If another run had
    other kernels, cases are compiled late, or in vain; results do not depend on it.
    """

    def __init__(self, *kind: object) -> None:
        self._path = own_app_dir() / f"kernel-names-{hashlib.sha256(repr(kind).encode()).hexdigest()[:16]}.json"

    def recall(self) -> list[str] | None:
        """Return the names, or None if there are none."""
        try:
            found: object = parse_json(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        names = found.get("kernels") if isinstance(found, dict) else None
        return [str(name) for name in names] if isinstance(names, list) else None

    def remember(self, kernels: Collection[str]) -> None:
        """Write the names. If this fails, the next start learns them later."""
        if self.recall() != sorted(kernels):
            with suppress(StorageError):
                write_json(self._path, {"kernels": sorted(kernels)})


@contextmanager
def compilers_for(
    device: torch.device, dtype: torch.dtype, memory: KernelMemory, *, step: StepRequest | None = None
) -> Iterator[KernelCompilers | None]:
    """Start the processes if this start may have kernels to compile, and end them afterwards; yield None if not.

    There are at most as many as cases. On a machine that has not run this kind yet, the processes start without cases.
    They learn them from the step, or from ``choose``. ``step``: see ``KernelCompilers``.
    """
    names = memory.recall()
    cases = [] if names is None else unproven_cases(names, dtype)
    count = count_here() if device.type == "cuda" and refusal(device) is None else 0
    if count == 0 or (names is not None and not cases):
        yield None
        return
    count = min(count, len(cases)) if cases else count
    compilers = KernelCompilers(dtype, count, step=step)
    try:
        compilers.add(cases)
        yield compilers
    finally:
        compilers.close()
