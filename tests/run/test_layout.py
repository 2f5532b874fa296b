"""Names in a run directory, and atomic writing."""

import os
from pathlib import Path

import pytest

from lora_rocm.errors import StorageError
from lora_rocm.host.files import write_atomic, write_json
from lora_rocm.run.layout import RunDir


def test_checkpoints_and_samples_are_listed_in_order(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "größe x").create()
    assert run_dir.list_checkpoints() == [] and run_dir.list_samples() == []
    for updates in (1000, 20, 300):
        run_dir.checkpoint(updates).mkdir(parents=True)
        run_dir.samples_at(updates).mkdir(parents=True)
    (run_dir.checkpoints / "step-00000007.tmp").mkdir()
    (run_dir.checkpoints / "step-00000008").touch()
    run_dir.checkpoint_lora(20).touch()
    assert [updates for updates, _ in run_dir.list_checkpoints()] == [20, 300, 1000]
    assert [updates for updates, _ in run_dir.list_samples()] == [20, 300, 1000]


def test_event_files() -> None:
    run_dir = RunDir(Path("x"))
    assert run_dir.events().name == "events.jsonl"
    assert run_dir.events("supervisor").name == "events.supervisor.jsonl"


def test_write_atomic_replaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "a.json"
    write_json(path, {"ü": 1})
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new" and os.listdir(path.parent) == ["a.json"]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    write_atomic(path, b"old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lora_rocm.run.layout.os.fsync", full)
    with pytest.raises(StorageError) as caught:
        write_atomic(path, b"new")
    assert caught.value.code == "disk-full"
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["a"]


def test_what_a_killed_writer_left_is_removed_by_its_own_side(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "größe x").create()
    half = run_dir.checkpoints / ".step-00000002.77.tmp"
    half.mkdir(parents=True)
    (half / "adapter.safetensors").write_bytes(b"half")
    run_dir.samples_at(2).mkdir(parents=True)
    of_worker = [half, run_dir.path / ".lora.safetensors.77.ab.tmp", run_dir.samples_at(2) / ".00.png.77.ab.tmp"]
    of_parent = [run_dir.path / ".recipe.yaml.77.ab.tmp", run_dir.path / ".report.html.77.ab.tmp"]
    kept = [run_dir.recipe, run_dir.lora, run_dir.worker_lock]
    for path in (*of_worker[1:], *of_parent, *kept):
        path.write_bytes(b"half")
    run_dir.discard_unfinished(of_parent=False)
    assert [path.exists() for path in (*of_worker, *of_parent, *kept)] == [False] * 3 + [True] * 5
    run_dir.discard_unfinished(of_parent=True)
    assert [path.exists() for path in (*of_parent, *kept)] == [False] * 2 + [True] * 3


def test_each_rank_removes_what_it_left_of_its_recipe_and_nobody_else_does(tmp_path: Path) -> None:
    """Ranks that torchrun starts write at the same moment, and no lock is between them."""
    run_dir = RunDir(tmp_path / "größe x").create()
    left = [run_dir.path / f".{run_dir.recipe_of(rank).name}.77.ab.tmp" for rank in (1, 2, 12)]
    for path in (*left, run_dir.recipe_of(1)):
        path.write_bytes(b"half")
    run_dir.discard_unfinished(of_parent=True)
    run_dir.discard_unfinished(of_parent=False)
    assert [path.exists() for path in left] == [True] * 3
    run_dir.discard_unfinished_recipe(1)
    assert [path.exists() for path in (*left, run_dir.recipe_of(1))] == [False, True, True, True]


def test_a_probe_leaves_nothing_and_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = RunDir(tmp_path / "run").create()
    with pytest.raises(StorageError, match="not there any more"):
        run_dir.require()
    run_dir.recipe.touch()
    run_dir.require()
    run_dir.probe()
    assert os.listdir(run_dir.path) == ["recipe.yaml"]
    run_dir.path.rename(tmp_path / "away")
    for look in (run_dir.probe, run_dir.require):
        with pytest.raises(StorageError, match="not there any more") as caught:
            look()
        assert caught.value.code == "storage-gone" and caught.value.exit_code == 3
    assert os.listdir(tmp_path) == ["away"]


def test_nothing_is_made_where_a_drive_has_gone(tmp_path: Path) -> None:
    run = tmp_path / "drive" / "run"
    run.mkdir(parents=True)
    write_atomic(run / "a" / "b" / "c", b"new", run)
    assert (run / "a" / "b" / "c").read_bytes() == b"new"
    run.parent.rename(tmp_path / "away")
    run.parent.mkdir()  # an empty place where the drive was mounted
    for path in (run / "d", run / "a" / "b" / "c"):
        with pytest.raises(StorageError, match="not there any more"):
            write_atomic(path, b"new", run)
    assert os.listdir(run.parent) == []
    write_atomic(run / "a" / "d", b"new")  # negative control: made wherever it is asked for
    assert (run / "a" / "d").exists()


def test_create_over_a_file_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        RunDir(tmp_path / "file").create()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such files")
def test_a_pipe_or_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(StorageError) as caught:
        write_atomic(pipe, b"x")
    assert caught.value.code == "no-file" and pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_name_that_is_empty_is_said(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        write_atomic(Path(""), b"x")


def test_what_a_link_points_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real.md")
    write_atomic(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real.md").read_bytes() == b"new"
