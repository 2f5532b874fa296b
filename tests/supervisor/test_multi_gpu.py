"""``--gpus N`` and ``torchrun`` as the parent sees them, with workers that are real processes without torch."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.commands import start_run
from lora_rocm.commands import train as launch
from lora_rocm.commands.run_request import RunRequest
from lora_rocm.errors import UserError, WorkerDiedError
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rules.rule import Situation
from lora_rocm.rundir.layout import RunDir
from tests.event_lines import read_events
from tests.hardware.situations import situation
from tests.supervisor.fake_run import RECIPE
from tests.wording import saying

ROOT = Path(__file__).parents[2]
TORCHRUN = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4711"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Path("recipe.yaml").write_text(RECIPE, encoding="utf-8")
    on(monkeypatch, "cpu-only")
    use(monkeypatch, "done")
    return monkeypatch


def on(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    def situation_here(recipe: Recipe | None = None) -> Situation:
        return replace(situation(machine), recipe=recipe)

    monkeypatch.setattr(start_run, "situation_here", situation_here)


def use(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    def command(run_dir: RunDir, *options: object) -> list[str]:
        return [sys.executable, "-m", "tests.supervisor.fake_worker", mode, str(run_dir.path)]

    monkeypatch.setattr(start_run.worker_process, "worker_command", command)


def torchrun(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    for name, value in {**TORCHRUN, "RANK": str(rank), "LOCAL_RANK": str(rank)}.items():
        monkeypatch.setenv(name, value)


def train(**options: Any) -> int:
    on_cpu = ["runtime.device=cpu", "runtime.self_test=no"]
    return launch.train(RunRequest("recipe.yaml", options.pop("sets", on_cpu), run_dir=Path("a run"), **options))


def started() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("a run", "started").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("supervised", [True, False])
def test_so_many_workers_train_together(supervised: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(gpus=3, supervised=supervised) == 0
    assert sorted(start["environ"]["RANK"] for start in started()) == ["0", "1", "2"]
    assert "Done." in capsys.readouterr().out


def test_unwatched_the_end_of_one_is_the_end_of_all(here: pytest.MonkeyPatch) -> None:
    use(here, "killed@1")
    with pytest.raises(WorkerDiedError) as caught:
        train(gpus=2, supervised=False)
    assert caught.value.where == "rank 1" and len(started()) == 2


@pytest.mark.parametrize("machine", ["cpu-only", "linux-rx7900xtx", "linux-strix-halo-rx7900xtx", "nvidia-rtx4090"])
def test_more_gpus_than_there_are_leave_nothing_behind(machine: str, here: pytest.MonkeyPatch) -> None:
    on(here, machine)
    with pytest.raises(UserError) as caught:
        train(gpus=2, sets=["runtime.self_test=no"])
    assert caught.value.code == "too-many-gpus" and not Path("a run").exists()


def test_one_gpu_is_what_it_always_was() -> None:
    assert train(gpus=1) == 0
    (start,) = started()
    assert "RANK" not in start["environ"]


@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_starts_the_processes_and_each_has_one_worker(rank: int, here: pytest.MonkeyPatch) -> None:
    torchrun(here, rank)
    assert train(resume="latest") == 0
    (start,) = started()
    assert start["environ"]["RANK"] == str(rank) and start["environ"]["MASTER_PORT"] == "4711"
    run_dir = RunDir(Path("a run"))
    assert run_dir.recipe.exists() == (rank == 0) and run_dir.report.exists() == (rank == 0)
    own = ["--recipe", str(run_dir.path.absolute() / "recipe.rank1.yaml")] if rank else []
    assert start["options"] == own
    assert read_events(run_dir.events(rank))[-1]["type"] == "end"


def test_a_run_that_is_complete_is_so_for_all(here: pytest.MonkeyPatch) -> None:
    assert train() == 0
    Path("a run", "result.json").write_text('{"updates": 40}', encoding="utf-8")
    torchrun(here, 1)
    assert train(resume="latest") == 0 and len(started()) == 1


def test_what_torchrun_has_to_be_told(here: pytest.MonkeyPatch) -> None:
    torchrun(here, 0)
    with pytest.raises(UserError, check=saying("supervisor/torchrun-has-started-2")):
        train(gpus=2)
    with pytest.raises(UserError, check=saying("supervisor/one-run-directory")):
        launch.train(RunRequest("recipe.yaml", resume="latest"))
    on(here, "linux-rx7900xtx")
    with pytest.raises(UserError, match="asks for 2 GPUs"):
        train(sets=["runtime.self_test=no"])
