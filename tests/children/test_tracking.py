"""The process of a tracker: which numbers it hands on, and that a tracker that fails or hangs is named and left."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, register_tracker_class

from lora_rocm.children import tracking
from lora_rocm.processes.jobs import TrackJob, argument_of
from lora_rocm.processes.optional_packages import hide
from lora_rocm.rundir.events import EventWriter
from lora_rocm.rundir.layout import RunDir
from tests.supervisor.fake_run import RECIPE, event, step_fields
from tests.telemetry.trees import read_as
from tests.wording import says_if


class Fake(GeneralTracker):
    """Writes down what it gets."""

    name = "fake"
    requires_logging_directory = False
    said: list[Any] = []
    slow_s = 0.0
    fails = False

    def __init__(self, run_name: str) -> None:
        super().__init__()
        self.said.append(run_name)

    @property
    def tracker(self) -> None:
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.said.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        if self.fails:
            raise ConnectionError("no route to host")
        time.sleep(self.slow_s)
        self.said.append((step, values))

    def finish(self) -> None:
        self.said.append("finished")


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    monkeypatch.setattr(Fake, "said", [])
    register_tracker_class(Fake)
    found = RunDir(tmp_path / "run").create()
    found.recipe.write_text(RECIPE, encoding="utf-8")
    writer = EventWriter(found.events())
    writer.write(event("step", **step_fields(1, optimizer={"prodigy_d": 0.5})))
    writer.write(event("notice", text="no number"))
    writer.write(event("validation", updates=1, loss=0.25))
    writer.close()
    yield found
    del LOGGER_TYPE_TO_CLASS["fake"]


def job_on(run_dir: RunDir, tracker: str = "fake", offset: int = 0) -> TrackJob:
    return TrackJob(run_dir=run_dir.path, tracker=tracker, project="dogs", offset=offset)


def test_it_gets_the_recipe_and_the_numbers(run_dir: RunDir) -> None:
    tracking.track(job_on(run_dir), lambda: True)
    project, settings, (step, numbers), held_out, end = Fake.said
    assert project == "dogs" and "lora.rank" in settings and end == "finished"
    assert all(isinstance(value, bool | int | float | str) for value in settings.values())
    assert step == 1 and numbers["step/prodigy_d"] == 0.5 and "step/learning_rate" in numbers
    assert held_out == (1, {"validation/loss": 0.25})


def test_it_may_import_packages_that_no_run_uses(
    run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plug-ins of a tracker need them, such as boto3 for MLflow on SageMaker."""
    (tmp_path / "boto3.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    hide()
    assert find_spec("boto3") is None
    seen = list[bool]()
    monkeypatch.setattr(Fake, "start", lambda self: seen.append(find_spec("boto3") is not None))
    tracking.track(job_on(run_dir), lambda: True)
    assert seen == [True]


def test_it_gets_no_path_of_this_machine(run_dir: RunDir, tmp_path: Path) -> None:
    """Wherever the recipe has one; a hub base, a built-in base and a prompt are not paths of this machine."""
    place, vae = tmp_path / "alice", tmp_path / "alice" / "vae.safetensors"
    place.mkdir()
    vae.write_bytes(b"")
    sources = f"sources: [{{path: {place}, mask_path: {place}}}, {{dataset: {place}}}, {{dataset: someone/pictures}}]"
    run_dir.recipe.write_text(
        f"model: {{name_or_path: someone/base, vae: {vae}}}\ndata: {{{sources}}}\nlora: {{init_from: {vae}}}\n"
        f"train: {{max_train_steps: 1}}\ncache: {{dir: {place}}}\noutput: {{dir: {place}}}\n"
        "sample: {prompts: [a cat, /imagine a dog]}\n",
        encoding="utf-8",
    )
    tracking.track(job_on(run_dir), lambda: True)
    settings = Fake.said[1]
    assert "alice" not in str(settings) and "someone/pictures" in settings["data.sources"]
    assert settings["model.name_or_path"] == "someone/base" and "/imagine a dog" in settings["sample.prompts"]


def test_readings_of_the_gpu_go_with_steps_that_never_go_back(run_dir: RunDir) -> None:
    supervisor = EventWriter(run_dir.events("supervisor"))
    supervisor.write(read_as(updates=0, power_w=1.0))  # of an earlier start
    looks = iter(range(3))

    def over() -> bool:
        look = next(looks)
        supervisor.write(read_as(updates=look, power_w=200.0 + look))
        return look == 2

    tracking.track(job_on(run_dir), over)
    supervisor.close()
    found = [said for said in Fake.said if isinstance(said, tuple)]
    steps = [step for step, values in found]
    powers = [values["telemetry/gpu0/power_w"] for _, values in found if "telemetry/gpu0/power_w" in values]
    assert powers == [200.0, 201.0, 202.0] and steps == sorted(steps)
    assert all("step/loss" not in values or step in (1, 2) for step, values in found)


def test_a_resumed_run_sends_only_what_is_new(run_dir: RunDir) -> None:
    tracking.track(job_on(run_dir, offset=run_dir.events().stat().st_size), lambda: True)
    assert Fake.said[2:] == ["finished"]
    places = (run_dir.path, run_dir.path, run_dir.path.parent)
    first, again, other = (tracking.options_of("wandb", RunDir(path))["id"] for path in places)
    assert first == again != other


@pytest.mark.parametrize("runs", [[], ["a1"]])
def test_a_resumed_run_is_the_same_one_in_mlflow(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, runs: list[str]
) -> None:
    """MLflow gives ids itself, so the run is found by its tag. Its parameters stay: MLflow refuses other values."""
    asked: list[str] = []

    def search_runs(filter_string: str, **how: Any) -> list[Any]:
        asked.append(filter_string)
        return [SimpleNamespace(info=SimpleNamespace(run_id=run)) for run in runs]

    class Mlflow(Fake):
        def __init__(self, project: str, **options: Any) -> None:
            super().__init__(project)
            self.said.append(options)

    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(search_runs=search_runs))  # type: ignore[arg-type]
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "mlflow", Mlflow)
    tracking.track(job_on(run_dir, "mlflow"), lambda: True)
    options, *settings = [said for said in Fake.said if isinstance(said, dict)]
    (tag,) = options["tags"].values()
    assert asked == [f"tags.`{tracking.TAG}` = '{tag}'"] and options.get("run_id") == next(iter(runs), None)
    assert bool(settings) is not bool(runs) and (1, {"validation/loss": 0.25}) in Fake.said


@pytest.mark.parametrize("fails", [True, False])
def test_one_that_raises_is_an_event_and_an_exit_code(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fails: bool
) -> None:
    monkeypatch.setattr(Fake, "fails", fails)
    monkeypatch.setattr(sys, "argv", ["tracking", argument_of(job_on(run_dir))])
    read, write = os.pipe()
    os.close(write)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(fileno=lambda: read))
    code = tracking.main()
    os.close(read)
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert bool(code) is fails and len(said) == fails and Fake.said.count("finished") == (not fails)
    assert not fails or ("no route to host" in said[0]["what"] and "fake" in said[0]["what"])


@pytest.mark.parametrize("hangs", [True, False])
def test_one_that_hangs_is_an_event_and_the_end_of_the_process(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], hangs: bool
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(Fake, "slow_s", 0.3 if hangs else 0.0)
    monkeypatch.setattr(os, "_exit", ended.append)
    tracking.track(job_on(run_dir), lambda: True, limit_s=0.05 if hangs else 60.0)
    assert bool(ended) is hangs
    assert says_if(hangs, capsys.readouterr().out, "children/did-not-answer-for-0-05-s")
