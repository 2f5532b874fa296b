"""A hard limit of the system on the process: the run finishes with the effective batch that was asked for."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from benchmarks.limited_worker import PRECISE, SPARE
from lora_rocm.recipe.load import load_recipe
from lora_rocm.rundir.layout import RunDir
from tests.event_lines import read_events
from tests.train.runs import start as start_here

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits on addresses are Linux's")

ROOT = Path(__file__).parents[2]
SIDE_PX, BATCH, STEPS = 320, 8, 2
SPARE_BYTES = 165 * 2**20
"""Whole batches do not fit into 250 MiB, and parts of two images fit into 100 (measured with other numbers here)."""


def start(run_dir: RunDir, spare_bytes: int) -> tuple[int, str]:
    """The worker itself in a separate process, with a limited amount of further memory once training begins."""
    environ = {**os.environ, **PRECISE, SPARE: str(spare_bytes)}
    command = [sys.executable, "-m", "benchmarks.limited_worker", str(run_dir.path)]
    with subprocess.Popen(
        command, cwd=ROOT, env=environ, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as child:
        assert child.stderr is not None
        said = child.stderr.read().decode("utf-8", "replace")  # standard input stays open: the parent is alive
    return child.returncode, said


def prepare(root: Path, name: str) -> RunDir:
    images = root / "images"
    images.mkdir(exist_ok=True)
    for number in range(BATCH):
        pixels = random.Random(number).randbytes(3 * SIDE_PX**2)
        Image.frombytes("RGB", (SIDE_PX, SIDE_PX), pixels).save(images / f"{number}.png")
        (images / f"{number}.txt").write_text("a cat", encoding="utf-8")
    run_dir = RunDir(root / name).create()
    run_dir.recipe.write_text(
        "model: {name_or_path: 'builtin:tiny-sdxl'}\n"
        f"data: {{path: '{images}', resolution: {SIDE_PX}}}\n"
        "lora: {rank: 2, targets: 'mid_block.*(to_q|to_v)'}\n"
        f"train: {{max_train_steps: {STEPS}, batch_size: {BATCH}, mixed_precision: 'no'}}\n"
        f"runtime: {{device: cpu, threads: 1}}\ncache: {{dir: '{root / 'cache'}'}}\noutput: {{dtype: fp32}}\n",
        encoding="utf-8",
    )
    return run_dir


def events(run_dir: RunDir, event_type: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run_dir.events()) if event["type"] == event_type]


@pytest.mark.slow
def test_a_process_that_may_not_grow_finishes_in_smaller_parts(tmp_path: Path) -> None:
    free, tight = prepare(tmp_path, "free"), prepare(tmp_path, "tight")
    assert start_here(load_recipe(free.recipe).recipe, free.path)
    code, said = start(tight, SPARE_BYTES)
    assert code == 0, said
    assert events(free, "change") == events(free, "incident") == []
    assert {event["id"] for event in events(tight, "change")} == {"micro-batch-halved"}
    assert {event["kind"] for event in events(tight, "incident")} == {"out-of-memory"}
    losses = [[event["loss"] for event in events(run_dir, "step")] for run_dir in (free, tight)]
    assert len(losses[0]) == STEPS and losses[1] == pytest.approx(losses[0], rel=1e-5)
    whole, parts = load_file(free.lora), load_file(tight.lora)
    assert whole.keys() == parts.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-4, atol=1e-6)
