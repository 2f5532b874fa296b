"""Real workers that really hang, and the bytes of the run that did not.

Only where the fault comes differs from a user's run: supervisor, worker and training are the real ones. Quick ones with
a fake worker: tests/supervisor/test_supervisor.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lora_rocm.rundir.layout import RunDir
from tests.event_lines import read_events
from tests.hangs.faulty_worker import FAULTS, GRANDCHILD, fault_file
from tests.program import Program
from tests.test_kill import results, write_recipe

LIMITS_S = {"first_step": 60, "step": 6, "checkpoint": 6}
GPU_LIMITS_S = {"first_step": 120, "step": 25, "checkpoint": 60}  # the first kernels of each shape take their time
UPDATES = 6  # the faults come at the fifth, and at the checkpoint of the sixth
LEEWAY_S = 15.0  # from the limit to the supervisor's word: it waits for the stacks
DEADLINE_S = 300

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("hänge hier"))


def environ() -> dict[str, str]:
    """Workers do not search the current folder, so the path names the faulty one."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def settings_of(recipe: Path) -> tuple[str, ...]:
    return f"cache.dir={recipe.parent / 'cache'}", f"train.max_train_steps={UPDATES}"


def train(
    recipe: Path, run_dir: Path, *more: str, fault: str | None = None, limits_s: dict[str, int] = LIMITS_S
) -> subprocess.CompletedProcess[str]:
    if fault:
        fault_file(run_dir).write_text(fault, encoding="utf-8")
    limits = [f"timeouts.{name}={seconds}" for name, seconds in limits_s.items()]
    settings = [*settings_of(recipe), *limits, *more]
    words = [word for setting in settings for word in ("--set", setting)]
    return subprocess.run(
        [sys.executable, "-m", "tests.hangs.drive", "train", str(recipe), "--run-dir", str(run_dir), *words],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**environ(), "LORA_ROCM_HOME": str(recipe.parent / "home"), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    )


@pytest.fixture(scope="module")
def undisturbed(recipe: Path) -> dict[str, bytes]:
    """Of a run within this process, which has the libraries already."""
    with pytest.MonkeyPatch.context() as patch:
        done = Program(patch).train(recipe.parent / "straight", *settings_of(recipe), recipe=recipe)
    assert done.code == 0, done.text
    return results(recipe.parent / "straight")


def supervised(run_dir: Path) -> list[dict[str, Any]]:
    events = read_events(RunDir(run_dir).events("supervisor"))
    return [event for event in events if event["type"] not in ("telemetry", "alarm")]


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_has_its_place(fault: str) -> None:
    """The others are slow, so a function that was renamed would be found late."""
    owner, name, _, _ = FAULTS[fault]
    assert callable(getattr(owner, name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "seen", "phase", "in_the_stacks"),
    [
        ("loader", "loader-hang", "step", "in sleeps"),
        ("c-call", "hang", "step", "in blocks_in_c"),
        ("checkpoint", "hang", "checkpoint", "in sleeps"),
    ],
)
def test_a_worker_that_hangs_is_ended_and_the_bytes_are_those_of_an_undisturbed_run(
    recipe: Path, undisturbed: dict[str, bytes], tmp_path: Path, fault: str, seen: str, phase: str, in_the_stacks: str
) -> None:
    run_dir, started = tmp_path / "run", time.time()
    done = train(recipe, run_dir, fault=fault)
    assert done.returncode == 0, done.stdout + done.stderr
    failure, *others = supervised(run_dir)
    log = (run_dir / "worker.log").read_text(encoding="utf-8", errors="replace")[-3000:]
    assert (failure["type"], failure["seen"], failure["phase"]) == ("failure", seen, phase), f"{failure}\n{log}"
    assert [event["type"] for event in others] == ["restart"]  # nothing else failed, and nothing had to change
    assert LIMITS_S[phase] < failure["silent_s"] <= LIMITS_S[phase] + LEEWAY_S
    assert in_the_stacks in (run_dir / failure["stacks"]).read_text(encoding="utf-8")
    assert results(run_dir) == undisturbed
    workers = [event["pid"] for event in read_events(RunDir(run_dir).events()) if event["type"] == "start"]
    assert len(workers) == 2 and all(map(is_gone, workers))
    if fault == "c-call":  # and its child through a process that has ended
        grandchild = int((run_dir / GRANDCHILD).read_text(encoding="utf-8"))
        assert is_gone(grandchild) and others[0]["time"] > started


@pytest.mark.slow
def test_without_a_supervisor_nobody_ends_it(recipe: Path, tmp_path: Path) -> None:
    """The control: the same fault, and nobody who watches; the run does not come to its end."""
    run_dir = tmp_path / "run"
    fault_file(run_dir).write_text("checkpoint", encoding="utf-8")
    command = [sys.executable, "-m", "tests.hangs.drive", "train", str(recipe), "--run-dir", str(run_dir)]
    command += ["--no-supervisor", "--set", f"cache.dir={recipe.parent / 'cache'}"]
    with subprocess.Popen(command, env=environ(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as parent:
        try:
            deadline = time.monotonic() + DEADLINE_S
            while not (run_dir / "checkpoints" / "lora-step00000006.safetensors").exists():
                assert parent.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
            with pytest.raises(subprocess.TimeoutExpired):
                parent.wait(LIMITS_S["checkpoint"] + 3)
        finally:
            for process in [*psutil.Process(parent.pid).children(recursive=True), psutil.Process(parent.pid)]:
                process.kill()


@pytest.mark.gpu
def test_gpu_kernel_that_does_not_end(recipe: Path, tmp_path: Path) -> None:
    """On deterministic kernels the bytes equal the undisturbed run on the same GPU."""
    assert torch.cuda.is_available()
    gpu = ("runtime.device=gpu", "runtime.deterministic=true", "train.mixed_precision=bf16", "runtime.max_restarts=3")
    assert train(recipe, tmp_path / "straight", *gpu, limits_s=GPU_LIMITS_S).returncode == 0
    done = train(recipe, tmp_path / "run", *gpu, fault="kernel", limits_s=GPU_LIMITS_S)
    assert done.returncode == 0, done.stdout + done.stderr
    failure, *others = supervised(tmp_path / "run")
    log = (tmp_path / "run" / "worker.log").read_text(encoding="utf-8", errors="replace")[-3000:]
    assert (failure["seen"], failure["phase"]) == ("hang", "step"), f"{failure}\n{log}"
    effects = [event["effect"] for event in others if event["type"] == "change"]
    assert all(effect == "exact" for effect in effects)
    stacks = (tmp_path / "run" / failure["stacks"]).read_text(encoding="utf-8")
    assert "in fit" in stacks, stacks  # in the step: wherever the launch queue was full, or the device was waited for
    assert results(tmp_path / "run") == results(tmp_path / "straight")
