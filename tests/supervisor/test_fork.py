"""Refusals of a fork, its directory, and its copies."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.errors import LoraRocmError
from lora_rocm.recipe.comparison import fingerprint, fixed_values
from lora_rocm.recipe.fork_keys import OF_LATER_UPDATES, why_fixed
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.load import load_recipe
from lora_rocm.recipe.optim_sections import OPTIMIZERS
from lora_rocm.rules.mitigations import change_event
from lora_rocm.rundir.checkpoint_record import read_record
from lora_rocm.rundir.fork_origin import fork_origin
from lora_rocm.rundir.layout import STATE_FILE, SUPERVISOR, RunDir
from lora_rocm.rundir.newest import is_run
from lora_rocm.rundir.run_view import RunView
from lora_rocm.supervisor.fork import ForkRequest, create_fork
from lora_rocm.supervisor.supervisor import in_force, record
from tests.command_line import command_line
from tests.event_lines import read_events
from tests.hardware.situations import situation
from tests.supervisor.fake_run import RECIPE, write_checkpoint


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    run_dir = RunDir(tmp_path / "runs" / "my-20260101-000000").create()
    run_dir.recipe.write_text(RECIPE, encoding="utf-8")
    for updates in (20, 30):
        write_checkpoint(run_dir, updates, recipe=fingerprint(load_recipe(run_dir.recipe).recipe))
    return run_dir


def refusal(parent: RunDir, *overrides: str, **changes: Any) -> LoraRocmError:
    before = sorted(parent.path.parent.iterdir())
    with pytest.raises(LoraRocmError) as caught:
        create_fork(ForkRequest(parent.path, overrides=overrides, **changes))
    assert sorted(parent.path.parent.iterdir()) == before, "nothing is created"
    return caught.value


def test_all_fixed_keys_are_refused_at_once_with_their_reasons(parent: RunDir) -> None:
    error = refusal(parent, "lora.rank=4", "train.seed=7", "data.flip_aug=true", "optim.learning_rate=1e-5")
    assert error.code == "fork-keys-fixed"
    for key in ("lora.rank", "train.seed", "data.flip_aug"):
        assert f"{key}: " in error.what and why_fixed(key) in error.what
    assert "learning_rate" not in error.what


def test_a_fork_that_would_train_nothing_is_refused(parent: RunDir) -> None:
    assert create_fork(ForkRequest(parent.path)), "the control: the run is not finished"
    parent.result.write_text("{}", encoding="utf-8")
    for step in (None, 30):
        error = refusal(parent, step=step)
        assert error.code == "fork-unchanged" and "20, 30" in error.fix
    assert create_fork(ForkRequest(parent.path, step=20))
    assert create_fork(ForkRequest(parent.path, overrides=["output.formats=[peft]"]))


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_every_key_that_a_resume_refuses_may_change_or_has_a_reason(optimizer: str) -> None:
    families = ("sdxl", "flux", "causal-lm")
    seen = set[str]()
    for family in families:
        data = {"sources": [{"dataset": "x.jsonl"}]} if family == "causal-lm" else {"path": "x"}
        sections: dict[str, Any] = {"model": {"family": family, "name_or_path": "x"}, "data": data}
        lora = {"weight_dtype": OPTIMIZERS[optimizer].weight_dtypes[0]}
        sections |= {"train": {"max_train_steps": 1}, "lora": lora}
        recipe = recipe_from({**sections, "optim": {"optimizer": optimizer}})
        for key in fixed_values(recipe):
            assert (key in OF_LATER_UPDATES) != bool(why_fixed(key)), key
            seen.add(key)
    assert why_fixed("lora.rank") and not why_fixed("optim.learning_rate")
    later = {"optim.lr_warmup_from_zero"}  # compared only where it is set
    assert OF_LATER_UPDATES <= seen | later | {key for key in OF_LATER_UPDATES if key.startswith("lora.")}


def test_the_default_directory_is_next_to_the_parent_and_no_latest_of_its_recipe(parent: RunDir) -> None:
    made = create_fork(ForkRequest(parent.path))
    name = made.run_dir.path.name
    assert made.run_dir.path.parent == parent.path.parent and name.startswith("my-fork-2")
    again = create_fork(ForkRequest(made.run_dir.path)).run_dir.path.name
    assert again.startswith("my-fork-2") and again != name
    assert made.origin.step == 30 and made.run_dir.list_checkpoints() == [(30, made.run_dir.checkpoint(30))]


def test_a_checkpoint_is_named_by_step_or_path(parent: RunDir, tmp_path: Path) -> None:
    by_path = create_fork(ForkRequest(parent.checkpoint(20), run_dir=tmp_path / "a"))
    assert by_path.origin.step == 20 and by_path.origin.run == parent.path
    assert create_fork(ForkRequest(parent.path, 20, run_dir=tmp_path / "b")).origin.step == 20
    error = refusal(parent, step=25)
    assert error.code == "fork-no-checkpoint" and "20, 30" in error.fix
    with pytest.raises(LoraRocmError) as caught:
        create_fork(ForkRequest(parent.checkpoint(20), 30))
    assert caught.value.code == "fork-two-steps"


def test_a_run_without_checkpoints_or_with_a_damaged_one(parent: RunDir) -> None:
    state = parent.checkpoint(30) / STATE_FILE
    state.write_bytes(state.read_bytes()[:-9])
    assert refusal(parent, step=30).code == "checkpoint-damaged"
    assert create_fork(ForkRequest(parent.path)).origin.step == 20, "the newest one is skipped, as in a resume"
    adapter = parent.checkpoint(20) / "adapter.safetensors"
    adapter.write_bytes(adapter.read_bytes()[:-1])
    assert refusal(parent).code in ("checkpoint-damaged", "weights-damaged")
    for updates in (20, 30):
        shutil.rmtree(parent.checkpoint(updates))
    parent.events().touch()
    assert refusal(parent).code == "fork-no-checkpoint"


def test_a_file_that_changed_after_it_was_written_is_not_copied(parent: RunDir) -> None:
    """Its header is whole, so that only the checksum shows it."""
    header = b'{"__metadata__":{"a":"b"}}'
    (parent.checkpoint(30) / "adapter.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    error = refusal(parent, step=30)
    assert error.code == "checkpoint-damaged" and "adapter" in error.where


def test_a_checkpoint_of_another_recipe_is_refused(parent: RunDir) -> None:
    write_checkpoint(parent, 40, recipe="0" * 64)
    assert refusal(parent).code == "resume-recipe-changed"


def test_a_directory_with_files_is_refused_and_an_empty_one_is_taken(parent: RunDir, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    assert refusal(parent, run_dir=tmp_path / "full").code == "fork-dir-taken"
    (tmp_path / "empty").mkdir()
    assert create_fork(ForkRequest(parent.path, run_dir=tmp_path / "empty")).run_dir.holds_run()


def test_a_fork_that_was_killed_is_no_run_and_the_next_removes_it(
    parent: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "runs" / "fork"
    left = target.with_name(".fork.999999999.0123abcd.tmp")
    with monkeypatch.context() as patch:  # a kill leaves the temporary folder
        patch.setattr("lora_rocm.foundation.files.rename", lambda source, to: os.rename(source, left))
        patch.setattr("lora_rocm.foundation.files.fsync_folder", lambda folder: None)
        create_fork(ForkRequest(parent.path, run_dir=target))
    assert RunDir(left).holds_run() and not is_run(left) and not target.exists()
    create_fork(ForkRequest(parent.path, run_dir=target))
    assert is_run(target) and not left.exists()


def test_a_full_disk_leaves_nothing(parent: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lora_rocm.supervisor.fork.write_pieces", full)
    assert refusal(parent).code == "disk-full"


def test_changes_and_choices_of_the_parent_are_kept_and_no_others(parent: RunDir, tmp_path: Path) -> None:
    record(parent, 1, change_event("copies-unpinned", "hang"))
    parent.tuned.write_text("{}", encoding="utf-8")
    fork = create_fork(ForkRequest(parent.path)).run_dir
    assert [event["id"] for event in read_events(fork.events(SUPERVISOR))] == ["copies-unpinned"]
    assert fork.tuned.read_text(encoding="utf-8") == "{}"
    machine = situation("linux-rx7900xtx", changes=("copies-unpinned",))
    assert in_force(fork, machine, lambda text: None).changes == ("copies-unpinned",)
    bare = create_fork(ForkRequest(RunDir(fork.path).path, run_dir=tmp_path / "bare")).run_dir
    bare.events(SUPERVISOR).unlink()
    assert in_force(bare, machine, lambda text: None).changes == ()
    new = RunDir(tmp_path / "new").create()
    assert in_force(new, machine, lambda text: None).changes == ("copies-unpinned",), (
        "the control: a new run takes them"
    )


def test_a_new_name_is_the_name_of_its_files(parent: RunDir) -> None:
    fork = create_fork(ForkRequest(parent.path, overrides=("output.name=größe",))).run_dir
    assert fork.lora.name == "größe.safetensors" and not fork.names_are_wrong and parent.lora.name == "lora.safetensors"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"run": "../x", "step": -1, "differences": {}}',
        b'{"run": 3, "step": 1, "differences": {}}',
        b'{"run": "../x", "step": 1, "differences": {"a": [1]}}',
        b'{"run": "a\\u0000b", "step": 1, "differences": {}}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_origin_is_none(parent: RunDir, content: bytes) -> None:
    parent.fork.write_bytes(content)
    assert fork_origin(parent) is None and RunView.of(parent).forked_from is None


def test_status_runs_and_report_show_the_parent(parent: RunDir) -> None:
    overrides = ("--set", "optim.learning_rate=1e-5", "--set", "output.author='\x1b[31m'")
    made = command_line("fork", parent.path, "--step", "20", *overrides[:2], "--no-start", "--json")
    found = json.loads(made.stdout)
    assert made.exit_code == 0 and found["outcome"] == "prepared" and "resume" in found["again"]
    fork = found["run_dir"]
    shown = json.loads(command_line("status", fork, "--json").stdout)
    assert shown["state"] == "prepared" and shown["updates"] == 20
    assert shown["forked_from"]["step"] == 20 and Path(shown["forked_from"]["run"]) == parent.path
    assert shown["forked_from"]["differences"] == [{"key": "optim.learning_rate", "before": 1e-4, "after": 1e-5}]
    assert shown["remarks"] == []
    text = command_line("status", fork).stdout
    assert "my-20260101-000000, step 20" in text and "optim.learning_rate: 0.0001 -> 1e-05" in text
    listed = json.loads(command_line("runs", "runs", "--json").stdout)["runs"]
    assert [run["forked_from"] and run["forked_from"]["step"] for run in listed] == [None, 20]
    assert "my-20260101-000000, step 20" in command_line("runs", "runs").stdout
    assert command_line("report", fork).exit_code == 0
    assert "my-20260101-000000, step 20" in (Path(fork) / "report.html").read_text(encoding="utf-8")
    assert read_record(RunDir(Path(fork)).checkpoint(20)).facts["recipe"] != "0"
