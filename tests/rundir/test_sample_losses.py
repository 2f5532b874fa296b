"""The file with the loss of each sample: kills, resumes, full disks, hostile content."""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from lora_rocm.errors import StorageError
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.sample_losses import BLOCK, HEADER, LossWriter, read_losses
from tests.wording import says

NAMES = ("a.png", "ordner/ü.png", "b.png")


def written(path: Path, first: int, last: int, keep: int | None = None, said: list[str] | None = None) -> LossWriter:
    writer = LossWriter(path, first - 1 if keep is None else keep, (said if said is not None else []).append)
    writer.begin()
    for updates in range(first, last + 1):
        names = [NAMES[updates % 3], NAMES[(updates + 1) % 3]]
        writer.record(updates, names, [updates / 100, 0.5], [updates + 0.25, 2.0])
    return writer


def test_records_are_read_back(tmp_path: Path) -> None:
    file = tmp_path / "losses.rank0.bin"
    written(file, 1, 5).close()
    found = read_losses([file])
    assert set(found.names) == set(NAMES) and found.updates.tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert [found.names[index] for index in found.sample[:4]] == ["ordner/ü.png", "b.png", "b.png", "a.png"]
    assert found.loss[::2].tolist() == [1.25, 2.25, 3.25, 4.25, 5.25]
    assert found.position[::2] == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.05], abs=1e-5)


def test_a_step_takes_ten_bytes_per_sample_and_a_head(tmp_path: Path) -> None:
    file = tmp_path / "losses.rank0.bin"
    writer = written(file, 1, 3)
    before = file.stat().st_size
    writer.record(4, [NAMES[0]] * 4, [0.5] * 4, [1.0] * 4)
    writer.close()
    assert file.stat().st_size - before == 18 + 4 * 10


@pytest.mark.parametrize("cut", [1, 5, 17, 25, 38])
def test_a_torn_tail_is_skipped_and_a_resume_goes_on(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "losses.rank0.bin"
    written(file, 1, 6).close()
    os.truncate(file, file.stat().st_size - cut)
    assert read_losses([file]).updates[-1] in (4, 5)
    written(file, 6, 8, keep=5).close()
    assert sorted(set(read_losses([file]).updates.tolist()) | {5}) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_resume_cuts_off_repeated_steps_with_names_that_they_began(tmp_path: Path) -> None:
    file, straight = tmp_path / "losses.rank0.bin", tmp_path / "straight.bin"
    written(straight, 1, 6).close()
    written(file, 1, 5).close()
    for keep in (1, 4, 2):  # the third name begins in step 2
        written(file, keep + 1, 6).close()
        assert file.stat().st_size == straight.stat().st_size
        found, wanted = read_losses([file]), read_losses([straight])
        assert found.names == wanted.names and found.sample.tolist() == wanted.sample.tolist()
    written(file, 1, 1).close()
    assert set(read_losses([file]).updates.tolist()) == {1}


def test_rows_without_a_number_are_not_recorded(tmp_path: Path) -> None:
    file = tmp_path / "losses.rank0.bin"
    writer = written(file, 1, 0)
    writer.record(1, ["a", "b", "c"], [0.5, math.nan, 0.5], [1.0, 1.0, math.inf])
    writer.record(2, ["b"], [math.nan], [1.0])
    writer.close()
    writer.record(3, ["a"], [0.5], [1.0])
    found = read_losses([file])
    assert found.names == ("a",) and found.updates.tolist() == [1]


def test_a_full_disk_and_the_largest_size_end_the_recording_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    writer = LossWriter(tmp_path / "small.bin", 0, said.append, max_bytes=100)
    writer.begin()
    for updates in range(1, 9):
        writer.record(updates, ["a"], [0.5], [1.0])
    assert len(said) == 1 and 70 < (tmp_path / "small.bin").stat().st_size <= 100
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    full = written(tmp_path / "full.bin", 1, 1, said=said)
    assert full._file is not None
    full._file.close()
    full._file = open("/dev/full", "wb", buffering=0)
    full.record(2, ["a"], [0.5], [1.0])
    full.record(3, ["a"], [0.5], [1.0])
    assert len(said) == 2 and says(said[1], "rundir/losses-no-longer-recorded")


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"mine")
    try:
        os.symlink(tmp_path / "mine", tmp_path / "losses.rank0.bin")
    except OSError:
        pytest.skip("no right to make links")
    with pytest.raises(StorageError):
        written(tmp_path / "losses.rank0.bin", 1, 1)
    assert (tmp_path / "mine").read_bytes() == b"mine" and read_losses([tmp_path / "losses.rank0.bin"]).names == ()


def test_hostile_content_is_skipped(tmp_path: Path) -> None:
    import zlib

    file = tmp_path / "losses.rank0.bin"
    written(file, 1, 2).close()
    whole = file.read_bytes()

    def block(payload: bytes, updates: int = 3, size: int | None = None) -> bytes:
        checksum = zlib.crc32(payload, zlib.crc32(struct.pack("<Q", updates)))
        return BLOCK.pack(len(payload) if size is None else size, checksum, updates) + payload

    record = struct.pack("<IHf", 99, 1, 1.0)
    for tail in (
        block(b"\0\0" + record),  # a name that does not exist
        block(b"\0\0", size=2**32 - 1),
        block(b"\xff\xff"),
        block(b"\1\0\xff\xff"),
        block(b"\0\0" + record[:-1]),
        block(b"\0\0", updates=2**64 - 1),
        block(b""),
        os.urandom(200),
    ):
        file.write_bytes(whole + tail)
        assert set(read_losses([file]).updates.tolist()) == {1, 2}
    for content in (b"", HEADER[:-1], b"x" * 100, HEADER):
        file.write_bytes(content)
        assert len(read_losses([file, tmp_path / "none.bin"]).loss) == 0


@pytest.mark.parametrize(("content", "is_kept"), [(b"LORAROCM-LOSS-2\nmore", True), (b"", False), (HEADER[:5], False)])
def test_a_file_of_another_version_is_left_as_it_is(tmp_path: Path, content: bytes, is_kept: bool) -> None:
    file, said = tmp_path / "losses.bin", list[str]()
    file.write_bytes(content)
    writer = LossWriter(file, 0, said.append)
    writer.begin()
    writer.record(1, ["a.png"], [0.5], [1.0])
    writer.close()
    assert (file.read_bytes() == content) == is_kept == bool(said)
    assert len(read_losses([file]).loss) == (0 if is_kept else 1)


def test_the_files_of_all_ranks_are_one(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for rank in (0, 1):
        written(run_dir.losses(rank), 1, 2).close()
    found = read_losses(run_dir.all_losses())
    assert len(found.loss) == 8 and len(found.names) == 3
    assert np.bincount(found.sample).sum() == 8


@pytest.mark.parametrize(
    ("damaged", "keep", "lost"),
    [(3, 6, "3 to 6"), (1, 6, "1 to 6"), (6, 6, "6 to 6"), (7, 6, ""), (None, 6, ""), (3, 2, "")],
    ids=["in the middle", "the first", "the last", "a step that is repeated", "none", "after the resume"],
)
def test_a_resume_names_the_steps_that_a_damaged_block_costs(
    tmp_path: Path, damaged: int | None, keep: int, lost: str
) -> None:
    file, said = tmp_path / "losses.rank0.bin", list[str]()
    ends = []
    writer = written(file, 1, 0)
    for updates in range(1, 9):
        ends.append(file.stat().st_size)
        writer.record(updates, NAMES, [0.5] * 3, [1.0] * 3)
    writer.close()
    if damaged is not None:
        content = bytearray(file.read_bytes())
        content[ends[damaged - 1] + BLOCK.size + 3] ^= 1
        file.write_bytes(content)
    found = read_losses([file])
    assert bool(found.lost_after(7)) == (damaged is not None)
    written(file, keep + 1, keep + 1, said=said).close()
    assert len(said) == bool(lost) and (not said or f" {lost} " in said[0])
    assert read_losses([file]).ends == {} and read_losses([file]).updates.max() == keep + 1


def test_a_torn_end_is_not_mentioned(tmp_path: Path) -> None:
    file, said = tmp_path / "losses.rank0.bin", list[str]()
    written(file, 1, 6).close()
    os.truncate(file, file.stat().st_size - 5)
    found = read_losses([file])
    assert found.ends == {file: 5} and found.lost_after(5) == [] and len(found.lost_after(6)) == 1
    written(file, 5, 6, said=said).close()
    assert said == []
