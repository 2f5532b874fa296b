"""One training run as the parent sees it, with a fake worker."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.commands import start_run, train
from lora_rocm.commands.run_request import RunRequest
from lora_rocm.errors import GaveUpError, MachineError, RecipeError, ResumeError, WorkerDiedError, storage_error
from lora_rocm.model_files.peft_folder import PEFT_CONFIG, PEFT_WEIGHTS
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor import supervisor
from tests.supervisor.fake_run import RECIPE, event
from tests.wording import mentions, saying, says

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Path("my recipe.yaml").write_text(RECIPE, encoding="utf-8")
    use(monkeypatch, "done")
    return monkeypatch


def use(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    def command(run_dir: RunDir, *options: object) -> list[str]:
        return [sys.executable, "-m", "tests.supervisor.fake_worker", mode, str(run_dir.path)]

    monkeypatch.setattr(start_run.worker_process, "worker_command", command)


def test_a_run_leaves_its_files_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.train(RunRequest("my recipe.yaml", ["lora.rank=4"], run_dir=Path("run"))) == 0
    run_dir = RunDir(tmp_path / "run")
    output = capsys.readouterr().out
    assert "Done." in output and str(run_dir.report) in output and "Chat with it" not in output
    assert "rank: 4" in run_dir.recipe.read_text(encoding="utf-8")
    saved = json.loads(run_dir.environment.read_bytes())
    assert {row["variable"] for row in saved["variables"]} >= {"PYTHONUTF8", "TOKENIZERS_PARALLELISM"}
    assert "größe" in run_dir.report.read_text(encoding="utf-8")


def test_default_directory_and_resume_latest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.train(RunRequest("my recipe.yaml", resume="latest")) == 0
    said = capsys.readouterr().out
    assert says(said, "commands/resume-latest-there-is-no-run-of") and says(said, "commands/so-a-new-one-begins-in")
    (made,) = (tmp_path / "runs").iterdir()
    assert made.name.startswith("my recipe-")
    assert train.train(RunRequest("my recipe.yaml", resume="latest")) == 0
    assert list((tmp_path / "runs").iterdir()) == [made] and not mentions(
        capsys.readouterr().out, "commands/so-a-new-one-begins-in"
    )


def test_a_complete_run_starts_no_worker(
    fake: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train.train(RunRequest("my recipe.yaml", run_dir=Path("run")))
    (tmp_path / "run" / "result.json").write_text('{"updates": 40}', encoding="utf-8")
    (tmp_path / "run" / "lora.safetensors").touch()
    use(fake, "killed")
    assert train.train(RunRequest("my recipe.yaml", run_dir=Path("run"), resume="latest")) == 0
    assert says(capsys.readouterr().out, "commands/this-run-is-complete")


def test_a_complete_run_needs_no_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "to be deleted"
    folder.mkdir()
    asked: dict[str, Any] = {"overrides": [f"data.path={folder}"], "run_dir": Path("run")}
    train.train(RunRequest("my recipe.yaml", **asked))
    (tmp_path / "run" / "result.json").write_text('{"updates": 40}', encoding="utf-8")
    (tmp_path / "run" / "lora.safetensors").touch()
    folder.rmdir()
    assert train.train(RunRequest("my recipe.yaml", **asked, resume="latest")) == 0
    assert "complete" in capsys.readouterr().out
    with pytest.raises(RecipeError, check=saying("commands/there-is-no-folder")):  # control: a run that has not begun
        train.train(RunRequest("my recipe.yaml", asked["overrides"], run_dir=Path("new"), resume="latest"))
    assert not (tmp_path / "new").exists()


def test_a_run_of_texts_says_what_was_written_and_how_to_talk_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").mkdir()
    recipe = "model: {family: causal-lm, name_or_path: builtin:tiny-llama}\ndata: {path: texts}\n"
    Path("texts.yaml").write_text(recipe + "train: {max_train_steps: 40}\n", encoding="utf-8")
    run, talk = tmp_path / "run", f"Chat with it:\n  lora-rocm chat {tmp_path / 'run'}\n"
    assert train.train(RunRequest("texts.yaml", run_dir=Path("run"))) == 0
    assert says(capsys.readouterr().out, "commands/done-the-lora-run-talk", run=run, talk=talk)
    (run / "peft" / "model").mkdir(parents=True)
    for name in (PEFT_CONFIG, PEFT_WEIGHTS):
        (run / "peft" / "model" / name).touch()
    (run / "result.json").write_text('{"updates": 40, "exports": [{"format": "peft"}]}', encoding="utf-8")
    assert train.train(RunRequest("texts.yaml", run_dir=Path("run"), resume="latest")) == 0
    assert says(
        capsys.readouterr().out, "commands/this-run-is-complete-path-talk", path=run / "peft" / "model", talk=talk
    )


@pytest.mark.parametrize("mode", ["done", "stop-while-caching"])
def test_a_report_that_cannot_be_written_is_said_and_changes_no_exit_code(
    fake: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    def too_large(path: Path, content: bytes, root: Path) -> None:
        raise storage_error(OSError(errno.EFBIG, os.strerror(errno.EFBIG)), path)

    use(fake, mode)
    fake.setattr("lora_rocm.report.report.write_atomic", too_large)
    assert (
        train.train(RunRequest("my recipe.yaml", run_dir=Path("a run"))) == {"done": 0, "stop-while-caching": 130}[mode]
    )
    output = capsys.readouterr().out
    assert says(output, "commands/done-the-lora" if mode == "done" else "commands/stopped-go-on-with")
    again = f"later: lora-rocm report '{tmp_path / 'a run'}'"
    assert says(output, "commands/the-report-could-not-be-written-again", again=again) and "File too large" in output
    (tmp_path / "a run" / "result.json").write_text('{"updates": 3}', encoding="utf-8")
    (tmp_path / "a run" / "lora.safetensors").touch()
    assert train.train(RunRequest("my recipe.yaml", run_dir=Path("a run"), resume="latest")) == 0
    assert says(capsys.readouterr().out, "commands/this-run-is-complete")


def test_a_dead_worker_still_gets_a_report(fake: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(fake, "traceback")
    with pytest.raises(WorkerDiedError):
        train.train(RunRequest("my recipe.yaml", run_dir=Path("run"), supervised=False))
    assert (tmp_path / "run" / "report.html").exists()


def test_a_run_that_is_given_up_says_how_to_go_on_and_gets_a_report(fake: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(fake, "traceback")
    with pytest.raises(GaveUpError) as caught:
        train.train(RunRequest("my recipe.yaml", ["runtime.max_restarts=1"], run_dir=Path("run")))
    assert caught.value.exit_code == 4 and "--set runtime.max_restarts=1 --run-dir" in caught.value.fix
    assert (tmp_path / "run" / "report.html").exists()


def test_a_worker_that_fails_is_started_again_unless_that_is_not_wanted(
    fake: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use(fake, "first:transfer-failed")
    assert train.train(RunRequest("my recipe.yaml", run_dir=Path("watched"))) == 0
    assert says(capsys.readouterr().out, "commands/restart-1-going-on-from-step-0")
    with pytest.raises(MachineError, match="transfer-failed"):
        train.train(RunRequest("my recipe.yaml", run_dir=Path("alone"), supervised=False))
    assert "Restart" not in capsys.readouterr().out


def test_a_worker_of_before_is_waited_for_before_its_files_are_read(fake: pytest.MonkeyPatch, tmp_path: Path) -> None:
    train.train(RunRequest("my recipe.yaml", run_dir=Path("run")))
    result = tmp_path / "run" / "result.json"

    def finishes(run_dir: RunDir, notify: object, worker: object) -> None:
        result.write_text('{"updates": 40}', encoding="utf-8")
        run_dir.lora.touch()

    fake.setattr(start_run.lock, "end_leftover", finishes)
    use(fake, "killed")
    assert train.train(RunRequest("my recipe.yaml", run_dir=Path("run"), resume="latest")) == 0
    assert result.exists()


def test_what_the_machine_did_can_be_gone_on_from(fake: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(fake, "error")
    with pytest.raises(MachineError):
        train.train(RunRequest("my recipe.yaml", run_dir=Path("run dir")))
    output = capsys.readouterr().out
    assert says(output, "commands/go-on-with") and says(output, "commands/run-dir-resume-latest")


def test_a_stop_says_how_to_go_on(fake: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(fake, "stop-while-caching")
    assert train.train(RunRequest("my recipe.yaml", ["lora.rank=4"], run_dir=Path("run dir"))) == 130
    output = capsys.readouterr().out
    assert says(output, "commands/stopped-while-encoding")
    assert "lora-rocm train 'my recipe.yaml' --set lora.rank=4 --run-dir" in output and "--resume latest" in output


def test_bad_input_makes_no_directory(tmp_path: Path) -> None:
    with pytest.raises(RecipeError):
        train.train(RunRequest("my recipe.yaml", ["data.path=nowhere"]))
    with pytest.raises(ResumeError):
        train.train(RunRequest("my recipe.yaml", resume="nowhere"))
    assert not (tmp_path / "runs").exists()


def test_a_gpu_that_cannot_train_makes_no_directory(fake: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unusable(situation: object, recipe: object, notify: object) -> None:
        raise MachineError("gpu-unusable", "Training on this GPU would give wrong results.")

    fake.setattr(start_run.selftest_runner, "ensure", unusable)
    for options in ({}, {"run_dir": Path("run")}, {"resume": "latest"}):
        with pytest.raises(MachineError, match="wrong results"):
            train.train(RunRequest("my recipe.yaml", **options))  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["my recipe.yaml"]


def test_demo_is_the_shipped_recipe_of_its_family() -> None:
    asked = [train.demo_recipe(family) for family in (None, "sdxl", "z-image")]
    assert [Path(path).name for path in asked] == ["demo.yaml", "demo.yaml", "demo-z-image.yaml"]
    assert all(Path(path).exists() for path in asked)


def test_the_command_is_quoted_for_windows_too(fake: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "a b")
    fake.setattr(sys, "platform", "win32")
    assert f'--run-dir "{run_dir.path}"' in RunRequest("r.yaml").resume_command(run_dir)


@pytest.mark.parametrize("supervised", [True, False])
def test_a_run_that_was_rolled_back_goes_on_with_its_noise(
    fake: pytest.MonkeyPatch, tmp_path: Path, supervised: bool
) -> None:
    """Also without a supervisor, and where it was ended before its next checkpoint."""
    seen: list[object] = []

    def command(run_dir: RunDir, checkpoint: object, accept_changes: object, attempt: int, *more: object) -> list[str]:
        seen.append(attempt)
        return [sys.executable, "-m", "tests.supervisor.fake_worker", "done", str(run_dir.path)]

    fake.setattr(start_run.worker_process, "worker_command", command)
    run_dir = RunDir(tmp_path / "run").create()
    fields = {"number": 1, "spent": 1, "budget": 10, "progress": False, "from_updates": 0, "changes": []}
    for attempt in (0, 2):
        assert (
            train.train(RunRequest("my recipe.yaml", run_dir=run_dir.path, resume="latest", supervised=supervised)) == 0
        )
        if not attempt:
            supervisor.record(run_dir, 1, event("restart", attempt=2, **fields))
    assert seen == [0, 2]
