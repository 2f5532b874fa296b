"""The list of runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.lock import locked
from tests.command_line import command_line
from tests.commands.test_status import END, STEPS, write
from tests.supervisor.fake_run import save_recipe, step_fields, write_whole_run
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
    assert json.loads(command_line("runs", folder / "pictures", "--json").stdout)["runs"] == []
    assert "no runs" in command_line("runs", folder / "pictures").stdout
    said = command_line("runs", folder / "none")
    assert said.exit_code == 2 and says(said.stderr, "commands/no-such-folder")


def names(*words: object) -> list[str]:
    said = command_line("runs", *words, "--json")
    assert said.exit_code == 0, said.stderr
    return [run["name"] for run in json.loads(said.stdout)["runs"]]


def test_runs_are_filtered(folder: Path) -> None:
    text_run = RunDir(folder / "texts-1").create()
    text_run.recipe.write_text('model: {name_or_path: x, family: "causal-lm"}\n', encoding="utf-8")
    everything = set(names(folder))
    assert set(names(folder, "--state", "finished", "--state", "stopped")) == {"ok", "stopped"}
    assert names(folder, "--family", "causal-lm") == ["texts-1"]
    assert set(names(folder, "--family", "sdxl")) == everything - {"texts-1"}
    assert names(folder, "--name", "goes*") == ["goes on"] and names(folder, "--name", "x*") == []
    assert len(names(folder, "--last", "2")) == 2
    assert names(folder, "--state", "finished", "--last", "1") == ["ok"]
    assert command_line("runs", folder, "--state", "odd").exit_code == 2


def test_newest_are_the_same_with_and_without_reading_all(folder: Path) -> None:
    """With --last alone, only the events of the newest runs are read."""
    assert names(folder, "--last", "1") == names(folder)[-1:] or names(folder)[-1] == "ok"


def test_columns(folder: Path) -> None:
    (folder / "ok" / "big.bin").write_bytes(bytes(3 << 20))
    run = next(run for run in json.loads(command_line("runs", folder, "--json").stdout)["runs"] if run["name"] == "ok")
    assert run["family"] == "sdxl" and 0 < run["last_loss"] < 1 and run["disk_bytes"] > 3 << 20
    head, *rows = command_line("runs", folder).stdout.splitlines()
    assert head.split() == ["name", "family", "state", "step", "loss", "last", "loss", "disk", "last", "event"]
    (row,) = (row for row in rows if row.startswith("ok "))
    assert "sdxl" in row and "MiB" in row


def test_the_loss_needs_only_the_last_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = RunDir(tmp_path / "long").create()
    save_recipe(run_dir)
    losses = [1 / (1 + number % 7) for number in range(900)]
    steps = [step_fields(updates=number + 1, iteration=number + 1, loss=loss) for number, loss in enumerate(losses)]
    write(run_dir, *(("step", fields) for fields in steps), ("end", END))
    few = json.loads(command_line("runs", tmp_path, "--json").stdout)["runs"][0]
    monkeypatch.setattr("lora_rocm.commands.runs.LAST_STEPS", None)
    every = json.loads(command_line("runs", tmp_path, "--json").stdout)["runs"][0]
    assert few.pop("loss") == pytest.approx(every.pop("loss"), rel=1e-4)
    assert few == every and few["updates"] == 900 and few["state"] == "stopped"
    monkeypatch.setattr("lora_rocm.commands.runs.LAST_STEPS", 3)  # control
    assert json.loads(command_line("runs", tmp_path, "--json").stdout)["runs"][0]["loss"] != pytest.approx(
        0.37, rel=0.01
    )
