"""Writing whole files, reading them back, and the behaviour where a link is in the path."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lora_rocm.errors import StorageError, UserError
from lora_rocm.foundation import files
from lora_rocm.foundation.files import (
    followed,
    holds,
    is_folder,
    is_link,
    make_folder,
    open_in_place,
    remove,
    require_place,
    write_atomic,
    write_json,
    write_new,
)
from tests.wording import saying

SYMLINK, JUNCTION, CLOUD_FILE = 0xA000000C, 0xA0000003, 0x9000001A  # reparse tags of Windows


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Somebody else's folder, next to the one that is written to."""
    folder = tmp_path / "outside"
    (folder / "sub").mkdir(parents=True)
    (folder / "file").write_bytes(b"theirs")
    (folder / "sub" / "file").write_bytes(b"theirs")
    return folder


@pytest.fixture
def ours(tmp_path: Path, outside: Path) -> Path:
    folder = tmp_path / "größe x"
    folder.mkdir()
    try:
        (folder / "probe").symlink_to(outside)
    except OSError:
        pytest.skip("no links may be made here")
    (folder / "probe").unlink()
    return folder


def untouched(outside: Path) -> bool:
    found = {path.relative_to(outside).as_posix(): path for path in outside.rglob("*")}
    return sorted(found) == ["file", "sub", "sub/file"] and all(
        path.read_bytes() == b"theirs" for path in found.values() if path.is_file()
    )


def test_a_place_that_no_file_can_be_written_at_is_named_with_its_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for good in (tmp_path / "new" / "x ü.json", tmp_path / "file", tmp_path / "x"):
        require_place(good, "--json")
    for bad in (tmp_path, tmp_path / "file" / "x.json", tmp_path / "file" / "a" / "b"):
        with pytest.raises(UserError, match="folder") as caught:
            require_place(bad, "--json")
        assert caught.value.where == f"--json {bad}" and caught.value.fix


# links


@pytest.mark.parametrize(
    ("mode", "tag", "link"),
    [
        (stat.S_IFREG, 0, False),
        (stat.S_IFDIR, 0, False),
        (stat.S_IFLNK, SYMLINK, True),
        (stat.S_IFDIR, JUNCTION, True),
        (stat.S_IFREG, CLOUD_FILE, False),
    ],
    ids=["file", "folder", "symbolic link", "junction", "file of OneDrive"],
)
def test_links_of_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, tag: int, link: bool) -> None:
    """The result of ``os.lstat`` on Windows: a junction is a folder for Python 3.11's ``Path.is_symlink``."""
    (tmp_path / "x").mkdir()
    real = os.lstat
    found = SimpleNamespace(st_mode=mode | 0o777, st_reparse_tag=tag)
    monkeypatch.setattr(os, "lstat", lambda path: found if Path(path).name == "x" else real(path))
    assert is_link(tmp_path / "x") is link and is_folder(tmp_path / "x") is not link


def test_links_here(ours: Path, outside: Path) -> None:
    (ours / "to folder").symlink_to(outside)
    (ours / "to nothing").symlink_to(outside / "nothing")
    assert is_link(ours / "to folder") and is_link(ours / "to nothing") and not is_folder(ours / "to folder")
    assert not is_link(ours) and not is_link(outside / "file") and not is_link(ours / "nothing") and is_folder(ours)
    assert not is_link(ours / "to folder" / "file")  # only the name itself


# writing whole files


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    file = tmp_path / "Zoë K" / "a.json"
    write_json(file, {"ü": 1})
    for content in (b"", b"new", b"x" * (files.PIECE_BYTES + 1)):
        write_atomic(file, content)
        assert file.read_bytes() == content and holds(file, content)
    assert os.listdir(file.parent) == ["a.json"]


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_where_it_cannot_be_written_the_old_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    file = tmp_path / "a.json"
    write_atomic(file, b"old")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, broken, full)
    with pytest.raises(StorageError, check=saying("foundation/disk-is-full")) as caught:
        write_atomic(file, b"new")
    assert caught.value.code == "disk-full"
    assert file.read_bytes() == b"old" and os.listdir(tmp_path) == ["a.json"]


def test_nothing_is_made_where_a_drive_has_gone(tmp_path: Path) -> None:
    run = tmp_path / "drive" / "run"
    run.mkdir(parents=True)
    write_atomic(run / "a" / "b" / "c", b"new", run)
    assert (run / "a" / "b" / "c").read_bytes() == b"new"
    run.parent.rename(tmp_path / "away")
    run.parent.mkdir()  # an empty place where the drive was mounted
    for path in (run / "d", run / "a" / "b" / "c"):
        with pytest.raises(StorageError, check=saying("foundation/not-there-any-more")):
            write_atomic(path, b"new", run)
    assert os.listdir(run.parent) == []
    write_atomic(run / "a" / "d", b"new")  # negative control: made wherever it is asked for
    assert (run / "a" / "d").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such files")
@pytest.mark.timeout(20)
def test_a_pipe_or_device_is_not_replaced_by_a_file_nor_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for write in (lambda: write_atomic(pipe, b"x"), lambda: open_in_place(pipe)):
        with pytest.raises(StorageError) as caught:
            write()
        assert caught.value.code == "no-file" and pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_name_that_is_empty_is_said() -> None:
    with pytest.raises(StorageError):
        write_atomic(Path(""), b"x")


# reading back


def flipping(monkeypatch: pytest.MonkeyPatch, times: int) -> list[Path]:
    """A disk that flips one bit of the file just renamed, for a number of times."""
    flipped: list[Path] = []
    real = os.replace

    def replace(source: Any, target: Any) -> None:
        real(source, target)
        if len(flipped) < times:
            flipped.append(Path(target))
            content = bytearray(Path(target).read_bytes())
            content[len(content) // 2] ^= 1
            Path(target).write_bytes(content)

    monkeypatch.setattr(os, "replace", replace)
    return flipped


@pytest.mark.parametrize("times", [1, 2])
def test_what_reads_back_otherwise_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    flipped = flipping(monkeypatch, times)
    write_atomic(tmp_path / "a", b"meant")
    assert len(flipped) == times and (tmp_path / "a").read_bytes() == b"meant"
    assert os.listdir(tmp_path) == ["a"]


def test_a_file_that_never_reads_back_is_removed_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flipped = flipping(monkeypatch, 99)
    with pytest.raises(StorageError) as caught:
        write_atomic(tmp_path / "a", b"meant")
    assert caught.value.code == "written-differs" and str(tmp_path / "a") in caught.value.where and caught.value.fix
    assert len(flipped) == files.WRITE_ATTEMPTS and os.listdir(tmp_path) == []
    write_atomic(tmp_path / "b", b"meant", read_back=False)  # negative control: nobody looks
    assert (tmp_path / "b").read_bytes() != b"meant"


@pytest.mark.parametrize("there", [b"mean", b"meant+", b"Meant", None])
def test_a_file_that_differs_is_seen(tmp_path: Path, there: bytes | None) -> None:
    if there is not None:
        (tmp_path / "a").write_bytes(there)
    assert not holds(tmp_path / "a", b"meant")


# links in the way


def test_a_link_in_place_of_a_file_is_replaced(ours: Path, outside: Path) -> None:
    for name, target in (("a", outside / "file"), ("b", outside / "new"), ("c", outside)):
        (ours / name).symlink_to(target)
        write_atomic(ours / name, b"ours", ours)
        assert not is_link(ours / name) and (ours / name).read_bytes() == b"ours"
    assert untouched(outside)


def test_a_file_that_the_user_names_by_a_link_is_written(ours: Path, outside: Path) -> None:
    (ours / "mine").symlink_to(outside / "file")
    write_atomic(followed(ours / "mine"), b"new")
    assert is_link(ours / "mine") and (outside / "file").read_bytes() == b"new"
    assert followed(ours / "plain") == ours / "plain"


@pytest.mark.parametrize("depth", ["linked/a", "linked/sub/a", "sub/linked/a"])
def test_no_folder_below_the_root_is_entered_through_a_link(ours: Path, outside: Path, depth: str) -> None:
    (ours / "sub").mkdir()
    link = ours / depth[: depth.index("linked") + len("linked")]
    link.symlink_to(outside)
    for act in (lambda: write_atomic(ours / depth, b"ours", ours), lambda: make_folder(ours / depth, ours)):
        with pytest.raises(StorageError) as caught:
            act()
        assert caught.value.code == "link-refused" and str(link) in caught.value.where
        assert str(outside) in caught.value.where
    assert untouched(outside)
    assert link.exists()
    write_atomic(ours / depth, b"ours")  # negative control: without a root folders are followed
    assert not untouched(outside)


def test_the_root_itself_may_be_a_link(ours: Path, outside: Path) -> None:
    (ours / "run").symlink_to(outside)
    write_atomic(ours / "run" / "deep" / "a", b"ours", ours / "run")
    assert (outside / "deep" / "a").read_bytes() == b"ours"


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("target", ["file", "new", "sub"])
def test_what_is_written_in_place_is_not_written_through_a_link(
    ours: Path, outside: Path, target: str, anew: bool
) -> None:
    (ours / "log").symlink_to(outside / target)
    with pytest.raises(StorageError) as caught:
        open_in_place(ours / "log", again=anew)
    assert caught.value.code == "link-refused" and untouched(outside)
    for content in (b"x", b"y"):  # negative control
        with open_in_place(ours / "other", again=anew) as file:
            file.write(content)
    assert (ours / "other").read_bytes() == (b"y" if anew else b"xy")


def test_a_link_that_comes_between_the_look_and_the_opening(
    ours: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(os, "O_NOFOLLOW"):
        pytest.skip("Windows opens no file without following links")
    (ours / "log").symlink_to(outside / "file")
    monkeypatch.setattr(files, "refuse_link", lambda path: None)
    with pytest.raises(StorageError):
        open_in_place(ours / "log", again=True)
    assert untouched(outside)


def test_a_link_is_removed_and_not_what_it_leads_to(ours: Path, outside: Path) -> None:
    (ours / "deep").mkdir()
    (ours / "to file").symlink_to(outside / "file")
    (ours / "to folder").symlink_to(outside)
    (ours / "deep" / "to folder").symlink_to(outside)
    (ours / "to nothing").symlink_to(outside / "nothing")
    for path in (ours / "to file", ours / "to folder", ours / "to nothing", ours / "deep", ours / "never was"):
        remove(path)
    assert os.listdir(ours) == [] and untouched(outside)


def test_a_new_file_replaces_nothing(ours: Path, outside: Path) -> None:
    write_new(ours / "deep" / "ä", b"ours")
    assert (ours / "deep" / "ä").read_bytes() == b"ours"
    (ours / "link").symlink_to(outside / "new")
    for taken in (ours / "deep" / "ä", ours / "deep", ours / "link"):
        with pytest.raises(UserError) as caught:
            write_new(taken, b"other")
        assert caught.value.code == "file-exists" and caught.value.where == str(taken)
    assert (ours / "deep" / "ä").read_bytes() == b"ours" and untouched(outside)
    with pytest.raises(StorageError):
        write_new(ours / "deep" / "ä" / "below a file", b"ours")


def test_an_incomplete_new_file_is_removed(ours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        path.write_bytes(content[:1])
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(files, "write_through", full)
    with pytest.raises(StorageError) as caught:
        write_new(ours / "a", b"ours")
    assert caught.value.code == "disk-full" and not (ours / "a").exists()
