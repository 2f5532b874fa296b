"""The figures of ``python -m benchmarks.training_step``, for real on this CPU, with the tiny model and few steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import Unsupported

from benchmarks.training_step import child, measurement
from benchmarks.training_step.bare_loop import EAGER, BareStep, inputs_of
from benchmarks.training_step.measurement import flagged_waits, times, variants, with_rates
from benchmarks.training_step.setup import open_bench, recipe_for
from lora_rocm.checks import kernel_check
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.hardware.settings import Settings
from lora_rocm.memory.manager import MemoryManager
from lora_rocm.recipe.load import load_recipe
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.run_context import NOBODY
from lora_rocm.train import compilation
from lora_rocm.train.compilation import Compiler
from tests.supervisor.fake_run import as_heard
from tests.tiny_models import RUN_TARGETS

pytestmark = pytest.mark.slow  # what only developers run

SMALL = ["data.resolution=64", "train.batch_size=2", f"lora.targets={RUN_TARGETS}", "lora.rank=4", "runtime.device=cpu"]
CPU = torch.device("cpu")


def recipe_of(*changes: str) -> Recipe:
    return load_recipe("demo.yaml", [*SMALL, *changes]).recipe


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MIN_WARM_UP", 1), ("PARTS_STEPS", 1), ("TRACED_STEPS", 1)):
        monkeypatch.setattr(measurement, name, value)
    monkeypatch.setitem(measurement.MATMUL_SIDE, "cpu", 64)


def events_of(tmp_path: Path, capfd: pytest.CaptureFixture[str], recipe: Recipe, **more: Any) -> list[dict[str, Any]]:
    job = {"recipe": recipe.model_dump(mode="json"), "random_weights": True, "steps": 2, "profile": False}
    job |= {"against": None, "rounds": 1, "traces": str(tmp_path), **more}
    (tmp_path / "job.json").write_text(json.dumps(job), encoding="utf-8")
    code = child.main([str(tmp_path / "job.json")], watch_parent=False)
    found = [as_heard(line) for line in capfd.readouterr().out.splitlines()]
    assert code == (found[-1]["exit_code"] if found[-1]["type"] == "error" else 0)
    return found


@pytest.mark.usefixtures("quick")
def test_ours_and_bare_in_one_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a folder ä"
    folder.mkdir()
    recipe = recipe_of("lora.targets=attention")
    machine, *events = events_of(folder, capfd, recipe, against="bare-compiled", profile=True)
    ours, bare = (event for event in events if event["type"] == "row")
    assert [event["fields"]["name"] for event in events if event["type"] == "begin"] == ["lora-rocm", "bare, eager"]
    assert machine["matmul"]["per_second"] > 0 and ours["problem"] is None and bare["problem"] is None
    assert ours["steps"] == 2 and ours["samples"] == 2 and 0 < ours["median_s"] <= ours["p95_s"]
    assert ours["flops"] == ours["counts"]["flops"] > 1e8 and ours["profile"]["waits"] == 1
    parts = ours["parts_s"]
    assert {"loading", "copy", "check", "wait", "forward", "backward", "optimizer"} == set(parts)
    assert 0 < parts["optimizer"] < parts["backward"] and parts["check"] > 0
    assert ours["of_matmul"] == pytest.approx(ours["flops"] / ours["median_s"] / machine["matmul"]["per_second"])
    assert ours["trained_weights"] > 10_000 and ours["adapted_layers"] > 100 and ours["incidents"] == []
    assert (ours["recomputed_blocks"], ours["offloaded_blocks"], bare["recomputes"]) == (0, 0, False) and ours["blocks"]
    assert bare["profile"]["kernels"] > 1000 and ours["profile"]["busy_s"] is None
    assert all(Path(row["profile"]["trace"]).stat().st_size > 1000 for row in (ours, bare))


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_with_the_recipes_own_model_and_images(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe = recipe_of(f"cache.dir={tmp_path / 'cache'}", "data.bucket_max_aspect=1")
    *_, ours = events_of(tmp_path, capfd, recipe, random_weights=False)
    assert ours["name"] == "lora-rocm" and ours["median_s"] > 0 and "trace" not in ours["profile"]
    assert any((tmp_path / "cache" / "image").rglob("*.safetensors"))
    assert not list(tmp_path.glob("*.trace.json.gz"))


def test_an_error_of_ours_is_told_and_not_a_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    machine, begin, error = events_of(tmp_path, capfd, recipe_of("lora.targets=nothing_like_it"))
    assert error["code"] == "targets-match-nothing" and error["exit_code"] == 2 and begin["type"] == "begin"


def test_what_cannot_be_compiled_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*args: object) -> None:
        raise Unsupported("no such operator")

    compiler: Compiler | None = Compiler("regional", (SampleShape.of(h=64, w=64),), NOBODY)
    monkeypatch.setattr(compilation, "for_run", lambda *how: compiler)
    monkeypatch.setattr(MemoryManager, "probe", cannot)
    error = events_of(tmp_path, capfd, recipe_of())[-1]
    assert error["code"] == "compile-failed" and "no such operator" in error["where"]
    compiler = None
    with pytest.raises(Unsupported):  # the control
        child.main([str(tmp_path / "job.json")], watch_parent=False)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("trusted", [False, pytest.param(True, marks=pytest.mark.slow)])  # True: the control
def test_what_is_given_up_before_the_first_step_is_among_the_figures(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    def judged(device: torch.device, dtype: torch.dtype, notify: Callable[[str], None]) -> bool:
        if not trusted:
            notify("Steps do without this program's Triton kernels.")
        return trusted

    monkeypatch.setattr(kernel_check, "trusted", judged)
    *_, ours = events_of(tmp_path, capfd, recipe_of())
    assert ours["incidents"] == ([] if trusted else ["Steps do without this program's Triton kernels."])


def test_images_of_no_size_are_refused_in_words(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    error = events_of(tmp_path, capfd, recipe_of("data.resolution=8"))[-1]
    assert error["code"] == "resolution-too-small"


def test_memory_that_runs_out_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    monkeypatch.setattr(child, "_ours", full)
    assert events_of(tmp_path, capfd, recipe_of())[-1]["code"] == "out-of-memory"
    monkeypatch.setattr(child, "measure_bare", full)
    inputs: Any = None
    found = child._bare(recipe_of(), inputs, torch.float32, CPU, EAGER, measurement.Wanted(2, False, tmp_path))
    assert found == {"problem": "CUDA out of memory. Tried to allocate"}


def test_what_is_not_foreseen_leaves_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def strange(*args: object) -> None:
        raise RuntimeError("a shape that nobody thought of")

    monkeypatch.setattr(child, "_measure", strange)
    (tmp_path / "job.json").write_text("{}", encoding="utf-8")
    with pytest.raises(RuntimeError, match="nobody thought of"):
        child.main([str(tmp_path / "job.json")], watch_parent=False)


@pytest.mark.parametrize(
    ("asked", "recomputes"),
    [
        pytest.param("train.gradient_checkpointing=true", True, marks=pytest.mark.slow),
        ("runtime.memory=recompute", True),
        ("runtime.memory=keep", False),  # the control
    ],
)
def test_the_bare_loop_is_the_same_model_with_the_same_layers_on_the_same_numbers(
    tmp_path: Path, asked: str, recomputes: bool
) -> None:
    recipe = recipe_for(recipe_of(asked), True, tmp_path)
    with open_bench(recipe, Settings(), tmp_path, random_weights=True, watch_parent=False) as bench:
        inputs, ours = inputs_of(bench), bench.artifacts.adapter
        kept = measurement._kept(bench)
        losses_B = bench.trainer.engine.measured(inputs.batch, inputs.draws)[0]
    assert bench.start.session.readers == []  # a thread that lives on holds the session, and these would hold the model
    bare = BareStep(bench.trainer.family, recipe, inputs, torch.float32, CPU, EAGER)
    trained = [p for p in bare.model.components["unet"].parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == sum(p.numel() for p in ours.parameters.values())
    assert bare.model.components["unet"].is_gradient_checkpointing is recomputes
    assert kept["recomputed_blocks"] == (kept["blocks"] if recomputes else 0) and kept["offloaded_blocks"] == 0
    bare()
    assert torch.allclose(bare.loss, losses_B.mean(), rtol=1e-4)  # a fresh LoRA changes nothing
    before = float(bare.loss.detach())
    for _ in range(5):
        bare()
    assert float(bare.loss.detach()) < before  # it trains


def test_median_and_percentile() -> None:
    found = times([0.3, 0.1, 0.2, 0.4], samples=8)
    assert found["median_s"] == pytest.approx(0.25) and found["p95_s"] == 0.4
    assert found["samples_per_s"] == pytest.approx(8 / 0.25) and found["steps"] == 4
    assert times([float(number) for number in range(1, 101)], 1)["p95_s"] == 95.0


def test_share_of_the_matrix_product_and_idle_time() -> None:
    found = with_rates({"median_s": 0.1, "profile": {"busy_s": 0.07}}, int(10e12), {"per_second": 400e12})
    assert found["of_matmul"] == pytest.approx(0.25) and found["idle_s"] == pytest.approx(0.03)
    late = with_rates({"median_s": 0.1, "profile": {"busy_s": 0.2}}, 1, {"per_second": 1.0})
    assert late["idle_s"] == 0.0


def test_what_is_measured_beside_ours() -> None:
    gpu = torch.device("cuda")
    assert variants(None, gpu) == () and variants("bare-compiled", CPU) == (EAGER,)
    assert variants("bare", gpu) == (EAGER, "bare, captured") and len(variants("bare-compiled", gpu)) == 3


@pytest.mark.parametrize(
    ("memory", "recomputed", "offloaded", "bare_recomputes"),
    [("selective", 1, 0, False), ("offload", None, None, True)],
)
def test_a_run_that_recomputes_some_or_offloads_says_so(
    tmp_path: Path, memory: str, recomputed: int | None, offloaded: int | None, bare_recomputes: bool
) -> None:
    """None: all."""
    recipe = recipe_for(recipe_of(f"runtime.memory={memory}"), True, tmp_path)
    with open_bench(recipe, Settings(), tmp_path, random_weights=True, watch_parent=False) as bench:
        kept, inputs = measurement._kept(bench), inputs_of(bench)
        every = len(bench.trainer.family.blocks(bench.trainer.model))
        assert (kept["blocks"], inputs.recomputes, kept["recomputes"]) == (every, bare_recomputes, bare_recomputes)
        assert kept["recomputed_blocks"] == (every if recomputed is None else recomputed) > 0
        assert kept["offloaded_blocks"] == (every if offloaded is None else offloaded)
        bench.trainer.relief.recomputes = True  # as after a step that ran out of memory
        assert measurement._kept(bench)["recomputed_blocks"] == every and inputs_of(bench).recomputes


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node")  # torch warns once per process, in the bare loop
@pytest.mark.parametrize("memory", ["keep", "recompute"])
def test_on_a_gpu_the_bare_loop_recomputes_where_ours_does_and_can_be_captured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], quick: None, memory: str
) -> None:
    recipe = recipe_of("runtime.device=gpu", "data.resolution=128", f"runtime.memory={memory}")
    _, *events = events_of(tmp_path, capfd, recipe, against="bare", steps=3)
    rows = [event for event in events if event["type"] == "row"]
    assert [row["problem"] for row in rows] == [None] * 3
    assert [row["recomputes"] for row in rows] == [memory == "recompute"] * 3


@pytest.mark.gpu
def test_a_gpus_figures(tmp_path: Path, capfd: pytest.CaptureFixture[str], quick: None) -> None:
    recipe = recipe_of("runtime.device=gpu", "data.resolution=128")
    _, *events = events_of(tmp_path, capfd, recipe, against="bare", steps=10)
    ours, eager, captured = (event for event in events if event["type"] == "row")
    for row in (ours, eager, captured):
        assert row["problem"] is None and row["profile"]["device_seen"]
        assert 0 < row["profile"]["busy_s"] < 10 * row["median_s"] and row["peak_allocated_bytes"] > row["held_bytes"]
    assert eager["profile"]["launches"] > 500 > captured["profile"]["launches"]
    assert captured["profile"]["graph_launches"] == 1 and captured["profile"]["kernels"] > 500
    assert ours["flops"] > 1e9 and ours["flagged_waits"] <= 1 and ours["profile"]["waits"] <= 3
    assert captured["held_bytes"] < 1.5 * eager["held_bytes"]  # the one before was given back


@pytest.mark.gpu
def test_waits_that_pytorch_flags_are_counted() -> None:
    x = torch.ones(3, device="cuda")
    assert flagged_waits(lambda: [x.sum().item(), x.sum().item()]) == 2 and flagged_waits(lambda: x + 1) == 0
