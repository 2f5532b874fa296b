"""Damaged files of a run are found by header and length, and the suggested remedy works."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from lora_rocm.errors import AdapterError
from lora_rocm.foundation.files import write_json
from lora_rocm.rundir import whole_files
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.made_from import newest_lora
from tests.supervisor.fake_run import safetensors_bytes, write_whole_run
from tests.wording import saying, says, worded

WHOLE = safetensors_bytes(100)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    write_whole_run(made)
    return made


def test_the_newest_lora_is_the_result_only_of_a_finished_run(run_dir: RunDir) -> None:
    assert newest_lora(run_dir) == run_dir.lora
    run_dir.result.unlink()  # it continues
    assert newest_lora(run_dir) == run_dir.checkpoint_lora(40)
    run_dir.checkpoint_lora(40).unlink()
    assert newest_lora(run_dir) == run_dir.lora, "of what it was before"
    run_dir.lora.unlink()
    with pytest.raises(AdapterError, check=saying("rundir/not-written-a-lora-file-yet")):
        newest_lora(run_dir)


def fix_of(run_dir: RunDir, path: Path) -> str:
    path.write_bytes(WHOLE[:50])
    with pytest.raises(AdapterError, match="damaged") as caught:
        newest_lora(run_dir)
    assert caught.value.where == str(path)
    return caught.value.fix


def test_a_damaged_result_is_exported_again(run_dir: RunDir) -> None:
    assert fix_of(run_dir, run_dir.lora) == worded(
        "rundir/lora-rocm-export-path-format-kohya-writes", path=run_dir.path
    )
    write_json(run_dir.result, {"updates": 41})
    assert says(fix_of(run_dir, run_dir.lora), "rundir/output-file-writes-the-lora-of-step"), "export would refuse"
    (run_dir.checkpoint(40) / "state.json").unlink()
    assert says(fix_of(run_dir, run_dir.lora), "rundir/no-whole-checkpoint-is-left")


def test_a_damaged_lora_of_a_checkpoint_is_exported_to_its_place(run_dir: RunDir) -> None:
    run_dir.result.unlink()
    lora = run_dir.checkpoint_lora(40)
    assert says(fix_of(run_dir, lora), "rundir/format-kohya-output-lora-writes-it-again", lora=lora)


def test_a_peft_folder_is_damaged_with_any_of_its_files(run_dir: RunDir) -> None:
    for component in ("unet", "text_encoder"):
        (run_dir.peft_dir / component).mkdir(parents=True)
        (run_dir.peft_dir / component / "adapter_config.json").write_text("{}", encoding="utf-8")
        (run_dir.peft_dir / component / "adapter_model.safetensors").write_bytes(WHOLE)
    assert whole_files.require_whole(run_dir, run_dir.peft_dir) == run_dir.peft_dir
    (run_dir.peft_dir / "text_encoder" / "adapter_model.safetensors").write_bytes(WHOLE[:-1])
    with pytest.raises(AdapterError, match="damaged") as caught:
        whole_files.require_whole(run_dir, run_dir.peft_dir)
    assert f"{run_dir.path} --format peft" in caught.value.fix


def test_a_named_file_of_a_run_is_exported_again(run_dir: RunDir, tmp_path: Path) -> None:
    folder = run_dir.peft_dir / "unet"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}", encoding="utf-8")
    weights, lora = folder / "adapter_model.safetensors", run_dir.checkpoint_lora(40)
    forms = {run_dir.lora: "kohya", folder: "peft", weights: "peft", lora: f"kohya --output {lora}"}
    for path in (weights, run_dir.lora, lora, run_dir.path / "other.safetensors", tmp_path / "alone.safetensors"):
        path.write_bytes(WHOLE)
    assert [whole_files.require_whole_named(path) for path in forms] == list(forms)
    for path, form in forms.items():
        (weights if path == folder else path).write_bytes(WHOLE[:50])
        with pytest.raises(AdapterError, match="damaged") as caught:
            whole_files.require_whole_named(path)
        again = f"lora-rocm export {run_dir.path} --format {form} recreates it"
        assert caught.value.fix.startswith(again) and caught.value.where == str(path)
    for path in (run_dir.path / "other.safetensors", tmp_path / "alone.safetensors"):  # of no run
        path.write_bytes(WHOLE[:50])
        assert whole_files.require_whole_named(path) == path


@pytest.mark.parametrize("state", [b"", b"[]", b'{"sha256": {"/dev/zero": ""}}', b'{"sha256": 3}', b"[" * 100_000])
def test_a_strange_state_is_a_damaged_checkpoint(run_dir: RunDir, state: bytes) -> None:
    found, faults = whole_files.newest_checkpoint(run_dir)
    assert found is not None and found.updates == 40 and faults == {}
    (run_dir.checkpoint(40) / "state.json").write_bytes(state)
    found, faults = whole_files.newest_checkpoint(run_dir)
    assert found is None and faults[run_dir.checkpoint(40)].startswith("state.json")


def test_the_checksums_of_large_files_are_not_compared(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = run_dir.checkpoint(40) / "adapter.safetensors"
    monkeypatch.setattr(whole_files, "COMPARED_BYTES", adapter.stat().st_size)
    found, _ = whole_files.newest_checkpoint(run_dir)
    assert found is not None and found.unread_bytes == 0, "the control"
    monkeypatch.setattr(whole_files, "COMPARED_BYTES", adapter.stat().st_size - 1)
    found, _ = whole_files.newest_checkpoint(run_dir)
    assert found is not None and found.unread_bytes == adapter.stat().st_size


@pytest.mark.skipif(sys.platform == "win32", reason="other rules of quoting")
def test_a_suggested_command_keeps_a_name_with_shell_characters_in_one_word(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "a run; touch $HOME")
    write_whole_run(run_dir)
    words = shlex.split(whole_files.remedy(run_dir, run_dir.lora))
    assert words[:3] == ["lora-rocm", "export", str(run_dir.path)]
