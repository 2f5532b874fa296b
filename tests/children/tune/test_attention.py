"""The trial of attention: a backend that is wrong, missing or failing has a problem and no time; a correct one has a
time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lora_rocm.checks.timing import MeasuredRow, measure
from lora_rocm.children.tune import attention
from lora_rocm.children.tune.attention import Trial, prepared
from lora_rocm.children.tune.job import AttentionCall
from lora_rocm.device.attention import OTHERS, context_of
from lora_rocm.processes.jobs import TuneAttentionJob
from lora_rocm.processes.tool import write_job
from lora_rocm.recipe.load import load_recipe

CPU = torch.device("cpu")
CALLS = (
    AttentionCall(2, 3, 16, 16, 8, False),
    AttentionCall(1, 2, 16, 7, 8, False),
    AttentionCall(1, 2, 9, 9, 8, True),
)
Attend = Callable[..., Tensor]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def trials(request: Any) -> list[Trial]:
    return [Trial.of(call, 3, CPU, request.param) for call in CALLS]


def rows_of(ways: dict[str, Any], trials: list[Trial], capfd: Any) -> list[dict[str, Any]]:
    works = []
    for way, context in ways.items():
        found: dict[str, Any] = {}
        works.append(
            MeasuredRow({"way": way}, 1.0, lambda w=way, c=context, f=found: prepared(w, c, trials, False, f), found)
        )  # type: ignore[misc]
    measure(works, 0, lambda call: call(), limit_s=60)  # type: ignore[arg-type, return-value]
    events = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    return [event for event in events if event["type"] == "row"]


def faulty(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Tensor], Tensor]) -> Any:
    def attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> Tensor:
        return spoil(F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale))

    monkeypatch.setitem(OTHERS, "flash", lambda: attend)
    return context_of("flash")


def spoils_gradients(output: Tensor) -> Tensor:
    return output.detach() + (output - output.detach()) * 1.05


def spoils_a_tail(output: Tensor) -> Tensor:
    return torch.cat([output[..., :-1, :], output[..., -1:, :] * 0], dim=-2)


@pytest.mark.parametrize(
    "spoil",
    [lambda output: output * 1.05, lambda output: output * float("nan"), spoils_gradients, spoils_a_tail],
    ids=["scaled", "nan", "gradients", "tail"],
)
def test_wrong_numbers_are_found(spoil: Any, trials: list[Trial], monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    (row,) = rows_of({"flash": faulty(monkeypatch, spoil)}, trials, capfd)
    assert row["problem"].startswith("wrong: ") and row["seconds"] is None


def test_right_ways_have_times_and_errors(trials: list[Trial], monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    ways = {way: context_of(way) for way in ("sdpa", "math", "math-groups", "sdpa-flash")}
    ways["flash"] = faulty(monkeypatch, lambda output: output)
    for row in rows_of(ways, trials, capfd):
        assert row["problem"] is None and row["seconds"] > 0 and row["error"] < 0.1, row
        assert [shape[1] for shape in row["shapes"]] == [3, 3, 3]


def test_what_is_not_here_is_told(trials: list[Trial], monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    def missing() -> Attend:
        raise ModuleNotFoundError("No module named 'aiter'")

    monkeypatch.setitem(OTHERS, "aiter", missing)
    ways = {way: context_of(way) for way in ("aiter", "sdpa-cudnn")}
    assert [row["problem"][:11] for row in rows_of(ways, trials, capfd)] == ["unavailable"] * 2


def test_one_that_raises_is_told_and_the_next_is_tried(trials: list[Trial], capfd: Any) -> None:
    @contextmanager
    def raises() -> Iterator[None]:
        raise RuntimeError("HIP error: invalid device function")
        yield

    first, second = rows_of({"flash": raises, "sdpa": context_of("sdpa")}, trials, capfd)
    assert "invalid device function" in first["problem"] and second["problem"] is None


def test_the_reference_is_torchs_plain_attention() -> None:
    trial = Trial.of(CALLS[2], 1, CPU, torch.float32)
    for found, other in zip(trial.wanted, trial.run(context_of("math")), strict=True):
        torch.testing.assert_close(found, other.detach(), rtol=1e-5, atol=1e-6)


def test_the_child_tries_a_recipe_at_its_own_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:

    tried: list[list[AttentionCall]] = []
    whole = attention.prepared

    def only_small(way: str, context: Any, trials: list[Trial], captured: bool, found: dict[str, Any]) -> Any:
        tried.append([trial.call for trial in trials])
        return whole(way, context, trials[:1], captured, found)

    monkeypatch.setattr(attention, "prepared", only_small)
    changes = ["runtime.device=cpu", "train.batch_size=1", "data.resolution=64", "lora.targets=attention"]
    recipe = load_recipe("demo.yaml", changes).recipe.model_dump(mode="json")
    path = write_job(tmp_path, TuneAttentionJob(recipe=recipe, ways=("sdpa",), limit_s=60.0))
    monkeypatch.setattr("sys.argv", ["child", str(path)])
    assert attention.main() == 0
    row = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert row["way"] == "sdpa" and row["problem"] is None
    assert {(call.batch, call.keys) for call in tried[0]} >= {(1, 77)}, "cross-attention to the caption"
