"""Checkpoints: whole or not there; a damaged one is passed over."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lora_rocm.errors import StorageError
from lora_rocm.rundir import checkpoint_record
from lora_rocm.rundir.checkpoint_record import Position
from lora_rocm.rundir.layout import RunDir, embeddings_of
from lora_rocm.train import checkpoint as module
from tests.wording import saying

PARTS = {"adapter": {"unet.a": torch.randn(4, 3)}, "ema": {}, "optimizer": {"unet.a.exp_avg": torch.randn(4, 3)}}
FACTS = {"recipe": "r", "data": "d", "threads": 2}


def write(run_dir: RunDir, updates: int) -> Path:
    return module.save_checkpoint(run_dir.create(), Position(iteration=updates + 1, updates=updates), PARTS, FACTS)


def test_round_trip(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "Läufe [1]")
    path = write(run_dir, 5)
    checkpoint, damaged = module.latest_valid(run_dir)
    assert checkpoint is not None and damaged == [] and checkpoint.path == path == run_dir.checkpoint(5)
    assert checkpoint.position == Position(iteration=6, updates=5) and checkpoint.facts == FACTS
    assert torch.equal(checkpoint.part_to_resume("adapter")["unet.a"], PARTS["adapter"]["unet.a"])
    assert checkpoint.part_to_resume("ema") == {}
    assert sorted(file.name for file in run_dir.checkpoints.iterdir()) == ["step-00000005"]


def test_the_bytes_depend_on_the_state_alone(tmp_path: Path) -> None:
    left, right = write(RunDir(tmp_path / "a"), 5), write(RunDir(tmp_path / "b"), 5)
    for file in left.iterdir():
        assert file.read_bytes() == (right / file.name).read_bytes()


DAMAGES = ("flip", "cut", "longer", "zeros", "empty", "missing", "folder", "swapped", "renamed folder", "extra part")


def damage(data: st.DataObject, path: Path, other: Path) -> None:
    """Do something to one checkpoint (``other`` is a whole one of other updates)."""
    file = data.draw(st.sampled_from(sorted(path.iterdir())))
    content = bytearray(file.read_bytes())
    start = data.draw(st.integers(0, len(content) - 1))
    end = data.draw(st.integers(start + 1, len(content)))
    kind = data.draw(st.sampled_from(DAMAGES))
    if kind == "flip":
        content[start] ^= 1 << data.draw(st.integers(0, 7))
    elif kind in ("cut", "empty"):
        del content[0 if kind == "empty" else start :]
    elif kind == "longer":
        content += content[start:end]
    elif kind == "zeros":
        content[start:end] = bytes(end - start)
    if kind in ("missing", "folder"):
        file.unlink()
        if kind == "folder":
            file.mkdir()
    elif kind == "swapped":
        file.write_bytes((other / file.name).read_bytes())
    elif kind == "renamed folder":
        path.rename(path.with_name("aside"))
        other.rename(path)
    elif kind == "extra part":
        (path / "ema.safetensors").write_bytes((path / "adapter.safetensors").read_bytes())
    else:
        file.write_bytes(content)


def everything(checkpoint: module.Checkpoint | None) -> Any:
    """All that a run takes over."""
    if checkpoint is None:
        return None
    parts = {
        part: {name: tensor.tolist() for name, tensor in checkpoint.part_to_resume(part).items()}
        for part in ("adapter", "ema", "optimizer")
    }
    return checkpoint.position, checkpoint.facts, parts


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with two checkpoints."""
    run_dir = RunDir(tmp_path_factory.mktemp("pair"))
    write(run_dir, 3), write(run_dir, 6)
    return run_dir.path


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_checkpoint_is_read_as_it_was_written_or_not_at_all(pair: Path, data: st.DataObject) -> None:
    """Also where both checkpoints hold the same tensors, so that only the state's checksum differs."""
    with tempfile.TemporaryDirectory() as name:
        run_dir = RunDir(Path(shutil.copytree(pair, Path(name) / "run")))
        older, path = run_dir.checkpoint(3), run_dir.checkpoint(6)
        written = everything(module.read_checkpoint(path))
        damage(data, path, older)
        assert everything(module.read_checkpoint(path)) in (written, None)
        found, damaged = module.latest_valid(run_dir)
        if module.read_checkpoint(path) is None and older.exists():
            assert found is not None and found.position.updates == 3 and damaged == [path]


@pytest.mark.parametrize("weak", ["seal", "checksum", "name"])
def test_each_check_of_a_checkpoint_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weak: str) -> None:
    """Negative control of the test above: without one of the three checks a damage of its kind gets through."""
    run_dir = RunDir(tmp_path)
    older, path = write(run_dir, 3), write(run_dir, 6)
    written, file = everything(module.read_checkpoint(path)), path / "adapter.safetensors"
    text = path / "state.json"
    if weak == "seal":
        text.write_text(text.read_text(encoding="utf-8").replace('"iteration": 7', '"iteration": 8'), encoding="utf-8")
        monkeypatch.setattr(checkpoint_record, "sealed", lambda content: b"")
        monkeypatch.setattr(checkpoint_record, "_as_json", lambda content: b"")
    elif weak == "checksum":
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        monkeypatch.setattr(checkpoint_record.hashlib, "sha256", lambda content=b"": Same())
        state_of = json.loads(text.read_bytes())
        state_of["sha256"] = dict.fromkeys(state_of["sha256"], Same().hexdigest())
        text.write_bytes(checkpoint_record.sealed({key: value for key, value in state_of.items() if key != "seal"}))
    else:
        text.write_bytes((older / "state.json").read_bytes())
        monkeypatch.setattr(checkpoint_record, "CHECKPOINT_NAME", re.compile("never"))
    assert everything(module.read_checkpoint(path)) not in (written, None)
    monkeypatch.undo()
    assert module.read_checkpoint(path) is None


class Same:
    """A checksum that is the same for everything."""

    def update(self, content: bytes) -> None: ...

    def hexdigest(self) -> str:
        return "0"


def lie(path: Path, files: dict[str, bytes]) -> None:
    """Have the state of a checkpoint name other files (of this content), with matching checksums and seal."""
    body = json.loads((path / "state.json").read_bytes())
    del body["seal"]
    for name, content in files.items():
        body["sha256"][name] = hashlib.sha256(content).hexdigest()
        if not (path / name).exists():
            (path / name).write_bytes(content)
    (path / "state.json").write_bytes(checkpoint_record.sealed(body))


def part(count: int) -> bytes:
    return safetensors.torch.save({"x": torch.zeros(count)})


ADAPTER = "adapter.safetensors"


@pytest.mark.parametrize("name", ["../aside.safetensors", "aside.safetensors", "{}/aside.safetensors"])
def test_no_file_is_read_because_the_state_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    run_dir = RunDir(tmp_path / "run")
    older, path = write(run_dir, 3), write(run_dir, 6)
    name = name.format(tmp_path)
    lie(path, {name: part(3)})
    found, damaged = module.latest_valid(run_dir)
    assert damaged == [path] and found is not None and found.path == older
    monkeypatch.setattr(checkpoint_record, "FILE_OF", {**module.FILE_OF, "aside": name})
    assert module.read_checkpoint(path) is not None  # control: it is the name alone


@pytest.mark.skipif(sys.platform == "win32", reason="a device with a path")
def test_a_device_in_the_place_of_a_part_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(RunDir(tmp_path), 6)
    (path / ADAPTER).unlink()
    (path / ADAPTER).symlink_to("/dev/null")
    lie(path, {ADAPTER: b""})
    assert module.read_checkpoint(path) is None
    monkeypatch.setattr(
        checkpoint_record, "read_header", lambda file: None
    )  # it is not only that this one holds no tensors
    assert module.read_checkpoint(path) is None
    monkeypatch.setattr(checkpoint_record, "check_plain", lambda file, most: file.stat().st_size)
    assert module.read_checkpoint(path) is not None  # control


@pytest.mark.parametrize(("limit", "file"), [("MAX_PART_BYTES", ADAPTER), ("MAX_STATE_BYTES", "state.json")])
def test_what_is_larger_than_anything_written_here_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, file: str
) -> None:
    path = write(RunDir(tmp_path), 6)
    size = (path / file).stat().st_size
    others = max(other.stat().st_size for other in path.glob("*.safetensors"))
    monkeypatch.setattr(checkpoint_record, limit, max(size, others))
    assert module.read_checkpoint(path) is not None  # control
    monkeypatch.setattr(checkpoint_record, limit, size - 1)
    assert module.read_checkpoint(path) is None


def test_a_checkpoint_is_looked_at_piece_by_piece(tmp_path: Path) -> None:
    """The files may be larger than memory; where it is really loaded, there is as much of it as tensors need."""
    path, large = write(RunDir(tmp_path), 6), part(1 << 22)
    (path / ADAPTER).write_bytes(large)
    lie(path, {ADAPTER: large})
    assert peak_bytes(lambda: module.read_checkpoint(path)) < len(large) // 4
    found = module.read_checkpoint(path)
    assert found is not None
    assert peak_bytes(lambda: found.part_to_resume("adapter")) >= len(large)  # control: the measure sees such reads


def peak_bytes(call: Callable[[], object]) -> int:
    """Of what Python allocates in the call."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("content", [b"", b"no tensors", (1 << 40).to_bytes(8, "little") + b"{}", part(3) + b"x"])
def test_a_right_checksum_of_no_tensors_is_passed_over(tmp_path: Path, content: bytes) -> None:
    path = write(RunDir(tmp_path), 6)
    for wanted, written in ((False, content), (True, part(3))):  # the second: control
        (path / ADAPTER).write_bytes(written)
        lie(path, {ADAPTER: written})
        assert (module.read_checkpoint(path) is not None) == wanted


def test_a_part_that_changes_after_the_checks_is_not_used(tmp_path: Path) -> None:
    checkpoint = module.read_checkpoint(write(RunDir(tmp_path), 3))
    assert checkpoint is not None
    file = checkpoint.path / "adapter.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    with pytest.raises(StorageError, check=saying("train/changed-while-it-was-being-read")):
        checkpoint.part_to_resume("adapter")
    file.unlink()
    with pytest.raises(StorageError, check=saying("train/not-there-any-more")):
        checkpoint.part_to_resume("adapter")


def test_an_intact_checkpoint_is_not_passed_over(tmp_path: Path) -> None:
    """Negative control of the test above."""
    run_dir = RunDir(tmp_path)
    write(run_dir, 3)
    write(run_dir, 6)
    checkpoint, damaged = module.latest_valid(run_dir)
    assert checkpoint is not None and checkpoint.position.updates == 6 and damaged == []


def test_rotation_keeps_the_newest_whole_ones(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for updates in (1, 2, 3, 4):
        write(run_dir, updates)
    (run_dir.checkpoint(4) / "adapter.safetensors").write_bytes(b"")
    module.rotate_checkpoints(run_dir, keep_last=1)
    checkpoint, damaged = module.latest_valid(run_dir)
    assert checkpoint is not None and checkpoint.position.updates == 3 and damaged == [run_dir.checkpoint(4)]
    assert [updates for updates, _ in run_dir.list_checkpoints()] == [3, 4]


def test_rotation_of_lora_files_keeps_the_newest(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for updates in (2, 10, 6):
        run_dir.checkpoint_lora(updates).parent.mkdir(exist_ok=True)
        run_dir.checkpoint_lora(updates).touch()
        embeddings_of(run_dir.checkpoint_lora(updates)).mkdir()
    for keep, kept in ((None, [2, 6, 10]), (5, [2, 6, 10]), (2, [6, 10]), (1, [10])):
        module.rotate_loras(run_dir, keep)
        assert [updates for updates, _ in run_dir.checkpoint_loras()] == kept
        assert len(list(run_dir.checkpoints.glob("*-embeddings"))) == len(kept)


def test_an_old_checkpoint_that_is_in_use_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = RunDir(tmp_path)
    for updates in (1, 2, 3):
        write(run_dir, updates)

    def in_use(path: Path) -> None:
        raise PermissionError(errno.EACCES, "used by another process", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", in_use)
        module.rotate_checkpoints(run_dir, keep_last=1)
    assert [module.read_checkpoint(path) is not None for _, path in run_dir.list_checkpoints()] == [False, False, True]
    module.rotate_checkpoints(run_dir, keep_last=1)
    assert [updates for updates, _ in run_dir.list_checkpoints()] == [3]


def test_a_full_disk_loses_nothing_older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = RunDir(tmp_path)
    write(run_dir, 1)

    def full(path: Path, content: bytes) -> None:
        path.write_bytes(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_through", full)
        with pytest.raises(StorageError, check=saying("train/disk-is-full")):
            write(run_dir, 2)
    checkpoint, _ = module.latest_valid(run_dir)
    assert checkpoint is not None and checkpoint.position.updates == 1
    assert [path.name for path in run_dir.checkpoints.iterdir()] == ["step-00000001"]


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    path = write(run_dir, 1)
    (path / "adapter.safetensors").write_bytes(b"x")
    assert module.read_checkpoint(path) is None
    write(run_dir, 1)
    assert module.read_checkpoint(path) is not None


def test_no_file_is_a_pickle(tmp_path: Path) -> None:
    path = write(RunDir(tmp_path), 1)
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}
    parsed: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
    assert set(parsed) == {"position", "facts", "sha256", "seal"}
