"""``python -m benchmarks.training_step`` in the parent: tables, costs, children that die."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training_step import command
from benchmarks.training_step.command import OURS, Asked, over_rounds, price_of
from lora_rocm.errors import MachineError, RecipeError, WorkerDiedError
from tests.supervisor.fake_run import heard
from tests.wording import says

Event = dict[str, Any]
GPU: Event = {
    "type": "machine", "device": "NVIDIA H200", "gpu": True, "torch": "2.11.0", "hip": None, "cuda": "13.0",
    "threads": 8, "budget_bytes": 139 * 2**30, "integrated": False, "gpus": [{}], "diffusers": "0.42", "peft": "0.21",
    "python": "3.12", "matmul": {"side": 8192, "dtype": "bfloat16", "per_second": 789e12},
}  # fmt: skip


def profile(busy_s: float | None, kernels: float = 10_000.0, waits: float = 0.0) -> Event:
    return {
        "device_seen": busy_s is not None, "busy_s": busy_s, "kernels": kernels, "copies": 12.0, "launches": 9.0,
        "graph_launches": 1.0, "waits": waits, "by_kind": {"products": [0.04, 800.0]}, "top": [["nvjet", 0.02, 400.0]],
        "trace": "somewhere/lora-rocm.trace.json.gz",
    }  # fmt: skip


def row(name: str = OURS, again: int = 0, median_s: float = 0.078, busy_s: float | None = 0.074, **more: Any) -> Event:
    times = {"median_s": median_s, "p95_s": median_s * 1.1, "mean_s": median_s, "samples": 1}
    peaks = {"peak_allocated_bytes": 10 * 2**30, "peak_reserved_bytes": 11 * 2**30}
    found = {**times, **peaks, "samples_per_s": 1 / median_s, "profile": profile(busy_s), "recomputes": False}
    if name == OURS:
        found |= {
            "flops": 14.58e12, "flops_per_s": 187e12, "of_matmul": 0.237, "idle_s": 0.004, "parts": 1,
            "blocks": 70, "recomputed_blocks": 0, "offloaded_blocks": 0, "incidents": [],
            "adapted_layers": 560, "trained_weights": 23_000_000,
            "dtype": "bfloat16", "parts_s": {"loading": 0.001, "optimizer": 0.0005},
        }  # fmt: skip
    return {"type": "row", "number": 0, "name": name, "round": again, "problem": None, **found, **more}


def begin(name: str, again: int = 0, limit_s: float = 60.0) -> Event:
    return {"type": "begin", "number": 0, "limit_s": limit_s, "fields": {"name": name, "round": again}}


def died() -> WorkerDiedError:
    return WorkerDiedError("worker-died", "The process x ended without saying why: killed by signal SIGSEGV.\nlog")


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Event]]:
    """Plays a script in the child's place; returns a list that gets its job."""

    def made(*script: Event | Exception | Callable[[], None]) -> list[Event]:
        jobs: list[Event] = []

        def play(job: Path, env: Mapping[str, str], on_event: Callable[[Event], None]) -> None:
            jobs.append(json.loads(job.read_bytes()))
            for part in script:
                if isinstance(part, Exception):
                    raise part
                part() if callable(part) else on_event(heard(part))

        monkeypatch.setattr(command, "run", play)
        return jobs

    return made


ASKED = Asked(steps=30, random_weights=True, profile=False, against="bare")


def measured(tmp_path: Path, asked: Asked = ASKED) -> Event:
    assert command.step("demo.yaml", (), asked, tmp_path / "found ä.json") == 0
    return dict(json.loads((tmp_path / "found ä.json").read_bytes()))


def test_ours_beside_bare_in_turn(child: Any, tmp_path: Path, capsys: Any) -> None:
    jobs = child(
        *(GPU, begin(OURS), row(median_s=0.070), begin("bare, eager"), row("bare, eager", 0, 0.300, 0.075)),
        *(begin(OURS, 1), row(again=1, median_s=0.080), begin("bare, eager", 1), row("bare, eager", 1, 0.310, 0.075)),
    )
    saved = measured(tmp_path)
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert ["ms", "per", "step,", "median", "75.0", "305.0"] in lines and ["TFLOP/s", "187", "-"] in lines
    assert "8192 x 8192 matrices in bfloat16: 789 TFLOP/s" in text
    assert "Beside bare, eager: time x 0.246, GPU busy x 0.987, kernels x 1.000, peak +0 B." in text
    assert "random weights, 128 px, batch 4, bfloat16, rank 16 on 560 layers (23.00 M weights)" in text
    assert "Kernels by kind" not in text and "happened" not in text and "Not measured" not in text
    assert len(saved["rows"]) == 4 and saved["price"]["bare, eager"]["wall"] == pytest.approx(75 / 305)
    assert saved["machine"]["matmul"]["side"] == 8192 and saved["recipe"]["train"]["batch_size"] == 4
    job = jobs[0]
    assert (job["steps"], job["random_weights"], job["against"], job["profile"]) == (30, True, "bare", False)


def test_kernels_and_traces_are_shown_where_asked_for(child: Any, tmp_path: Path, capsys: Any) -> None:
    jobs = child(GPU, begin(OURS), row())
    measured(tmp_path, Asked(30, True, True, None))
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert ["products", "40.00", "(800)"] in lines and ["nvjet", "20.00", "ms", "400"] in lines
    assert jobs[0]["traces"] == str(tmp_path / command.TRACES) and (tmp_path / command.TRACES).is_dir()
    assert "somewhere/lora-rocm.trace.json.gz" in text and "Beside" not in text


def test_what_is_not_known_on_a_cpu_has_no_line(child: Any, tmp_path: Path, capsys: Any) -> None:
    nothing = {"peak_allocated_bytes": None, "peak_reserved_bytes": None}
    cpu = {**GPU, "device": "CPU", "gpu": False, "budget_bytes": None, "gpus": []}
    bare = row("bare, eager", 0, 0.4, None, **nothing)
    child(cpu, begin(OURS), row(busy_s=None, idle_s=None, **nothing), begin("bare, eager"), bare)
    saved = measured(tmp_path)
    text = capsys.readouterr().out
    assert "GPU" not in text and "GiB" not in text
    assert saved["price"]["bare, eager"]["busy"] is None and saved["price"]["bare, eager"]["peak_bytes"] is None


def test_a_gpu_that_the_profiler_does_not_see_is_told(child: Any, tmp_path: Path, capsys: Any) -> None:
    child(GPU, begin(OURS), row(busy_s=None))
    measured(tmp_path)
    assert says(capsys.readouterr().out, "benchmarks/profiler-sees-nothing-of-this-gpu")


def test_what_the_run_changed_meanwhile_is_told(child: Any, tmp_path: Path, capsys: Any) -> None:
    child(GPU, begin(OURS), row(parts=2, recomputed_blocks=70, incidents=["out-of-memory: x, in parts", "a", "a"]))
    measured(tmp_path)
    text = capsys.readouterr().out
    assert "batch 4 in 2 parts" in text and "with gradient checkpointing" in text
    assert text.count("  a\n") == 1 and "  out-of-memory: x, in parts\n" in text


@pytest.mark.parametrize(
    ("kept", "bare_recomputes", "head", "not_alike"),
    [
        ({}, False, "without gradient checkpointing\n", None),  # the control
        ({"recomputed_blocks": 70}, True, "with gradient checkpointing\n", None),  # the control
        ({"recomputed_blocks": 70}, False, "with gradient checkpointing\n", "70 of 70 blocks, and the bare loop keeps"),
        ({"recomputed_blocks": 12}, False, "12 of 70 blocks recomputed\n", "12 of 70 blocks, and the bare loop keeps"),
        ({}, True, "without gradient checkpointing\n", "the bare loop recomputes all blocks, and lora-rocm 0 of 70"),
        (
            {"recomputed_blocks": 70, "offloaded_blocks": 9},
            True,
            "with gradient checkpointing, 9 of 70 blocks offloaded\n",
            "9 of 70 blocks wait in main memory, and the bare loop keeps all weights",
        ),
        ({"parts": 2}, False, "without gradient checkpointing\n", "in 2 parts, and the bare loop at once"),
    ],
)
def test_what_the_bare_loop_does_otherwise_stands_beside_the_price(
    child: Any, tmp_path: Path, capsys: Any, kept: Event, bare_recomputes: bool, head: str, not_alike: str | None
) -> None:
    child(GPU, begin(OURS), row(**kept), begin("bare, eager"), row("bare, eager", recomputes=bare_recomputes))
    saved = measured(tmp_path)
    text = capsys.readouterr().out
    assert head in text
    after_price = text.split("Beside bare, eager: ")[1].splitlines()[1:2]
    if not_alike is None:
        assert "Not alike" not in text and saved["unlike"] == {"bare, eager": []}
    else:
        assert after_price[0].startswith("Not alike, bare, eager: ") and not_alike in after_price[0]
        assert not_alike in saved["unlike"]["bare, eager"][0]


def test_a_bare_loop_that_cannot_be_captured_is_named(child: Any, tmp_path: Path, capsys: Any) -> None:
    captured = {"type": "row", "number": 2, "name": "bare, captured", "round": 0, "problem": "not permitted"}
    child(GPU, begin(OURS), row(), begin("bare, captured"), captured)
    saved = measured(tmp_path)
    assert "Not measured:\n  bare, captured: not permitted" in capsys.readouterr().out and saved["price"] == {}


def test_a_child_that_dies_after_ours_leaves_our_figures(child: Any, tmp_path: Path, capsys: Any) -> None:
    child(GPU, begin(OURS), row(), begin("bare, captured"), died())
    saved = measured(tmp_path)
    assert says(capsys.readouterr().out, "benchmarks/bare-captured-ended-the-process-killed-by")
    assert saved["rows"][1]["problem"]
    child(GPU, begin(OURS), row(), begin("bare, captured", limit_s=0.01), lambda: time.sleep(0.02), died())
    measured(tmp_path)
    assert says(capsys.readouterr().out, "benchmarks/bare-captured-did-not-end-in-0")


def test_a_child_that_dies_before_is_an_error(child: Any, tmp_path: Path) -> None:
    child(GPU, begin(OURS), died())
    with pytest.raises(WorkerDiedError):
        measured(tmp_path)
    child(MachineError("out-of-memory", "The GPU has not enough memory for this."))
    with pytest.raises(MachineError, match="not enough memory"):
        measured(tmp_path)


@pytest.mark.parametrize("given", [{}, {"PYTHONPATH": "/own/packages"}])
def test_a_child_finds_the_callers_packages_too(
    given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[str]()

    def follow(arguments: list[str], env: Mapping[str, str], on_event: object) -> tuple[int, str]:
        seen.extend(env["PYTHONPATH"].split(os.pathsep))
        return 0, ""

    monkeypatch.setattr(command, "follow_tool", follow)
    command.run(tmp_path / "job.json", given, lambda event: None)
    assert seen == [str(command.ROOT), *given.values()]


def test_images_have_to_be_there_unless_they_are_made_up(child: Any, tmp_path: Path) -> None:
    jobs = child(GPU, begin(OURS), row())
    gone = [f"data.path={tmp_path / 'gone'}"]
    with pytest.raises(RecipeError, match="gone"):
        command.step("sdxl.yaml", gone, Asked(30, False, False, None), None)
    assert not jobs
    assert command.step("sdxl.yaml", gone, Asked(30, True, False, None), None) == 0
    with pytest.raises(RecipeError):
        command.step("sdxl.yaml", ["lora.rank=none"], ASKED, None)


def test_rounds_are_put_together_and_one_that_failed_does_not_count() -> None:
    failed = {"name": OURS, "round": 2, "problem": "it died"}
    (merged,) = over_rounds([row(median_s=0.1), row(again=1, median_s=0.3), failed])
    assert merged["median_s"] == pytest.approx(0.2) and merged["problem"] is None
    assert over_rounds([failed]) == [failed]


def test_the_price_is_that_of_a_sample() -> None:
    """A step of ours may have several micro-batches; one of the bare loop has one."""
    found = price_of([row(median_s=0.4, busy_s=0.2, samples=4), row("bare, eager", 0, 0.1, 0.1)])
    assert found["bare, eager"]["wall"] == pytest.approx(1.0) and found["bare, eager"]["busy"] == pytest.approx(0.5)
