"""On a GPU: captured steps with the token embedding in main memory have equal losses, and take less memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lora_rocm.families.base import LoadedModel, ModelFamily, token_table
from lora_rocm.memory.manager import MemoryManager
from lora_rocm.train.graphs import Captured
from tests.train.runs import losses_of, start
from tests.train.test_embedding_rows import recipe_in

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
VOCABULARY, WIDTH = 200_000, 32


def test_captured_steps_have_equal_losses_and_a_peak_without_the_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_in(tmp_path, vocab_size=VOCABULARY, max_train_steps=8)
    replays, whole, held = list[int](), Captured.run, dict[bool, int]()

    def counted(self: Captured, *given: dict[str, torch.Tensor]) -> object:
        replays.append(torch.cuda.memory_allocated(GPU))
        return whole(self, *given)

    monkeypatch.setattr(Captured, "run", counted)
    for rows in (False, True):

        def table(self: MemoryManager, family: ModelFamily, model: LoadedModel, rows: bool = rows) -> object:
            return token_table(family, model) if rows else None

        monkeypatch.setattr(MemoryManager, "_table", table)
        replays.clear()
        assert start(recipe, tmp_path / str(rows), device=GPU)
        assert replays, "steps were captured"
        held[rows] = max(replays)
    assert losses_of(tmp_path / "True") == pytest.approx(losses_of(tmp_path / "False"), rel=1e-4)
    saved = VOCABULARY * WIDTH * 4
    assert held[False] - held[True] == pytest.approx(saved, rel=0.1)
