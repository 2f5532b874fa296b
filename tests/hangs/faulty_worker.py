"""The real training worker with one fault that comes once: ``python -m tests.hangs.faulty_worker RUN_DIR ...``.

The file ``<run directory>.fault`` next to the run directory names it. It is deleted when the fault comes, so the next
start is a sound one.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from lora_rocm.loader.cached_dataset import CachedDataset
from lora_rocm.train import artifacts, worker
from lora_rocm.train.loop import Trainer

FOREVER_S = 3600
GRANDCHILD = "grandchild"
START_ORPHAN = (
    "import subprocess, sys; "
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)']); "
    "open(sys.argv[1], 'w').write(str(child.pid))"
)


def sleeps(run_dir: Path) -> None:
    """Python's own sleep: other threads continue."""
    time.sleep(FOREVER_S)


def blocks_in_c(run_dir: Path) -> None:
    """A call into C that keeps the interpreter's lock: no other Python thread of the process runs again.

    And a process that it once started through another one, which has gone: nobody's child.
    """
    subprocess.run([sys.executable, "-c", START_ORPHAN, str(run_dir / GRANDCHILD)], check=True)
    library = ctypes.PyDLL("msvcrt" if sys.platform == "win32" else None)
    if sys.platform == "win32":
        library._sleep(FOREVER_S * 1000)
    else:
        library.sleep(FOREVER_S)


def never_ending_kernel(run_dir: Path) -> None:
    """A kernel of some ten minutes, longer than any limit here: code that waits for the device hangs."""
    torch.cuda._sleep(2**40)


def fault_file(run_dir: Path) -> Path:
    """It is next to the run directory, which takes no foreign files."""
    return run_dir.with_name(f"{run_dir.name}.fault")


def _after(
    calls: int, run_dir: Path, fault: Callable[[Path], None], function: Callable[..., Any]
) -> Callable[..., Any]:
    made = 0

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal made
        made += 1
        if made == calls and fault_file(run_dir).exists():
            fault_file(run_dir).unlink()
            fault(run_dir)
        return function(*args, **kwargs)

    return wrapped


# name -> its place (the object and its function), the number of the call, and the fault
FAULTS: dict[str, tuple[Any, str, int, Callable[[Path], None]]] = {
    "loader": (CachedDataset, "__getitem__", 9, sleeps),
    "c-call": (Trainer, "_update", 5, blocks_in_c),
    "checkpoint": (artifacts, "save_checkpoint", 2, sleeps),
    "kernel": (Trainer, "_update", 5, never_ending_kernel),
}


def main() -> int:
    run_dir = Path(sys.argv[1])
    if fault_file(run_dir).exists():
        owner, name, calls, fault = FAULTS[fault_file(run_dir).read_text(encoding="utf-8")]
        setattr(owner, name, _after(calls, run_dir, fault, getattr(owner, name)))
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
