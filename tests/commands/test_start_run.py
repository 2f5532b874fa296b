"""A run in a thread of the caller: its events as they come, a stop, a kill, its result; and ``train --json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lora_rocm.commands import start_run
from lora_rocm.commands.run_request import RunRequest
from lora_rocm.commands.start_run import RunHandle
from lora_rocm.errors import RecipeError, StoppedError, WorkerDiedError
from lora_rocm.rundir.event_types import EndEvent, Event, NoticeEvent, StepEvent
from lora_rocm.rundir.held_locks import is_running
from lora_rocm.rundir.layout import RunDir
from tests.command_line import command_line
from tests.supervisor.fake_run import RECIPE
from tests.wording import says

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Path("r.yaml").write_text(RECIPE, encoding="utf-8")
    return monkeypatch


def use(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    def command(run_dir: RunDir, *options: object) -> list[str]:
        return [sys.executable, "-m", "tests.supervisor.fake_worker", mode, str(run_dir.path)]

    monkeypatch.setattr(start_run.worker_process, "worker_command", command)


def started(monkeypatch: pytest.MonkeyPatch, mode: str, *, supervised: bool = True) -> RunHandle:
    use(monkeypatch, mode)
    return start_run.start_run(RunRequest("r.yaml", run_dir=Path("run"), supervised=supervised))


@pytest.mark.parametrize("supervised", [True, False])
def test_a_run_is_followed_by_typed_events_and_has_a_result(fake: pytest.MonkeyPatch, supervised: bool) -> None:
    handle = started(fake, "done", supervised=supervised)
    events = list(handle.follow())
    assert [event.updates for event in events if isinstance(event, StepEvent)] == [1, 2, 3]
    assert isinstance(events[-1], EndEvent) and any(isinstance(event, NoticeEvent) for event in events)
    found = handle.result()
    assert (found.outcome, found.exit_code) == ("done", 0) and found.report is not None and found.report.exists()
    assert list(handle.follow()) == [] and not is_running(handle.run_dir), "the control: it is over"


@pytest.mark.parametrize("supervised", [True, False])
def test_a_stop_lets_the_worker_save_and_names_the_command_that_goes_on(
    fake: pytest.MonkeyPatch, supervised: bool
) -> None:
    handle = started(fake, "until-stopped", supervised=supervised)
    seen: list[Event] = []
    for event in handle.follow():
        seen.append(event)
        if isinstance(event, StepEvent) and event.updates == 3:
            assert is_running(handle.run_dir), "the control: it goes on until it is asked"
            handle.stop()
    found = handle.result()
    assert (found.outcome, found.exit_code) == ("stopped", 130) and "--resume latest" in found.again
    assert isinstance(seen[-1], EndEvent) and seen[-1].reason == "stopped"


@pytest.mark.parametrize("asked", [{"at_once": True}, None])
def test_a_worker_that_hears_no_stop_is_killed_at_the_second(
    fake: pytest.MonkeyPatch, asked: dict[str, bool] | None
) -> None:
    handle = started(fake, "deaf")
    for event in handle.follow():
        if isinstance(event, StepEvent) and event.updates == 3:
            handle.stop(**(asked or {}))
            if asked is None:
                handle.stop()
    found = handle.result()
    assert found.exit_code == StoppedError.exit_code and found.stopped_by


def test_an_error_is_raised_where_the_result_is_asked_for(fake: pytest.MonkeyPatch, tmp_path: Path) -> None:
    handle = started(fake, "traceback", supervised=False)
    with pytest.raises(WorkerDiedError):
        handle.result()
    assert (tmp_path / "run" / "report.html").exists() and not is_running(handle.run_dir)
    with pytest.raises(RecipeError):
        start_run.start_run(RunRequest("r.yaml", ["lora.rank=x"], run_dir=Path("other")))
    assert not (tmp_path / "other").exists()


def test_train_prints_events_as_json_lines_and_its_result_last(fake: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(fake, "done")
    ended = command_line("train", "r.yaml", "--run-dir", "run", "--json")
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert ended.exit_code == 0 and [line["type"] for line in lines if line.get("type") == "step"] == ["step"] * 3
    assert all("type" in line for line in lines[:-1]) and "type" not in lines[-1]
    assert lines[-1]["outcome"] == "done" and lines[-1]["run_dir"] == str(tmp_path / "run")
    assert "Run directory: " in ended.stderr
    use(fake, "error")
    ended = command_line("train", "r.yaml", "--run-dir", "new", "--json", "--no-supervisor")
    last = json.loads(ended.stdout.splitlines()[-1])
    assert (
        ended.exit_code == 3
        and last["error"]["code"] == "disk-full"
        and says(ended.stderr, "commands/the-disk-is-full")
    )


def test_quiet_says_the_result_alone(fake: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(fake, "done")
    ended = command_line("train", "r.yaml", "--run-dir", "run", "--quiet")
    assert says(ended.stdout, "commands/done-the-lora") and len(ended.stdout.splitlines()) == 2 and not ended.stderr
