"""Checkpoints: whole or not there; a damaged one is passed over."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lora_rocm.errors import StorageError
from lora_rocm.run.layout import RunDir
from lora_rocm.train import state
from lora_rocm.train.loop import Position

PARTS = {"adapter": {"unet.a": torch.randn(4, 3)}, "ema": {}, "optimizer": {"unet.a.exp_avg": torch.randn(4, 3)}}
FACTS = {"recipe": "r", "data": "d", "threads": 2}


def write(run_dir: RunDir, updates: int) -> Path:
    return state.save(run_dir, Position(iteration=updates + 1, updates=updates), PARTS, FACTS)


def test_round_trip(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "Läufe [1]")
    path = write(run_dir, 5)
    checkpoint, damaged = state.latest_valid(run_dir)
    assert checkpoint is not None and damaged == [] and checkpoint.path == path == run_dir.checkpoint(5)
    assert checkpoint.position == Position(iteration=6, updates=5) and checkpoint.facts == FACTS
    assert torch.equal(checkpoint.tensors("adapter")["unet.a"], PARTS["adapter"]["unet.a"])
    assert checkpoint.tensors("ema") == {}
    assert sorted(file.name for file in run_dir.checkpoints.iterdir()) == ["step-00000005"]


def test_the_bytes_depend_on_the_state_alone(tmp_path: Path) -> None:
    left, right = write(RunDir(tmp_path / "a"), 5), write(RunDir(tmp_path / "b"), 5)
    for file in left.iterdir():
        assert file.read_bytes() == (right / file.name).read_bytes()


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_to_any_file_is_seen(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    run_dir = RunDir(tmp_path_factory.mktemp("run"))
    write(run_dir, 3)
    path = write(run_dir, 6)
    file = data.draw(st.sampled_from(sorted(path.iterdir())))
    content = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "missing"]))
    if kind == "missing":
        file.unlink()
    else:
        content[place] ^= 1 << data.draw(st.integers(0, 7))
        file.write_bytes(content if kind == "flip" else content[:place])
    checkpoint, damaged = state.latest_valid(run_dir)
    assert checkpoint is not None and checkpoint.position.updates == 3 and damaged == [path]


def test_an_intact_checkpoint_is_not_passed_over(tmp_path: Path) -> None:
    """Negative control of the test above."""
    run_dir = RunDir(tmp_path)
    write(run_dir, 3)
    write(run_dir, 6)
    checkpoint, damaged = state.latest_valid(run_dir)
    assert checkpoint is not None and checkpoint.position.updates == 6 and damaged == []


def test_rotation_keeps_the_newest_whole_ones(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for updates in (1, 2, 3, 4):
        write(run_dir, updates)
    (run_dir.checkpoint(4) / "adapter.safetensors").write_bytes(b"")
    state.rotate(run_dir, keep_last=1)
    checkpoint, damaged = state.latest_valid(run_dir)
    assert checkpoint is not None and checkpoint.position.updates == 3 and damaged == [run_dir.checkpoint(4)]
    assert [updates for updates, _ in run_dir.list_checkpoints()] == [3, 4]


def test_an_old_checkpoint_that_is_in_use_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = RunDir(tmp_path)
    for updates in (1, 2, 3):
        write(run_dir, updates)

    def in_use(path: Path) -> None:
        raise PermissionError(errno.EACCES, "used by another process", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", in_use)
        state.rotate(run_dir, keep_last=1)
    assert [state.read(path) is not None for _, path in run_dir.list_checkpoints()] == [False, False, True]
    state.rotate(run_dir, keep_last=1)
    assert [updates for updates, _ in run_dir.list_checkpoints()] == [3]


def test_a_full_disk_loses_nothing_older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = RunDir(tmp_path)
    write(run_dir, 1)

    def full(path: Path, content: bytes) -> None:
        path.write_bytes(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(state, "_write", full)
        with pytest.raises(StorageError, match="disk is full"):
            write(run_dir, 2)
    checkpoint, _ = state.latest_valid(run_dir)
    assert checkpoint is not None and checkpoint.position.updates == 1
    assert [path.name for path in run_dir.checkpoints.iterdir()] == ["step-00000001"]


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    write(run_dir, 1)
    half = run_dir.checkpoints / ".step-00000002.77.tmp"
    half.mkdir()
    (half / "adapter.safetensors").write_bytes(b"half")
    (run_dir.checkpoints / ".lora-step00000002.safetensors.77.tmp").write_bytes(b"half")
    state.discard_unfinished(run_dir)
    assert [path.name for path in run_dir.checkpoints.iterdir()] == ["step-00000001"]


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    path = write(run_dir, 1)
    (path / "adapter.safetensors").write_bytes(b"x")
    assert state.read(path) is None
    write(run_dir, 1)
    assert state.read(path) is not None


def test_no_file_is_a_pickle(tmp_path: Path) -> None:
    path = write(RunDir(tmp_path), 1)
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}
    parsed: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
    assert set(parsed) == {"position", "facts", "sha256", "seal"}
