"""Processes that compile kernels beforehand, while this process encodes samples and reads weights.

They open no GPU (``kernel_compiler``). They fill Triton's cache, from which the comparison (``kernel_choice``) and the
first step take the kernels. A kernel that they do not compile is compiled there. They get cases by name, and the
launches of the step from a process that knows its model (``memory.footprint_process``).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from lora_rocm.checks.kernel_check import CANNOT, Case, ExactCase, cases_for, proof_of
from lora_rocm.checks.kernel_compiler import target_here
from lora_rocm.device.main_memory import free_main_bytes
from lora_rocm.errors import MachineError, StorageError
from lora_rocm.foundation.files import write_json
from lora_rocm.foundation.json_text import parse_json
from lora_rocm.foundation.safe_path import python_environment
from lora_rocm.hardware.app_dir import own_app_dir
from lora_rocm.kernels.backend import refusal
from lora_rocm.processes.cores import core_count
from lora_rocm.processes.jobs import CHILDREN, argument_of, compile_answer, name_of, request_line
from lora_rocm.processes.process import heavy_command
from lora_rocm.processes.start_jobs import (
    CaseCompiled,
    CaseRequest,
    CompileJob,
    CompileRequest,
    CompileTarget,
    Launch,
    LaunchCompiled,
    StepLaunches,
)

MAX_PROCESSES = 8
MEMORY_EACH = 2**30
"""Bytes of main memory that one process takes, with torch and the compiler."""
POLL_S, CASE_LIMIT_S, STEP_LIMIT_S = 0.1, 120.0, 60.0
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1", "HF_HUB_OFFLINE": "1"}
"""The processes open no GPU, and download no base in addition to the training process."""
AnyCase = Case | ExactCase


def process_count(cores: int, free_bytes: int) -> int:
    """Return the number of processes for a machine: a quarter of its cores, as far as its memory allows.

    Four compile the kernels of a start within seconds, and this process reads and packs weights with the other cores.
    """
    return max(min(MAX_PROCESSES, max(cores // 4, 1), free_bytes // 2 // MEMORY_EACH), 0)


def count_here() -> int:
    """Return ``process_count`` for this machine."""
    return process_count(core_count(), free_main_bytes())


class KernelCompilers:
    """Compiling processes. They start in a thread, because Triton may first have to build its driver.

    Args:
        dtype: the run's dtype.
        count: number of processes.
        target: returns the GPU to compile for.
        step: waits for the launches of the run's step and returns them, or None if there are none. A thread calls it.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        count: int,
        target: Callable[[], CompileTarget] = target_here,
        *,
        step: Callable[[], StepLaunches | None] | None = None,
    ) -> None:
        self._dtype, self._target, self._step = dtype, target, step
        self._changed = threading.Condition()
        self._waiting = list[CompileRequest]()  # the last one is next
        self._taken, self._finished = set[str](), set[str]()  # names of cases
        self._is_step_known, self._num_launches_left, self._num_serving = step is None, 0, count
        self._children, self._is_closed = list[subprocess.Popen[bytes]](), False
        self._threads = [threading.Thread(target=self._serve, daemon=True, name="kernels") for _ in range(count)]
        self._starting = threading.Thread(target=self._start, daemon=True, name="kernels")
        self._starting.start()
        if step is not None:
            threading.Thread(target=self._learn, args=(step,), daemon=True, name="launches").start()

    @property
    def finished(self) -> int:
        """Number of cases that the processes have compiled."""
        with self._changed:
            return len(self._finished)

    def add(self, cases: Collection[AnyCase]) -> None:
        """Let the processes compile these cases, unless they were added before."""
        with self._changed:
            known = {*self._names_waiting(), *self._taken, *self._finished}
            self._waiting += [CaseRequest(str(case)) for case in cases if str(case) not in known]
            self._changed.notify_all()

    def wait(self, case: AnyCase, beat: Callable[[], None]) -> None:
        """Wait until a process has compiled a case. Return at once if none has begun with it: none will then.

        ``beat``: called while waiting. A process that takes longer than ``CASE_LIMIT_S`` is not waited for.
        """
        name, ends_at = str(case), time.monotonic() + CASE_LIMIT_S
        with self._changed:
            if CaseRequest(name) in self._waiting:
                self._waiting.remove(CaseRequest(name))
            while name in self._taken and time.monotonic() < ends_at:
                self._changed.wait(POLL_S)
                beat()

    def wait_for_step(self, beat: Callable[[], None]) -> None:
        """Wait until the processes have compiled the step's launches, or have ended; at most ``STEP_LIMIT_S``.

        ``beat``: called while waiting.
        """
        ends_at = time.monotonic() + STEP_LIMIT_S
        with self._changed:
            while self._compiles_step() and time.monotonic() < ends_at:
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
        for child in self._children:
            child.wait()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        for child in self._children:
            for pipe in (child.stdin, child.stdout):
                with suppress(OSError):  # a line that the process did not read
                    if pipe is not None:
                        pipe.close()

    def _names_waiting(self) -> Iterator[str]:
        return (request.case for request in self._waiting if isinstance(request, CaseRequest))

    def _compiles_step(self) -> bool:
        is_left = not self._is_step_known or self._num_launches_left > 0
        return is_left and self._num_serving > 0 and not self._is_closed

    def _start(self) -> None:
        """Find the target, then start the serving threads. Without a target, the comparison compiles all cases."""
        try:
            self._job = CompileJob(str(self._dtype).removeprefix("torch."), self._target())
        except CANNOT:  # the comparison has the same error, and reports it
            with self._changed:
                self._num_serving = 0
                self._changed.notify_all()
            return
        for thread in self._threads:
            thread.start()

    def _learn(self, step: Callable[[], StepLaunches | None]) -> None:
        """Add the step's launches, and before them the cases of its kernels: the comparison comes before the step."""
        try:
            if (found := step()) is None:
                return
            self.add(unproven_cases(found.kernels, self._dtype))
            with self._changed:
                self._waiting[:0] = found.launches
                self._num_launches_left = len(found.launches)
        except Exception:  # edge: of a thread; without a list the step compiles its kernels
            traceback.print_exc()
        finally:  # a start does not wait for a thread that has ended
            with self._changed:
                self._is_step_known = True
                self._changed.notify_all()

    def _serve(self) -> None:
        """Start one process. Give it one case or launch after the other until it ends or ``close``.

        If the system refuses the process, the others, the comparison or the step compile its share.
        """
        try:
            with self._changed:
                if self._is_closed:
                    return
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
                    return
                self._children.append(child)
            while (request := self._next()) is not None:
                is_compiled = self._compiled(child, request)
                self._note_end(request, is_compiled)
                if not is_compiled:
                    return
        finally:
            with self._changed:
                self._num_serving -= 1
                self._changed.notify_all()

    def _next(self) -> CompileRequest | None:
        """Wait for a case or a launch, and take it. The comparison begins at the other end of the list of cases."""
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return None
            request = self._waiting.pop()
            if isinstance(request, CaseRequest):
                self._taken.add(request.case)
            return request

    def _note_end(self, request: CompileRequest, is_compiled: bool) -> None:
        with self._changed:
            if isinstance(request, Launch):
                self._num_launches_left -= 1
            else:
                self._taken.discard(request.case)
                if is_compiled:
                    self._finished.add(request.case)
            self._changed.notify_all()

    def _compiled(self, child: subprocess.Popen[bytes], request: CompileRequest) -> bool:
        """Let a process compile a case or a launch. Return whether it answered: it may have been killed."""
        assert child.stdin is not None and child.stdout is not None
        with suppress(OSError, ValueError, MachineError):  # it has ended, and its answer is missing or torn
            child.stdin.write(request_line(request))
            child.stdin.flush()
            match compile_answer(child.stdout.readline()):
                case LaunchCompiled(kernel):
                    return isinstance(request, Launch) and request.kernel == kernel
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
    device: torch.device,
    dtype: torch.dtype,
    memory: KernelMemory,
    *,
    step: Callable[[], StepLaunches | None] | None = None,
) -> Iterator[KernelCompilers | None]:
    """Start the processes if this start may have kernels to compile, and end them afterwards; yield None if not.

    Without ``step`` there are at most as many as cases. On a machine that has not run this kind yet, the processes
    start without cases. They learn them from the step, or from ``choose``. ``step``: see ``KernelCompilers``.
    """
    names = memory.recall()
    cases = [] if names is None else unproven_cases(names, dtype)
    count = count_here() if device.type == "cuda" and refusal(device) is None else 0
    if count == 0 or (names is not None and not cases):
        yield None
        return
    count = min(count, len(cases)) if cases and step is None else count
    compilers = KernelCompilers(dtype, count, step=step)
    try:
        compilers.add(cases)
        yield compilers
    finally:
        compilers.close()
