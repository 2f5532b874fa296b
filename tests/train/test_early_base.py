"""The base is read while samples are encoded where there is a GPU, and main memory for both."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from lora_rocm.base_models import loading
from lora_rocm.families.base import family_for
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.train import early_base
from tests.tiny_models import SHALLOW, write_tiny_sdxl

ROOM, CUDA, SHARED, CPU = 64 * 2**30, torch.device("cuda"), torch.device("cuda:1"), torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_sdxl(tmp_path_factory.mktemp("model"), **SHALLOW)


@pytest.mark.parametrize(
    ("device", "room", "cores", "read"),
    [(CUDA, ROOM, 8, 1), (CPU, ROOM, 8, 0), (SHARED, ROOM, 8, 0), (CUDA, 2**30, 8, 0), (CUDA, ROOM, 2, 0)],
    ids=["all", "no GPU", "shared memory", "no memory", "few cores"],
)
def test_the_base_is_read_early_where_that_helps(
    model: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device, room: int, cores: int, read: int
) -> None:
    recipe = recipe_from(
        {"model": {"name_or_path": str(model)}, "data": {"path": "."}, "train": {"max_train_steps": 1}}
    )
    calls, original, session = list[int](), loading.read_hashed, SimpleNamespace(at_close=ExitStack())

    def counted(*arguments: Any) -> str:
        calls.append(1)
        return original(*arguments)

    monkeypatch.setattr(loading, "read_hashed", counted)
    properties = {CUDA: SimpleNamespace(is_integrated=False), SHARED: SimpleNamespace(is_integrated=True)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties[device])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=room))
    monkeypatch.setattr(early_base.os, "cpu_count", lambda: cores)
    world = SimpleNamespace(size=1)
    start: Any = SimpleNamespace(recipe=recipe, device=device, dtype=torch.bfloat16, session=session, world=world)
    family = family_for(recipe)
    early_base.read_base_early(start, family)
    loaded = family.load(torch.bfloat16, CPU)
    session.at_close.close()
    assert len(calls) == 1
    calls.clear()
    family.load(torch.bfloat16, CPU)  # the control: it was taken once
    assert (len(calls), list(loaded.components)) == (1, ["unet"])
    again = family_for(recipe)
    early_base.read_base_early(start, again)
    session.at_close.close()
    assert len(calls) == 1 + read
