"""The first pass: measured with as much other memory in use as a step will have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lora_rocm.adapters.flat_params import FlatWeights
from lora_rocm.device.allocator import NO_LIMIT
from lora_rocm.train import build_trainer
from lora_rocm.train.engine import Engine


@pytest.mark.parametrize("keeps", [[True], [False], [True, False], [False, True]])
def test_the_gradients_buffer_is_there_where_the_plan_in_force_has_it(
    monkeypatch: pytest.MonkeyPatch, keeps: list[bool]
) -> None:
    """A pass for each plan; the last plan stays in force."""
    weights = FlatWeights({"w": nn.Parameter(torch.ones(3))})
    were_there = []
    memory = SimpleNamespace(offload=None, parts=1, recomputes_all=False, captures=True, keeps_gradients=False)
    memory.least_recomputing = lambda family, model: None

    def eager(batch: Any, draws: Any) -> None:
        were_there.append(weights._gradients is not None)
        weights.gradients.fill_(5.0)

    def probe(family: Any, model: Any, transfer: Any, run: Any) -> None:
        for each in keeps:
            memory.keeps_gradients = each
            run({}, {})

    memory.probe = probe
    monkeypatch.setattr(Engine, "run", lambda self, *given: eager(*given))
    engine = Engine(None, None, weights, torch.ones(()), None)  # type: ignore[arg-type]
    optimizer = SimpleNamespace(weights=weights)
    artifacts = SimpleNamespace(memory=memory, family=None, model=None, transfer=None, optimizer=optimizer)
    trainer = SimpleNamespace(engine=engine, optimizer=optimizer, relief=SimpleNamespace(), limit=NO_LIMIT)
    build_trainer.first_pass(None, artifacts, trainer, None)  # type: ignore[arg-type]
    assert were_there == keeps and (weights._gradients is not None) is keeps[-1]
    assert not weights.gradients.any()
