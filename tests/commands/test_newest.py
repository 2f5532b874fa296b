"""The newest run as the default, the folder of runs, and runs that are continued with their own recipe."""

from __future__ import annotations

import io
import json
import os
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.commands.run_request import RunRequest
from lora_rocm.commands.start_options import StartOptions
from lora_rocm.foundation.terminal_text import quoted
from lora_rocm.recipe.standard_input import STANDARD_INPUT
from lora_rocm.rundir.layout import RunDir
from tests.command_line import COMMANDS, command_line
from tests.supervisor.fake_run import RECIPE, save_recipe, write_checkpoint, write_whole_run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two runs, of which "old" comes last by name, and a folder that is none."""
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    for age_s, name in ((100, "old"), (0, "new")):
        run_dir = RunDir(runs / name)
        write_whole_run(run_dir)
        written_s = run_dir.events().stat().st_mtime - age_s
        os.utime(run_dir.events(), (written_s, written_s))
    (runs / "pictures").mkdir()
    return runs


DEFAULTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sample": ("lora_rocm.commands.sample_export.sample", ("--prompt", "x")),
    "export": ("lora_rocm.commands.sample_export.export", ("--format", "peft")),
    "chat": ("lora_rocm.commands.chat.chat", ()),
    "compare": ("lora_rocm.commands.compare.compare", ()),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_newest_run_is_the_default(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function, words = DEFAULTS[name]
    seen = []

    def record(source: Path, *arguments: object, **options: object) -> None:
        seen.append(source)
        raise KeyboardInterrupt

    monkeypatch.setattr(function, record)
    ended = command_line(name, *words)
    assert seen == [Path("runs") / "new"] and str(seen[0]) in ended.stderr and ended.stdout == ""
    command_line(name, folder / "old", *words)
    assert seen[1] == folder / "old"


def test_status_and_report_take_it_too(folder: Path) -> None:
    ended = command_line("status", "--json")
    assert json.loads(ended.stdout)["path"] == str(folder / "new") and str(Path("runs") / "new") in ended.stderr
    assert command_line("report", "-q").stdout.strip() == str(RunDir(folder / "new").report)
    assert command_line("status", "-q").stderr == ""


def test_the_folder_of_the_runs_is_an_option_and_a_variable(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "Zoë's runs"
    write_whole_run(RunDir(other / "mine"))
    assert json.loads(command_line("status", "--json", "--runs-dir", other).stdout)["path"] == str(other / "mine")
    monkeypatch.setenv("LORA_ROCM_RUNS_DIR", str(other))
    assert json.loads(command_line("status", "--json").stdout)["path"] == str(other / "mine")
    assert json.loads(command_line("runs", "--json").stdout)["runs"][0]["name"] == "mine"
    assert json.loads(command_line("status", "--json", "--runs-dir", folder).stdout)["path"] == str(folder / "new")
    assert json.loads(command_line("status", "--json", "--runs-dir", folder / "old").stdout)["path"].endswith("old")


def test_a_folder_without_runs_is_an_error(folder: Path) -> None:
    for where in (folder / "pictures", folder / "nowhere"):
        ended = command_line("status", "--json", "--runs-dir", where)
        assert (ended.exit_code, json.loads(ended.stdout)["error"]["code"]) == (2, "no-run")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[RunRequest]:
    seen: list[RunRequest] = []
    monkeypatch.setattr("lora_rocm.commands.train.train", lambda request, output: seen.append(request) or 0)
    return seen


def test_resume_needs_no_recipe(folder: Path, asked: list[RunRequest]) -> None:
    run_dir = RunDir(folder / "old")
    checkpoint = write_checkpoint(run_dir, 77)
    assert command_line("resume").exit_code == 0
    words = ("--set", "train.max_train_steps=50", "--gpus", "2", "--accept-changes", "--no-supervisor")
    assert command_line("resume", folder / "old", *words).exit_code == 0
    assert command_line("resume", checkpoint).exit_code == 0
    newest, named, of_checkpoint = asked
    assert newest.run_dir == folder / "new" and newest.resume == str(Path("runs") / "new")
    assert named == RunRequest(
        str(run_dir.recipe),
        ["train.max_train_steps=50"],
        run_dir=run_dir.path,
        resume=str(run_dir.path),
        accept_changes=True,
        supervised=False,
        gpus=2,
    )
    assert (of_checkpoint.run_dir, of_checkpoint.resume) == (run_dir.path, str(checkpoint))


def test_the_advice_names_the_same_command(folder: Path) -> None:
    run_dir = RunDir(folder / "old")
    request = RunRequest.continuing(run_dir.path, ["lora.rank=8"])
    own = ["lora-rocm", "resume", str(run_dir.path)]
    assert request.resume_command(run_dir) == quoted([*own, "--set", "lora.rank=8"])
    assert RunRequest(STANDARD_INPUT, ["lora.rank=8"]).resume_command(run_dir) == quoted(own)
    assert RunRequest("r.yaml").resume_command(run_dir).split()[1:3] == ["train", "r.yaml"]


def test_another_process_starts_the_same_request(folder: Path, asked: list[RunRequest]) -> None:
    run_dir = RunDir(folder / "old")
    for request in (
        RunRequest.continuing(run_dir.path, ["lora.rank=8"], accept_changes=True, supervised=False, gpus=2),
        RunRequest("r.yaml", ["a.b=c d"], run_dir=run_dir.path, resume="latest"),
    ):
        command_line(*request.start_words(run_dir))
        assert replace(asked.pop(), overrides=tuple(request.overrides)) == replace(
            request, overrides=tuple(request.overrides)
        )


@pytest.mark.parametrize("command", ["train", "resume", "fork"])
def test_each_command_that_starts_a_run_has_the_shared_options(command: str) -> None:
    shown = {parameter.name for parameter in COMMANDS.commands[command].params}
    assert {option.name for option in fields(StartOptions)} <= shown


@pytest.mark.parametrize("lost", ["run", "recipe"])
def test_what_cannot_be_resumed(lost: str, folder: Path, asked: list[RunRequest]) -> None:
    if lost == "recipe":
        RunDir(folder / "old").recipe.unlink()
    ended = command_line("resume", folder / ("pictures" if lost == "run" else "old"), "--json")
    code = "no-run" if lost == "run" else "run-without-recipe"
    assert (ended.exit_code, json.loads(ended.stdout.splitlines()[-1])["error"]["code"]) == (2, code) and not asked


def test_folders_of_train_come_before_the_overrides(asked: list[RunRequest], monkeypatch: pytest.MonkeyPatch) -> None:
    command_line("train", "r.yaml", "--runs-dir", "D:\\my runs", "--cache-dir", "c", "--set", "cache.dir=d")
    monkeypatch.setenv("LORA_ROCM_RUNS_DIR", "Zoë")
    monkeypatch.setenv("LORA_ROCM_GPUS", "3")
    command_line("train", "r.yaml")
    first, second = asked
    assert first.overrides == ['output.dir="D:\\\\my runs"', 'cache.dir="c"', "cache.dir=d"]
    assert second.overrides == ['output.dir="Zoë"'] and second.gpus == 3
    assert command_line("check", "demo.yaml", "--schema-only", "--cache-dir", 'it\'s: "x" #1').exit_code == 0


def given(text: str | bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    content = text if isinstance(text, bytes) else text.encode()
    stream: Any = io.TextIOWrapper(io.BytesIO(content), encoding="ascii")
    monkeypatch.setattr("lora_rocm.recipe.standard_input.sys.stdin", stream)


def check_input(text: str | bytes, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, dict[str, Any]]:
    from lora_rocm.commands.check import check
    from lora_rocm.errors import RecipeError

    given(text, monkeypatch)
    try:
        return 0, {"recipe": str(check("-", words, schema_only=True).recipe)}
    except RecipeError as error:
        return error.exit_code, error.problems[0].to_json()


def test_a_recipe_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_input("\ufeff" + RECIPE, monkeypatch) == (0, {"recipe": "standard-input"})
    code, problem = check_input(RECIPE + "lora: {rank: x}\n", monkeypatch)
    assert code == 2 and problem["where"] == "standard-input:6 lora.rank" and "rank: x" in problem["excerpt"]
    for bad in ("", b"\xff\xfe", b"a: [", b"x" * (1 << 19)):
        code, problem = check_input(bad, monkeypatch)
        assert code == 2 and problem["where"].startswith("standard-input")
    monkeypatch.setattr("lora_rocm.recipe.standard_input.sys.stdin", None)
    ended = command_line("check", "-", "--json") if sys.stdin is None else None
    assert ended is None or ended.exit_code == 2


def test_a_run_of_standard_input_is_named_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from lora_rocm.recipe.load import load_recipe

    given(RECIPE, monkeypatch)
    assert load_recipe("-").name == "standard-input"


def test_a_run_that_was_just_made_is_newest_without_events(folder: Path) -> None:
    made = RunDir(folder / "a").create()
    save_recipe(made)
    assert json.loads(command_line("status", "--json").stdout)["path"] == str(made.path)
