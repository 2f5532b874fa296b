"""Several ranks on the CPU, real processes over gloo: one is killed, and the bytes equal the undisturbed run.

As in ``test_kill.py``; slow, because each rank reads torch and diffusers again at each start.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from lora_rocm.rundir.events import EventReader, current_steps
from lora_rocm.rundir.layout import RunDir
from tests.event_lines import read_events
from tests.test_kill import DEADLINE_S, results, write_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def start(recipe: Path, run_dir: Path, gpus: int, *sets: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "lora_rocm", "train", str(recipe), "--run-dir", str(run_dir), "--gpus", str(gpus)]
    words += [word for text in (f"cache.dir={run_dir.parent / 'cache'}", *sets) for word in ("--set", text)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8")


def finish(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=2 * DEADLINE_S)
    assert process.returncode == 0, output


@pytest.mark.parametrize("gpus", [2, 4])
def test_a_killed_rank_costs_no_byte(gpus: int, tmp_path: Path) -> None:
    recipe, dice = write_recipe(tmp_path), random.Random(gpus)
    finish(start(recipe, tmp_path / "straight", gpus))
    run_dir, process = RunDir(tmp_path / "killed"), start(recipe, tmp_path / "killed", gpus)
    at, rank = dice.randrange(3, 11), dice.randrange(gpus)
    while len(current_steps(EventReader(run_dir.events()).poll())) < at:
        assert process.poll() is None, process.communicate()[0]
    started = [event for event in read_events(run_dir.events(rank)) if event["type"] == "start"]
    psutil.Process(started[-1]["pid"]).kill()
    finish(process)
    assert len([event for event in read_events(run_dir.events("supervisor")) if event["type"] == "restart"]) == 1
    expected, found = results(tmp_path / "straight"), results(run_dir.path)
    assert expected.keys() <= found.keys() and [name for name in expected if found[name] != expected[name]] == []


@pytest.mark.parametrize(("gpus", "micro_batches"), [(2, 2), (4, 2), (4, 1)])
def test_the_updates_are_those_of_one_with_the_same_effective_batch(
    gpus: int, micro_batches: int, tmp_path: Path
) -> None:
    """An epoch has six micro-batches, so several ranks have fewer than others in its last update, or none.

    PEFT's dropout draws for a micro-batch as a whole, so it is excluded.
    """
    recipe, without = write_recipe(tmp_path), ("lora.dropout=0", "train.max_train_steps=4", "sample.prompts=[]")
    accumulation = "train.gradient_accumulation_steps"
    finish(start(recipe, tmp_path / "one", 1, *without, f"{accumulation}={micro_batches * gpus}"))
    finish(start(recipe, tmp_path / "several", gpus, *without, f"{accumulation}={micro_batches}"))
    one, several = (
        [(event["loss"], event["grad_norm"]) for event in read_events(RunDir(tmp_path / name).events())
         if event["type"] == "step"]
        for name in ("one", "several")
    )  # fmt: skip
    assert len(one) == 4 and several == [pytest.approx(values, rel=1e-4) for values in one]
    weights = [load_file(tmp_path / name / "checkpoints" / "step-00000003" / "adapter.safetensors")
               for name in ("one", "several")]  # fmt: skip
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=1e-4) for name in weights[0])
