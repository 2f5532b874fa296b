"""The bench commands: tables, restarts after rows that end the child, and both for real on this CPU."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.commands import bench
from lora_rocm.commands.output import Output
from lora_rocm.errors import RecipeError, WorkerDiedError
from lora_rocm.hardware.facts import load_facts
from lora_rocm.processes import row_runner
from lora_rocm.recipe.load import load_recipe
from lora_rocm.report.measured_line import WARM_UP
from lora_rocm.rules.this_machine import situation_here
from lora_rocm.rundir.layout import RunDir
from tests.command_line import command_line
from tests.golden import HOSTS
from tests.supervisor.fake_run import heard, step_fields
from tests.tiny_models import RUN_TARGETS
from tests.wording import Worded, mentions, says, worded

Event = dict[str, Any]
ROOT = Path(__file__).parents[2]
CPU: Event = {
    "type": "machine", "device": "CPU", "gpu": False, "torch": "2.13.0", "hip": None, "cuda": None, "threads": 1,
    "budget_bytes": None, "integrated": None, "gpus": [],
}  # fmt: skip
RADEON: Event = {
    **CPU, "device": "RX 7900 XTX (gfx1100)", "gpu": True, "hip": "7.2", "integrated": False,
    "budget_bytes": 23 * 2**30, "gpus": [{"name": "RX 7900 XTX", "address": "0000:03:00.0"}],
}  # fmt: skip
LINK = {"address": "0000:03:00.0", "generation": 4, "width": 16, "gb_per_s": 31.51}


def measured(measure: Callable[[], bench.BenchResult], path: Path | None) -> int:
    """``lora-rocm bench``, with ``--output``."""
    return bench.finish(Output(), measure, path)


def row(number: int, fields: Event, per_second: float | None = 1e9, problem: str | None = None) -> Event:
    figures = {"amount": 1.0, "seconds": 1.0, "per_second": per_second, "problem": problem}
    return {"type": "row", "number": number, **fields, **figures}


def copy(size: int, name: str = "host to device", memory: str = "pinned") -> Event:
    return {"copy": name, "memory": memory, "size_bytes": size}


def gemm(dtype: str = "float32") -> Event:
    return {"group": "gemm", "name": "attention 640, base", "way": "y", "shape": [64, 640, 640], "dtype": dtype}


class FakeChild:
    """Plays one script a start; an exception in it is how the child ends."""

    def __init__(self, *scripts: Sequence[Event | Exception | Callable[[], None]]) -> None:
        self.scripts = list(scripts)
        self.jobs: list[Event] = []
        self.envs: list[dict[str, str]] = []

    def __call__(
        self,
        module: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        on_event: Callable[[Event], None],
        is_late: Callable[[], bool],
    ) -> int:
        self.jobs.append(json.loads(Path(arguments[-1]).read_bytes()))
        self.envs.append(dict(env))
        for step in self.scripts.pop(0):
            if isinstance(step, Exception):
                raise step
            if callable(step):
                step()
            else:
                on_event(heard(step))
        return 0


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeChild]:
    def made(*scripts: Sequence[Any]) -> FakeChild:
        fake = FakeChild(*scripts)
        monkeypatch.setattr(row_runner, "run_tool", fake)
        return fake

    return made


def begin(number: int, fields: Event, limit_s: float = 60.0) -> Event:
    return {"type": "begin", "number": number, "limit_s": limit_s, "fields": fields}


def died(how: str = "killed by signal SIGSEGV") -> WorkerDiedError:
    return WorkerDiedError("worker-died", f"The process x ended without saying why: {how}.\nlog", fix="")


def test_table_of_copies_beside_the_bus(child: Any, capsys: Any, tmp_path: Path) -> None:
    rows = [row(0, copy(4096), 1e9), row(1, copy(2**28), 26e9), row(2, copy(2**28, "both at once"), 40e9)]
    rows += [row(3, copy(2**28, "device to device", "one GPU"), 800e9)]
    child([RADEON, {"type": "link", "links": [LINK]}, *rows])
    assert measured(bench.transfer, tmp_path / "t.json") == 0
    text = capsys.readouterr().out
    assert (
        says(text, "commands/pcie-4-0-x16-0000-03-00")
        and says(text, "commands/of-the-bus")
        and "23.0 GiB for tensors" in text
    )
    lines = [line.split() for line in text.splitlines()]
    assert ["host", "to", "device", "pinned", "1.00", "26.0", "83%"] in lines
    assert ["both", "at", "once", "pinned", "40.0", "63%"] in lines
    assert ["device", "to", "device", "one", "GPU", "800.0"] in lines
    saved = json.loads((tmp_path / "t.json").read_bytes())
    assert saved["links"] == [LINK] and len(saved["rows"]) == 4 and saved["machine"]["hip"] == "7.2" and saved["date"]


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (RADEON, worded("commands/what-the-bus-allows-is-not-known")),
        ({**RADEON, "integrated": True}, worded("commands/shares-main-memory-with-the-processor")),
        (CPU, worded("commands/there-is-no-gpu-to-measure")),
    ],
)
def test_without_a_bus_it_is_said_and_no_share_is_made_up(
    machine: Event, said: Worded, child: Any, capsys: Any
) -> None:
    child([machine, {"type": "link", "links": [None]}, row(0, copy(4096))])
    assert measured(bench.transfer, None) == 0
    text = capsys.readouterr().out
    assert says(text, said) and "%" not in text and not mentions(text, "commands/of-the-bus")


def test_a_bus_that_is_slower_than_its_copies_is_not_believed(child: Any, capsys: Any) -> None:
    child([RADEON, {"type": "link", "links": [{**LINK, "gb_per_s": 0.25}]}, row(0, copy(2**28), 20e9)])
    assert measured(bench.transfer, None) == 0
    text = capsys.readouterr().out
    assert says(text, "commands/0-25-gb-s-each-way-says") and "%" not in text


def test_a_row_that_crashes_is_named_and_the_rest_is_measured(child: Any, capsys: Any) -> None:
    fake = child(
        [CPU, begin(0, copy(4096)), row(0, copy(4096)), begin(1, copy(65536)), died()], [CPU, row(2, copy(2**20), 3e9)]
    )
    assert measured(bench.transfer, None) == 0
    assert [job["start"] for job in fake.jobs] == [0, 2]
    text = capsys.readouterr().out
    assert says(text, "commands/host-to-device-pinned-64-0-kib")
    assert ["1.00", "-", "3.00"] == next(line for line in text.splitlines() if line.startswith("host")).split()[-3:]


def test_a_row_that_hangs_is_told_from_one_that_crashes(child: Any, capsys: Any) -> None:
    child([CPU, begin(0, copy(4096), limit_s=0.05), lambda: time.sleep(0.06), died("exit code 1")], [CPU])
    assert measured(bench.transfer, None) == 0
    assert says(capsys.readouterr().out, "commands/did-not-end-in-0-05-s")


def test_a_child_that_leaves_after_a_row_goes_on_behind_it(child: Any) -> None:
    failed = row(0, copy(4096), None, "illegal memory access")
    fake = child([CPU, begin(0, copy(4096)), failed, died("exit code 1")], [CPU, row(1, copy(65536))])
    assert measured(bench.transfer, None) == 0
    assert [job["start"] for job in fake.jobs] == [0, 1]


def test_a_child_that_never_starts_and_one_that_always_dies_end_the_command(child: Any) -> None:
    child([died()])
    with pytest.raises(WorkerDiedError):
        measured(bench.transfer, None)
    child(*([CPU, begin(number, copy(4096)), died()] for number in range(row_runner.MAX_DEATHS)))
    with pytest.raises(WorkerDiedError):
        measured(bench.transfer, None)


def on_a_radeon(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = load_facts(HOSTS / "linux-rx7900xtx.json")
    monkeypatch.setattr(bench, "situation_here", lambda recipe: replace(situation_here(recipe, facts), environ={}))


def test_amd_is_measured_with_and_without_hipblaslt(child: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_radeon(monkeypatch)
    fake = child([RADEON, row(0, gemm(), 20e12)], [RADEON, row(0, gemm(), 10e12)])
    assert measured(partial(bench.compute, "demo.yaml"), None) == 0
    variables = ("TORCH_BLAS_PREFER_HIPBLASLT", "ROCBLAS_USE_HIPBLASLT")
    assert [[env[name] for name in variables] for env in fake.envs] == [["1", "1"], ["0", "0"]]
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert ["attention", "640,", "base", "y", "64x640x640", "20.0", "10.0"] in lines
    assert "Lt: DISABLE_ADDMM_HIP_LT=0 TORCH_BLAS_PREFER_HIPBLASLT=1 ROCBLAS_USE_HIPBLASLT=1" in text


def test_others_are_measured_once(child: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = load_facts(HOSTS / "nvidia-rtx4090.json")
    monkeypatch.setattr(bench, "situation_here", lambda recipe: situation_here(recipe, facts))
    fake = child([{**RADEON, "hip": None, "cuda": "13.0"}, row(0, gemm())])
    assert measured(partial(bench.compute, "demo.yaml"), None) == 0
    assert len(fake.envs) == 1


def test_reasons_are_told_once_for_all_rows_that_share_them(child: Any, capsys: Any) -> None:
    rows = [row(number, gemm(dtype), None, "out of memory") for number, dtype in enumerate(("float32", "bfloat16"))]
    child([CPU, *rows])
    assert measured(partial(bench.compute, "demo.yaml"), None) == 0
    text = capsys.readouterr().out
    assert text.count("out of memory") == 1 and "base y fp32; attention 640, base y bf16: out" in text


@pytest.mark.slow
def test_both_for_real_on_the_cpu(tmp_path: Path, capsys: Any) -> None:
    assert measured(bench.transfer, tmp_path / "t.json") == 0
    rows = json.loads((tmp_path / "t.json").read_bytes())["rows"]
    assert len(rows) == 5 and all(found["per_second"] > 0 for found in rows)
    assert says(capsys.readouterr().out, "commands/there-is-no-gpu-to-measure")
    small = partial(bench.compute, "demo.yaml", ("runtime.device=cpu", "data.resolution=64"))
    assert measured(small, tmp_path / "c.json") == 0
    saved = json.loads((tmp_path / "c.json").read_bytes())
    assert {found["group"] for found in saved["rows"]} == {"gemm", "attention", "convolution"}
    assert all(found["problem"] is None and found["per_second"] > 0 for found in saved["rows"])


def reads(number: int, source: str, workers: int, per_second: float | None, problem: str | None = None) -> Event:
    fields = {"source": source, "workers": workers, "batch_size": 4}
    return {**row(number, fields, per_second, problem), "first_s": 1.5 if per_second else None}


def bench_loader(tmp_path: Path) -> Event:
    changes = [f"cache.dir={tmp_path / 'cache'}", f"output.dir={tmp_path / 'runs'}"]
    assert measured(partial(bench.loader, "demo.yaml", changes), tmp_path / "l.json") == 0
    return dict(json.loads((tmp_path / "l.json").read_bytes()))


def test_loader_says_what_is_fastest_and_stable(child: Any, capsys: Any, tmp_path: Path) -> None:
    stalled = "A loader worker failed: no batch came within 300 s"
    rows = [reads(0, "cache", 0, 800.0), reads(1, "cache", 2, 900.0), reads(2, "cache", 4, None, stalled)]
    fake = child([{**CPU, "images": 24}, *rows, reads(3, "images", 1, 1000.0)])
    saved = bench_loader(tmp_path)
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert ["cache", "2", "900.0", "225.0", "1.50", "s"] in lines and ["cache", "4", "-", "-", "-"] in lines
    assert (
        says(text, "commands/fastest-and-stable-here-is-runtime-workers") and f"cache with 4 workers: {stalled}" in text
    )
    assert fake.jobs[0]["recipe"]["train"]["batch_size"] == 4 and len(saved["rows"]) == 4


def test_a_number_of_workers_that_ends_the_child_is_not_recommended(child: Any, capsys: Any, tmp_path: Path) -> None:
    fields = {"source": "cache", "workers": 1, "batch_size": 4}
    crashed = [{**CPU, "images": 24}, begin(0, fields), died()]
    child(crashed, [{**CPU, "images": 24}, reads(1, "images", 0, 1000.0)])
    bench_loader(tmp_path)
    text = capsys.readouterr().out
    assert says(text, "commands/cache-with-1-worker-ended-the-process") and says(
        text, "commands/nothing-could-be-read-from-the-cache"
    )


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Path]]:
    """A fake for the training process; returns a list that gets the folders of its runs."""

    def made(mode: str) -> list[Path]:
        runs: list[Path] = []

        def command(run_dir: RunDir) -> list[str]:
            runs.append(run_dir.path)
            (tmp_path / "recipe.yaml").write_bytes(run_dir.recipe.read_bytes())
            return [sys.executable, "-m", "tests.supervisor.fake_worker", mode, str(run_dir.path)]

        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setattr(bench.worker_process, "worker_command", command)
        return runs

    return made


def test_a_step_has_rate_peak_and_parts(worker: Any, capsys: Any, tmp_path: Path) -> None:
    runs = worker("done")
    gone = [f"data.path={tmp_path / 'gone'}", "train.batch_size=2", "train.gradient_accumulation_steps=1"]
    assert measured(partial(bench.step, "sdxl.yaml", gone, steps=3, random_weights=True), tmp_path / "s.json") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["ms", "per", "step,", "median", "200.0"] in lines and ["samples/s", "10.00"] in lines
    assert ["peak", "memory", "1.0", "GiB"] in lines
    assert ["part:", "loader,", "host,", "ms", "1.00", "0.5%"] in lines
    saved = json.loads((tmp_path / "s.json").read_bytes())
    assert saved["rows"][0]["median_s"] == 0.2 and saved["machine"]["device"] == "CPU"
    recipe = load_recipe(tmp_path / "recipe.yaml").recipe
    assert recipe.model.name_or_path == "random:stabilityai/stable-diffusion-xl-base-1.0"
    assert recipe.train.max_train_steps == WARM_UP + 3 and not recipe.sample.prompts
    assert not runs[0].exists()


def test_a_made_up_base_needs_no_file_of_any_component(worker: Any, tmp_path: Path) -> None:
    worker("done")
    assert (
        measured(
            partial(bench.step, "anima.yaml", [f"model.vae={tmp_path / 'gone'}"], steps=3, random_weights=True), None
        )
        == 0
    )
    model = load_recipe(tmp_path / "recipe.yaml").recipe.model
    assert model.name_or_path.startswith("random:") and not model.parts


def test_images_have_to_be_there_unless_they_are_made_up(worker: Any, tmp_path: Path) -> None:
    runs = worker("done")
    with pytest.raises(RecipeError, match="gone"):
        measured(
            partial(bench.step, "sdxl.yaml", [f"data.path={tmp_path / 'gone'}"], steps=3, random_weights=False), None
        )
    with pytest.raises(RecipeError):
        measured(partial(bench.step, "sdxl.yaml", ["lora.rank=none"], steps=3, random_weights=True), None)
    assert not runs


def test_a_training_process_that_fails_is_an_error(worker: Any) -> None:
    worker("killed")
    with pytest.raises(WorkerDiedError):
        measured(partial(bench.step, "demo.yaml", (), steps=3, random_weights=False), None)


def test_median_and_percentile() -> None:
    steps = [
        heard({"type": "step", **step_fields(number, step_s=float(number), memory_bytes=number)})
        for number in range(1, 101)
    ]
    found = bench.step_figures(steps, samples=8)
    assert found["median_s"] == 50.5 and found["p95_s"] == 95.0 and found["memory_bytes"] == 100
    assert found["samples_per_s"] == pytest.approx(8 / 50.5)


@pytest.mark.slow
def test_steps_for_real_on_the_cpu(tmp_path: Path) -> None:
    small = ["data.resolution=64", "lora.rank=4", f"lora.targets={RUN_TARGETS}", "runtime.device=cpu"]
    assert measured(partial(bench.step, "demo.yaml", small, steps=2, random_weights=True), tmp_path / "s.json") == 0
    assert json.loads((tmp_path / "s.json").read_bytes())["rows"][0]["steps"] == 2


@pytest.mark.parametrize(
    "words",
    [("transfer", "--json", "t.json"), ("transfer", "--json=t.json"), ("loader", "--json", "t.json", "demo.yaml")],
)
def test_a_file_after_json_is_refused_with_the_option_that_takes_it(words: tuple[str, ...]) -> None:
    ended = command_line("bench", *words)
    assert ended.exit_code == 2 and "--output t.json" in ended.stderr


def test_json_is_the_figures_that_are_written_to_a_file(child: Any, tmp_path: Path) -> None:
    child([RADEON, {"type": "link", "links": [None]}, row(0, copy(4096))])
    ended = command_line("bench", "transfer", "--json", "--output", tmp_path / "t.json")
    found = json.loads(ended.stdout)
    assert ended.exit_code == 0 and found == json.loads((tmp_path / "t.json").read_bytes())
    assert found["bench"] == "transfer" and found["rows"][0]["per_second"] == 1e9 and "Wrote" in ended.stderr
