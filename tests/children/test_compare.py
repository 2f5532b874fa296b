"""The comparison's row for each file of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lora_rocm.children import compare
from lora_rocm.children.compare import mean_losses
from lora_rocm.errors import AdapterError
from lora_rocm.train.held_out import HeldOut
from tests.wording import worded


def test_the_mean_over_samples_is_the_loss_over_all_trained_tokens() -> None:
    found = [HeldOut("short", 1.0, 10, {}), HeldOut("long", 3.0, 30, {}), HeldOut("long", 5.0, 30, {})]
    losses = mean_losses(found)
    assert sum(losses.values()) / len(losses) == pytest.approx((1.0 * 10 + 4.0 * 30) / 40)
    same = [HeldOut("a", 0.1, 1, {}), HeldOut("b", 0.3, 1, {})]
    assert mean_losses(same) == {"a": 0.1, "b": 0.3} and mean_losses([]) == {}


def test_files_that_cannot_be_read_are_left_out_unless_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def state(family: Any, model: Any, adapter: Any, path: Path, tokens: Any) -> dict[str, int]:
        if path.name.startswith("bad"):
            raise AdapterError("x", "It is damaged.", where=path.name)
        return {"weight": len(path.name)}

    said: list[str] = []
    monkeypatch.setattr(compare, "_state", state)
    monkeypatch.setattr(compare, "CONTEXT", SimpleNamespace(notice=said.append))
    nothing: Any = None
    states = compare._states(nothing, nothing, nothing, [(2, "bad1"), (4, "good"), (6, "bad2")], ())
    assert states == {4: {"weight": 4}}
    assert said == [worded("children/step-2-is-left-out-it-is"), worded("children/step-6-is-left-out-it-is")]
    with pytest.raises(AdapterError, match="damaged") as caught:
        compare._states(nothing, nothing, nothing, [(2, "bad1"), (6, "bad2")], ())
    assert caught.value.where == "bad1"
