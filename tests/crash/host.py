"""A warmed process that forks a child for each run, so that a run costs a fraction of a second.

Started by ``lab.py`` with the shim preloaded. Each line of standard input is a job (JSON): arguments of a command line,
and where the shim is to strike. The answer is how the child ended; the file ``said`` has the output for the user.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_rocm.rundir.checkpoint_record import Position
from lora_rocm.train import resume
from tests.program import Program

SHIM = ctypes.CDLL(None)


def forget_the_position(patch: pytest.MonkeyPatch) -> None:
    """A resume that takes everything over but where it is in the data."""
    restore = resume.restore
    patch.setattr(resume, "restore", lambda *given: Position(iteration=0, updates=restore(*given).updates))


def write_in_place(patch: pytest.MonkeyPatch) -> None:
    """Files written under their own names, as is usual and wrong."""

    def write(path: Path, content: bytes, root: Path | None = None, *, read_back: bool = True) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    importers = [name for name in sys.modules if name.startswith("lora_rocm.")]
    for module in [sys.modules[name] for name in importers if hasattr(sys.modules[name], "write_atomic")]:
        patch.setattr(module, "write_atomic", write)


FAULTS = {"position": forget_the_position, "in-place": write_in_place}


def warm(job: dict[str, Any]) -> None:
    """One run, so that every import is done; afterwards the collector ignores all existing objects."""
    _command(job)
    gc.collect()
    gc.freeze()


def _command(job: dict[str, Any]) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        program = Program(patch)
        for fault in job.get("faults", ()):
            FAULTS[fault](patch)
        return asdict(program(*job["arguments"]))


def child(job: dict[str, Any]) -> None:
    """Run the command with the shim armed; never returns."""
    try:
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        SHIM.crash_arm(os.fsencode(job["root"]), job["at"], job["mode"], job["error"], log)
        said = _command(job)
        SHIM.crash_disarm()
        Path(job["said"]).write_text(json.dumps(said), encoding="utf-8")
        os._exit(0)
    except BaseException:
        SHIM.crash_disarm()
        traceback.print_exc()
        os._exit(70)


def main() -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    warm(json.loads(sys.stdin.readline()))
    answers.write("ready\n")
    answers.flush()
    while line := sys.stdin.readline():
        pid = os.fork()
        if not pid:
            child(json.loads(line))
        _, status = os.waitpid(pid, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")
        answers.flush()


if __name__ == "__main__":
    main()
