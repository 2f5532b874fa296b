"""Changes of files: complete or not at all, against the version that was read, and undoable."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from lora_rocm.errors import StorageError, UserError
from lora_rocm.foundation import files
from lora_rocm.ui.edits import MAX_UNDOS, MISSING, EditConflict, Edits, version_of


def test_a_change_needs_the_version_that_was_read(tmp_path: Path) -> None:
    edits, path = Edits(), tmp_path / "ä caption.txt"
    first = edits.save(path, b"one", MISSING)
    assert path.read_bytes() == b"one" and edits.read(path) == (b"one", first.version)
    with pytest.raises(EditConflict) as raised:
        edits.save(path, b"two", MISSING)
    conflict = raised.value
    assert (conflict.mine, conflict.theirs, conflict.version) == (b"two", b"one", first.version)
    assert path.read_bytes() == b"one" and conflict.code == "edit-conflict"
    path.write_bytes(b"by hand")  # an editor next to the page
    with pytest.raises(EditConflict):
        edits.save(path, b"two", first.version)
    path.unlink()
    with pytest.raises(EditConflict) as raised:
        edits.save(path, b"two", first.version)
    assert raised.value.theirs is None


def test_a_change_that_is_sent_twice_does_not_conflict_with_itself(tmp_path: Path) -> None:
    edits, path = Edits(), tmp_path / "a.txt"
    first = edits.save(path, b"one", MISSING)
    second = edits.save(path, b"two", first.version)
    again = edits.save(path, b"two", first.version)  # the second click of a double click
    assert again.version == second.version and not again.undo
    assert edits.undo(path).version == first.version and path.read_bytes() == b"one"
    with pytest.raises(EditConflict):  # the control
        edits.save(path, b"two", MISSING)


def test_changes_are_undone_one_after_another(tmp_path: Path) -> None:
    edits, path = Edits(), tmp_path / "a.txt"
    version = MISSING
    for content in (b"one", b"two", None):
        version = edits.save(path, content, version).version
    assert not path.exists()
    for content in (b"two", b"one"):
        assert edits.can_undo(path)
        assert edits.undo(path).version == version_of(content) and path.read_bytes() == content
    assert edits.undo(path).version == MISSING and not path.exists()
    with pytest.raises(UserError) as raised:
        edits.undo(path)
    assert raised.value.code == "nothing-to-undo"


def test_a_change_by_hand_is_not_undone(tmp_path: Path) -> None:
    edits, path = Edits(), tmp_path / "a.txt"
    edits.save(path, b"one", MISSING)
    path.write_bytes(b"by hand")
    with pytest.raises(EditConflict):
        edits.undo(path)
    assert path.read_bytes() == b"by hand"


def test_a_full_disk_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edits, path = Edits(), tmp_path / "a.txt"
    version = edits.save(path, b"one", MISSING).version
    write = files.write_through

    def full(target: Path, content: bytes) -> None:
        if target.name.startswith(".a.txt"):
            target.write_bytes(content[:1])
            raise OSError(errno.ENOSPC, "full")
        write(target, content)

    monkeypatch.setattr(files, "write_through", full)
    with pytest.raises(StorageError):
        edits.save(path, b"two", version)
    assert path.read_bytes() == b"one" and [each.name for each in tmp_path.iterdir()] == ["a.txt"]


def test_of_two_changes_at_once_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    version = Edits().save(path, b"start", MISSING).version
    begin, outcomes = threading.Barrier(8), []

    def change(number: int) -> None:
        edits = Edits()  # each with its own locks, like another server's
        begin.wait()
        try:
            edits.save(path, b"%d" % number, version)
            outcomes.append(b"%d" % number)
        except EditConflict:
            outcomes.append(b"")

    threads = [threading.Thread(target=change, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 8 and [each for each in outcomes if each] == [path.read_bytes()]


def test_old_changes_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_rocm.ui.edits.MAX_UNDOS", 3)
    edits, path, version = Edits(), tmp_path / "a.txt", MISSING
    for number in range(6):
        version = edits.save(path, b"%d" % number, version).version
    for _ in range(3):
        edits.undo(path)
    assert path.read_bytes() == b"2" and not edits.can_undo(path) and MAX_UNDOS > 3
