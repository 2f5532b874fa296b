"""The script that measures what the guard costs: its sums, and that the blocks differ in the guard alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import reliable_price
from benchmarks.reliable_price import (
    Block,
    Figures,
    Look,
    Measured,
    State,
    idle_and_busy_us,
    kept,
    kernels_of,
    main,
    summary,
    summary_of_state,
)
from lora_rocm.optim.state_guard import StateGuard
from lora_rocm.recipe.kinds import recipe_from
from tests.tiny_models import SHALLOW, write_tiny_sdxl


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=12))
def test_idle_and_busy_are_those_of_a_count_of_each_microsecond(spans: list[tuple[int, int]]) -> None:
    intervals = [(begin, begin + length) for begin, length in spans]
    kept = {place for begin, end in intervals for place in range(begin, end)}
    whole = max(end for _, end in intervals) - min(begin for begin, _ in intervals)
    assert idle_and_busy_us(intervals) == (whole - len(kept), len(kept))


def test_copies_are_no_kernels() -> None:
    events = [
        {"cat": "kernel", "ts": 1.0, "dur": 2.0, "name": "gemm"},
        {"cat": "gpu_memcpy", "ts": 3.0, "dur": 2.0, "name": "Memcpy HtoD"},
        {"cat": "gpu_user_annotation", "ts": 0.0, "dur": 9.0, "name": "Optimizer.step"},
        {"cat": "cuda_runtime", "ts": 0.0, "dur": 9.0, "name": "cudaLaunchKernel"},
        {"ph": "M", "name": "process_name"},
    ]
    assert kernels_of({"traceEvents": events}) == [(1.0, 3.0)]


def test_the_shares() -> None:
    def blocks(name: str, on: float, off: float) -> list[Block]:
        both = [Block(True, 20, 101.0, 0.3, 0.5), Block(False, 20, 100.0, 0.0, 0.4)]
        for block, value in zip(both, (on, off), strict=True):
            setattr(block, name, value)
            block.busy_ms = 90.0
        return both

    figures = Figures(blocks("step_ms", 100.4, 100.0) * 5, blocks("idle_ms", 8.2, 8.0) * 3, every=250)
    figures.looks, figures.profiled_looks = [Look(0.05)], [Look(0.05, 0.025)]
    found = summary(figures)
    assert found["guard_added_wall_percent"] == pytest.approx(0.4)
    assert found["guard_added_idle_percent"] == pytest.approx(0.2)
    assert found["canary_wall_percent"] == pytest.approx(0.2)  # 0.05 s in 250 steps of 0.1 s
    assert found["guard_host_ms"] == pytest.approx(0.1)
    assert found["idle_at_most_percent"] == pytest.approx(0.1 + 0.1)  # half of a check is without a kernel
    assert found["time_at_most_percent"] == pytest.approx(0.1 + 0.2)  # no separate kernels in these blocks
    figures.blocks = blocks("step_ms", 100.03, 100.0) * 5  # the host works in parallel with the GPU: no step is longer
    assert summary(figures)["idle_at_most_percent"] == pytest.approx(0.03 + 0.1)
    for block in figures.profiled[::2]:
        block.busy_ms = 90.02  # the guard's own kernels' share of the added time: nothing idles meanwhile
    assert summary(figures)["idle_at_most_percent"] == pytest.approx(0.01 + 0.1)


def test_the_share_of_the_guard_of_trained_state() -> None:
    steps = [(57.2, 57.0), (57.1, 57.0), (57.4, 57.0), (58.0, 57.0)]
    blocks = [Block(guarded, 20, ms, 0.0) for pair in steps for guarded, ms in zip((True, False), pair, strict=True)]
    figures = Figures(of_state=blocks, state=State(560_000_000, 0.000171, 0.00014, 4e12))
    found = summary_of_state(figures)
    assert found["state_step_ms_off"] == 57.0 and found["state_added_wall_percent"] == pytest.approx(100 * 0.3 / 57)
    assert found["state_added_wall_from_percent"] == pytest.approx(100 * 0.2 / 57)
    assert found["state_alone_percent"] == pytest.approx(0.3)
    assert found["state_gb_per_s"] == pytest.approx(4000) and found["state_bandwidth_percent"] == pytest.approx(100)
    figures.state.busy_s = None  # no GPU: by the clock
    assert summary_of_state(figures)["state_bandwidth_percent"] == pytest.approx(100 * 0.14 / 0.171)


@pytest.mark.parametrize(
    ("figures", "lora", "plain", "broken"),
    [
        ({}, {}, False, []),
        ({"idle_at_most_percent": 0.51}, {}, False, ["idle"]),
        ({"state_bandwidth_percent": 79.0}, {}, False, ["state, bandwidth"]),
        ({"state_bandwidth_percent": 79.0}, {"rank": 64}, False, ["state, bandwidth"]),
        ({"state_added_wall_to_percent": 0.31}, {}, False, ["state, share of a step"]),
        ({"state_added_wall_to_percent": 0.31}, {"rank": 64}, False, []),
        ({"state_added_wall_to_percent": 1.5, "state_bandwidth_percent": 20.0}, {}, True, []),
    ],
)
def test_the_promises(figures: dict[str, float], lora: dict[str, int], plain: bool, broken: list[str]) -> None:
    found = {
        "idle_at_most_percent": 0.5,
        "state_bandwidth_percent": 80.0,
        "state_added_wall_to_percent": 0.3,
        **figures,
    }
    sections = {"model": {"name_or_path": "x"}, "data": {"path": "x"}, "train": {"max_train_steps": 1}}
    recipe = recipe_from({**sections, "lora": {"rank": 16, "targets": "attention", **lora}})
    assert [promise for promise, holds in kept(found, recipe, plain).items() if not holds] == broken


@pytest.mark.skipif(torch.cuda.is_available(), reason="the rehearsal is for machines without a GPU")
def test_the_rehearsal_checks_in_blocks_with_the_guard_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks: list[tuple[str, bool, int, int]] = []
    block, renew, renewed = Measured._block, StateGuard.renew, [0]

    def counted(trainer: Measured, guarded: bool, steps: int, guard: str = "batches") -> Block:
        before, renewed[0] = trainer.transfer.checks, 0
        made = block(trainer, guarded, steps, guard)
        checks.append((guard, guarded, trainer.transfer.checks - before, renewed[0]))
        return made

    def counting(guard: StateGuard) -> None:
        renewed[0] += 1
        renew(guard)

    monkeypatch.setattr(Measured, "_block", counted)
    monkeypatch.setattr(StateGuard, "renew", counting)
    monkeypatch.setattr(reliable_price, "WARM_UP_STEPS", 1)
    monkeypatch.setattr(reliable_price, "LOOKS", 1)
    write_tiny_sdxl(tmp_path / "tiny", **SHALLOW)
    monkeypatch.setitem(reliable_price.MODELS, True, str(tmp_path / "tiny"))
    arguments = [str(tmp_path), "--toy", "--pairs", "2", "--steps", "1", "--json", str(tmp_path / "price.json")]
    assert main(arguments) == 0 and "nothing is said of idle time" in capsys.readouterr().err
    kinds = [(guard, guarded) for guard in ("batches", "state") for guarded in (True, False)]
    assert [(guard, guarded) for guard, guarded, *_ in checks] == [*kinds[:2], *kinds, *kinds]
    for guard, guarded, sent, of_state in checks:
        assert (sent > 0) == (guarded or guard == "state") and (of_state > 0) == (guarded or guard == "batches")
    told = json.loads((tmp_path / "price.json").read_text(encoding="utf-8"))
    assert told["canary_every_n_steps"] == 250 and told["state_mb_read"] > 0 and told["state_alone_ms"] > 0
