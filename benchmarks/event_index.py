"""Times the opening of a run with many events: the first time, with its index, and after one more step.

python benchmarks/event_index.py --steps 100000
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from lora_rocm.foundation.units import size_text
from lora_rocm.rundir.event_types import StartEvent, StepEvent
from lora_rocm.rundir.events import EventWriter
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.run_view import RunView


def step(updates: int, steps: int) -> StepEvent:
    """Return a step with as many fields as in a real run."""
    return StepEvent(
        updates=updates,
        max_train_steps=steps,
        iteration=updates,
        epoch=updates / 1000,
        loss=0.1 + 1 / updates,
        learning_rate=1e-4,
        grad_norm=0.25,
        step_s=0.8123,
        loading_s=0.0012,
        copy_s=0.0008,
        check_s=0.0004,
        wait_s=0.003,
        memory_bytes=12.5 * 2**30,
        transfer_checks=5 * updates,
        transfer_failures=0,
        loss_scale=None,
        optimizer={"prodigy_d": 1e-6},
        measures={"accuracy": 0.5},
    )


def main() -> int:
    """Write a run, open it three times and print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        run_dir = RunDir(Path(folder) / "run").create()
        writer = EventWriter(run_dir.events(), 1)
        writer.write(StartEvent(pid=1, device="CPU", torch="2", threads=1, precision="bf16", resumed_from=None))
        for updates in range(1, steps + 1):
            writer.write(step(updates, steps))
        time.sleep(4)  # an index of a file that has just changed is compared with it in full
        sys.stdout.write(f"{steps} steps, {size_text(run_dir.events().stat().st_size)}\n")
        for what in ("without an index", "with its index"):
            _say(what, run_dir, steps)
        writer.write(step(steps + 1, steps))
        writer.close()
        _say("after one more step", run_dir, steps + 1)
        sys.stdout.write(f"the index: {size_text(run_dir.index_of(run_dir.events()).stat().st_size)}\n")
    return 0


def _say(what: str, run_dir: RunDir, steps: int) -> None:
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    view = RunView.of(run_dir)
    assert view.updates == len(view.steps) == steps
    taken_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    sys.stdout.write(f"{what}: {taken_s:.3f} s ({cpu_s:.3f} s of a processor)\n")


if __name__ == "__main__":
    sys.exit(main())
