"""Renaming, archiving and deleting runs: running ones are refused, links are not followed, and space is counted."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from lora_rocm.errors import LoraRocmError
from lora_rocm.foundation.files import write_json
from lora_rocm.rundir.disk_space import bytes_in
from lora_rocm.rundir.fork_origin import ForkOrigin, fork_origin
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.run_view import RunView
from lora_rocm.supervisor import manage_runs
from lora_rocm.supervisor.lock import locked
from lora_rocm.supervisor.manage_runs import archive_run, delete_run, rename_run
from tests.command_line import command_line
from tests.supervisor.fake_run import write_checkpoint, write_whole_run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path / "runs" / "katze")
    write_whole_run(run_dir)
    write_checkpoint(run_dir, 20, num_bytes=5000)
    return run_dir


def forked(parent: Path, path: Path) -> RunDir:
    fork = RunDir(path).create()
    fork.recipe.write_text("x", encoding="utf-8")
    fork.events().touch()
    write_json(fork.fork, ForkOrigin(parent, 20, ()).to_json(path))
    return fork


def code_of(call: object) -> str:
    with pytest.raises(LoraRocmError) as caught:
        call()  # type: ignore[operator]
    return caught.value.code


def test_a_renamed_run_stays_whole_and_its_forks_follow(run: RunDir) -> None:
    fork = forked(run.path, run.path.with_name("fork"))
    before = bytes_in(run.path)
    found = rename_run(run.path, "hund größe")
    assert found.now == run.path.with_name("hund größe") and found.freed_bytes == 0 and not run.path.exists()
    assert RunView.of(found.now).outcome == "finished" and bytes_in(found.now) >= before
    origin = fork_origin(fork)
    assert origin is not None and origin.run == found.now
    # The fork itself
    moved = archive_run(fork.path).now
    assert moved is not None
    origin = fork_origin(RunDir(moved))
    assert origin is not None and origin.run == found.now


@pytest.mark.parametrize("name", ["", "a/b", "..", "con", "a" * 300, "archive", ".hidden", "x\ny"])
def test_invalid_names_are_refused(run: RunDir, name: str) -> None:
    assert code_of(lambda: rename_run(run.path, name)) == "run-name" and run.path.exists()


def test_a_taken_name_is_refused(run: RunDir) -> None:
    other = run.path.with_name("other")
    other.mkdir()
    assert code_of(lambda: rename_run(run.path, "other")) == "run-name-taken"
    assert run.path.exists() and not any(other.iterdir())


def test_an_archived_finished_run_keeps_its_results_and_frees_its_states(run: RunDir) -> None:
    states = sum(bytes_in(path) for _, path in run.list_checkpoints())
    assert archive_run(run.path, dry_run=True).freed_bytes == states > 5000 and run.path.exists()
    loras = [path.name for _, path in run.checkpoint_loras()]
    found = archive_run(run.path)
    assert found.freed_bytes == states and found.now == run.path.parent / "archive" / "katze"
    now = RunDir(found.now)
    assert now.list_checkpoints() == [] and [path.name for _, path in now.checkpoint_loras()] == loras
    view = RunView.of(now)
    assert view.outcome == "finished" and now.lora in view.files.whole
    listed = json.loads(command_line("runs", run.path.parent, "--json").stdout)["runs"]
    assert listed == [] and len(json.loads(command_line("runs", found.now.parent, "--json").stdout)["runs"]) == 1


@pytest.mark.parametrize("damage", ["unfinished", "lora"])
def test_states_that_are_still_needed_are_kept(run: RunDir, damage: str) -> None:
    run.result.unlink() if damage == "unfinished" else run.lora.write_bytes(b"torn")
    found = archive_run(run.path)
    assert found.now is not None and found.freed_bytes == 0 and RunDir(found.now).list_checkpoints()


def test_a_deleted_run_is_gone_with_its_space(run: RunDir) -> None:
    size = bytes_in(run.path)
    assert delete_run(run.path, dry_run=True).freed_bytes == size and run.path.exists()
    left = run.path.with_name(".other.999999999.0123abcd.tmp")
    left.mkdir()
    found = delete_run(run.path)
    assert (found.freed_bytes, found.now) == (size, None) and list(run.path.parent.iterdir()) == []


def test_a_killed_deletion_leaves_no_half_of_a_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(manage_runs, "remove", killed)
        delete_run(run.path)
    assert not run.path.exists()
    assert json.loads(command_line("runs", run.path.parent, "--json").stdout)["runs"] == []


def test_a_running_run_is_refused(run: RunDir) -> None:
    with locked(run):
        for call in (lambda: delete_run(run.path), lambda: archive_run(run.path), lambda: rename_run(run.path, "x")):
            assert code_of(call) == "run-is-running"
    assert run.path.exists()
    rename_run(run.path, "x")


def test_a_run_that_starts_at_the_last_moment_is_refused(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manage_runs, "is_running", lambda run_dir: False)
    with locked(run):
        assert code_of(lambda: delete_run(run.path)) == "run-is-running"
    assert run.path.exists()


def test_files_of_the_user_are_not_deleted(run: RunDir) -> None:
    (run.path / "my photo.png").write_bytes(b"x")
    assert code_of(lambda: delete_run(run.path)) == "run-has-other-files"
    (run.path / "my photo.png").unlink()
    (run.path / ".DS_Store").touch()
    delete_run(run.path)
    assert not run.path.exists()


def test_links_are_not_followed(run: RunDir, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "a.png").write_bytes(b"x" * 10_000)
    try:
        os.symlink(photos, run.samples / "linked", target_is_directory=True)
        os.symlink(run.path, run.path.with_name("alias"), target_is_directory=True)
    except OSError:
        pytest.skip("no right to make links")
    assert code_of(lambda: delete_run(run.path.with_name("alias"))) == "link-refused"
    os.symlink(photos, run.path.parent / "archive", target_is_directory=True)
    assert code_of(lambda: archive_run(run.path)) == "link-refused" and len(list(photos.iterdir())) == 1
    assert delete_run(run.path).freed_bytes < 2**20 and (photos / "a.png").exists()


def test_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for call in (lambda: delete_run(tmp_path / "photos"), lambda: archive_run(tmp_path / "none")):
        assert code_of(call) == "no-run"
    assert (tmp_path / "photos").exists()


def test_the_command_takes_names_and_paths(run: RunDir) -> None:
    folder = run.path.parent
    shutil.copytree(run.path, folder / "second")
    found = json.loads(command_line("runs", folder, "--rename", "katze", "tier", "--json").stdout)
    assert [change["action"] for change in found["changes"]] == ["renamed"] and (folder / "tier").exists()
    text = command_line("runs", folder, "--delete", "tier", "--archive", folder / "second", "--dry-run").stdout
    assert len(text.splitlines()) == 2 and "would be" in text and (folder / "tier").exists()
    ended = command_line("runs", folder, "--archive", "second", "--delete", "tier")
    assert ended.exit_code == 0 and [path.name for path in folder.iterdir()] == ["archive"]
    assert command_line("runs", folder, "--delete", "tier").exit_code == 2
