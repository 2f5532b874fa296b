"""The list of runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.lock import locked
from tests.command_line import command_line
from tests.commands.test_status import END, STEPS, write
from tests.supervisor.fake_run import save_recipe, write_whole_run
from tests.wording import says


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_whole_run(RunDir(tmp_path / "runs" / "ok"))
    for name, events in (("stopped", [*STEPS, ("end", END)]), ("new", []), ("goes on", STEPS)):
        run_dir = RunDir(tmp_path / "runs" / name).create()
        save_recipe(run_dir)
        if events:
            write(run_dir, *events)
    (tmp_path / "runs" / "pictures").mkdir()
    (tmp_path / "runs" / "notes.txt").touch()
    return tmp_path / "runs"


def test_each_run_is_listed_with_its_state(folder: Path) -> None:
    (folder / "odd").mkdir()
    (folder / "odd" / "events.jsonl").mkdir()
    with locked(RunDir(folder / "goes on")):
        said = command_line("runs", folder, "--json")
        text = command_line("runs", folder)
    assert said.exit_code == text.exit_code == 0
    found = {run["name"]: run for run in json.loads(said.stdout)["runs"]}
    states = {name: run["state"] for name, run in found.items()}
    assert states == {
        "ok": "finished",
        "stopped": "stopped",
        "new": "prepared",
        "goes on": "running",
        "odd": "unreadable",
    }
    assert (found["ok"]["updates"], found["ok"]["max_train_steps"]) == (40, 40) and 0.05 < found["ok"]["loss"] < 0.3
    assert found["odd"]["problem"] and found["new"]["last_event_s"] is None
    assert all(name in text.stdout for name in found) and "3 of 40" in text.stdout and "pictures" not in text.stdout


def test_a_run_itself_is_a_list_of_one(folder: Path) -> None:
    (run,) = json.loads(command_line("runs", folder / "ok", "--json").stdout)["runs"]
    assert run["name"] == "ok" and run["path"] == str(folder / "ok")


def test_a_folder_without_runs_and_no_folder(folder: Path) -> None:
    assert json.loads(command_line("runs", folder / "pictures", "--json").stdout) == {"runs": []}
    assert "no runs" in command_line("runs", folder / "pictures").stdout
    said = command_line("runs", folder / "none")
    assert said.exit_code == 2 and says(said.stderr, "commands/no-such-folder")
