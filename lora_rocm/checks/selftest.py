"""The self-test of a GPU, run in a subprocess (``jobs.SelfTestJob``).

It writes one JSON event per line to standard output: first ``checks`` with all names, then ``check`` before and
``result`` after each check. So a fault, hang or crash can be attributed to a check. The parent's code is in
``supervisor.selftest_runner``. On the CPU the same checks run at smaller sizes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from lora_rocm.checks.selftest_attention import attention_checks
from lora_rocm.checks.selftest_base import Check, NotHereError, WrongAnswerError, device_works, synchronize
from lora_rocm.checks.selftest_copies import copy_checks, memory_checks
from lora_rocm.checks.selftest_maths import conv_checks, gemm_checks
from lora_rocm.checks.selftest_training import training_checks
from lora_rocm.device.backend_settings import apply
from lora_rocm.device.precision import choose_device
from lora_rocm.errors import LoraRocmError
from lora_rocm.hardware.selftest_result import Result, Status
from lora_rocm.hardware.settings import settings_from
from lora_rocm.processes.jobs import SelfTestJob, job_of
from lora_rocm.rundir.event_types import CheckEvent, ChecksEvent, ErrorEvent, ResultEvent
from lora_rocm.rundir.events import emit

DEVICE_LOST = 70
"""Exit code if a check left the device unusable. The parent then starts a new process for the remaining checks."""
MESSAGE_LETTERS = 300
Table = Callable[[torch.device], Iterable[Check]]


def checks(device: torch.device) -> Iterator[Check]:
    """Yield all checks, beginning with the most basic ones."""
    for group in (copy_checks, memory_checks, gemm_checks, conv_checks, attention_checks, training_checks):
        yield from group(device)


def run_check(check: Check, device: torch.device) -> tuple[Result, bool]:
    """Run one check; return its result and whether the device still works."""
    started = time.perf_counter()

    def result(status: Status, detail: str = "") -> Result:
        return Result(check.name, status, round(time.perf_counter() - started, 3), detail)

    try:
        remark = check.run()
        synchronize(device)
    except WrongAnswerError as error:
        return result("failed", str(error)), True
    except NotHereError as error:
        return result("skipped", str(error)), True
    except torch.OutOfMemoryError as error:
        return result("skipped", f"not enough memory on the GPU: {_first_line(error)}"), True
    except OSError as error:  # the temporary file that is mapped
        return result("skipped", f"cannot use a temporary file: {_first_line(error)}"), True
    except RuntimeError as error:
        alive = device_works(device)
        said = f"{type(error).__name__}: {_first_line(error)}"
        return result("failed" if alive else "crashed", said), alive
    return result("passed", remark or ""), True


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")[:MESSAGE_LETTERS]


def main(table: Table = checks) -> int:
    """Run the selected checks and return the exit code.

    It is 0 even if checks fail, ``DEVICE_LOST`` if the device stopped working, or the code of an error before the
    checks.
    """
    try:
        job = job_of(SelfTestJob)
        device = choose_device("cpu" if job.on_cpu else "gpu")
        apply(settings_from(os.environ), device)
    except LoraRocmError as error:
        emit(ErrorEvent(**error.to_event()))
        return error.exit_code
    chosen = [check for check in table(device) if not job.only or _group(check) in job.only]
    emit(ChecksEvent(names=[check.name for check in chosen]))
    for check in chosen:
        if not {check.name, _group(check), check.name.rpartition(".")[0]}.isdisjoint(job.skip):
            continue
        emit(CheckEvent(name=check.name, timeout_s=check.timeout_s))
        result, works = run_check(check, device)
        emit(ResultEvent(name=result.name, status=result.status, seconds=result.seconds, detail=result.detail))
        if not works:
            return DEVICE_LOST
    return 0


def _group(check: Check) -> str:
    return check.name.partition(".")[0]


if __name__ == "__main__":
    sys.exit(main())
