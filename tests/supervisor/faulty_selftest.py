"""Speaks like the self-test's child, without torch, and crashes or hangs on request.

``python faulty_selftest.py LOG FAULTS JOB``. FAULTS is JSON: name of a check -> what happens in it. Each start adds
its environment and job to LOG.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lora_rocm.processes.job_file import to_json
from lora_rocm.processes.jobs import SelfTestJob, job_of
from tests.supervisor.wire import LineWriter

NAMES = (
    "copies.pageable.4KiB", "copies.pinned.4KiB", "copies.mapped.4KiB",
    "gemm.square-fp32-NN", "gemm.square-fp16-NN", "gemm.square-bf16-NN", "gemm.lora-bf16-TN", "gemm.lora-bf16-TT",
    "conv.miopen.3x3-fp32", "conv.miopen.3x3-fp16", "conv.miopen.3x3-bf16", "conv.miopen.1x1-bf16",
    "conv.native.3x3-fp32", "conv.native.3x3-fp16", "conv.native.3x3-bf16",
    "attention.math.bf16-d64", "attention.flash.bf16-d64",
    "training.lora-bf16", "training.lora-fp16",
)  # fmt: skip


Outcome = tuple[str, str]
PASSED: Outcome = ("passed", "")
WRONG: Outcome = ("failed", "7 of 9 numbers are wrong")


def asleep() -> Outcome:
    time.sleep(60)
    return PASSED


def unless(variable: str, value: str) -> Outcome:
    """Wrong, but with this variable."""
    return PASSED if os.environ.get(variable) == value else WRONG


ACTS: dict[str, Callable[[], Outcome]] = {
    "wrong": lambda: WRONG,
    "abort": os.abort,
    "exit": lambda: os._exit(9),
    "hang": asleep,
    "lost": lambda: ("crashed", "RuntimeError: HIP error: an illegal memory access was encountered"),
    "wrong with sdma": lambda: unless("HSA_ENABLE_SDMA", "0"),
    "wrong with gemm solvers": lambda: unless("MIOPEN_DEBUG_CONV_GEMM", "0"),
    "wrong if fast": lambda: unless("ROCBLAS_USE_HIPBLASLT", "0"),
}


def main() -> int:
    log, faults, job = Path(sys.argv[1]), json.loads(sys.argv[2]), job_of(SelfTestJob)
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"job": to_json(job), "environment": dict(os.environ)}) + "\n")
    if faults.get("start") == "die":
        sys.exit("cannot load amdhip64_7.dll")
    if faults.get("start") == "hang":
        asleep()
    names = [name for name in NAMES if not job.only or name.partition(".")[0] in job.only]
    sys.stdout.write("a library talks\n")
    writer = LineWriter()
    writer.write("checks", names=names)
    for name in names:
        if {name, name.partition(".")[0], name.rpartition(".")[0]} & set(job.skip):
            continue
        writer.write("check", name=name, timeout_s=faults.get("timeout_s", 20.0))
        status, detail = ACTS[faults[name]]() if name in faults else PASSED
        writer.write("result", name=name, status=status, seconds=0.01, detail=detail)
        if status == "crashed":
            return 70
    return 0


if __name__ == "__main__":
    sys.exit(main())
