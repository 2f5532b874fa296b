"""A thread opens the device while packages are imported. Its errors are the start's errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from lora_rocm.errors import CanaryError, MachineError
from lora_rocm.hardware.settings import Settings
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.run_context import NOBODY
from lora_rocm.train import opened_device
from lora_rocm.train.opened_device import OpenedDevice

CPU, PLANNED = torch.device("cpu"), Settings()
ROOT = Path(__file__).parents[2]
OPENS = """
import json, sys, threading
import torch
import lora_rocm.train.worker
from lora_rocm.checks import attention_routes
from lora_rocm.hardware.settings import Settings
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.rundir.run_context import NOBODY
from lora_rocm.train.opened_device import OpenedDevice
attention_routes.TRIED_ON = ("cpu",)
recipe = recipe_from(json.loads(sys.argv[1]))
found, start = [], threading.Thread.start
def begin(thread):
    before = {*sys.modules}
    start(thread)
    thread.join()
    found.append(sorted({*sys.modules} - before))
threading.Thread.start = begin
OpenedDevice(torch.device("cpu"), Settings(), recipe, NOBODY).settings()
threading.Thread(target=torch.use_deterministic_algorithms, args=(False,)).start()
print(json.dumps(found))
"""
SECTIONS = {
    "model": {"family": "sdxl", "name_or_path": "builtin:tiny-sdxl"},
    "data": {"path": "."},
    "train": {"max_train_steps": 1, "mixed_precision": "bf16"},
}


@pytest.fixture
def recipe() -> Recipe:
    return recipe_from(SECTIONS)


def test_it_opens_while_this_thread_goes_on(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, given = threading.Event(), list[object]()

    def tested(settings: Settings, *how: object) -> Settings:
        given.append(how[:2])
        assert goes_on.wait(20), "the start waits for it"
        return Settings(flash_attention=False)

    monkeypatch.setattr(opened_device, "checked_attention", tested)
    opened = OpenedDevice(CPU, PLANNED, recipe, NOBODY)
    assert opened.dtype() is torch.bfloat16  # known while attention is tested
    goes_on.set()
    assert opened.settings() == Settings(flash_attention=False) == opened.settings()
    assert given == [(CPU, (torch.bfloat16, torch.float32))]


@pytest.mark.parametrize("index", [0, 1])
def test_the_thread_uses_the_gpu_of_its_rank(index: int, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = list[object]()
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(opened_device, "wake", lambda *given: None)
    monkeypatch.setattr(opened_device, "checked_attention", lambda settings, *given: settings)
    device = torch.device("cuda", index)
    opened = OpenedDevice(device, PLANNED, recipe, NOBODY)
    assert (opened.dtype(), opened.settings()) == (torch.bfloat16, PLANNED)
    assert chosen == ([device] if index else [])


@pytest.mark.parametrize(
    "error",
    [
        MachineError("no-attention", "", where="", fix=""),
        CanaryError("canary-kernel", "", where="", fix=""),
        RuntimeError("HIP error: out of memory"),
    ],
)
@pytest.mark.parametrize("part", ["wake", "compute_dtype", "checked_attention"])
def test_an_error_reaches_the_start(
    error: Exception, part: str, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: object) -> None:
        raise error

    monkeypatch.setattr(opened_device, part, fails)
    opened = OpenedDevice(CPU, PLANNED, recipe, NOBODY)
    asked = [opened.settings] if part == "checked_attention" else [opened.dtype, opened.settings]
    for ask in asked:
        with pytest.raises(type(error)) as caught:
            ask()
        assert caught.value is error


def test_the_thread_imports_nothing() -> None:
    """Another thread may have imported half of a package. The control is a function that imports torch's compiler."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", OPENS, json.dumps(SECTIONS)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=300)
    by_thread, by_control = json.loads(done.stdout.splitlines()[-1])
    assert by_thread == [] and len(by_control) > 100
