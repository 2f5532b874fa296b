"""The heartbeat is read as it was written, also over a longer older one, and a torn file is not a heartbeat."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lora_rocm.errors import StorageError
from lora_rocm.rundir.heartbeat import MAX_BYTES, WIDTH_BYTES, Heartbeat, HeartbeatWriter, read_heartbeat


def test_each_beat_replaces_the_one_before(tmp_path: Path) -> None:
    writer = HeartbeatWriter(tmp_path / "beat.json")
    for count, activity in enumerate(("loader", "a much longer activity", "step"), 1):
        writer.beat(activity)
        assert read_heartbeat(tmp_path / "beat.json") == Heartbeat(os.getpid(), count, activity)
        assert (tmp_path / "beat.json").stat().st_size == WIDTH_BYTES
    writer.close()


@pytest.mark.parametrize(
    "content", [b"", b'{"pid": 1, "cou', b"[]", b"null", b'{"pid": "x", "count": 1, "activity": 1}']
)
def test_a_torn_or_strange_file_is_no_heartbeat(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "beat.json").write_bytes(content)
    assert read_heartbeat(tmp_path / "beat.json") is None
    assert read_heartbeat(tmp_path / "missing.json") is None


@pytest.mark.timeout(20)
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "beat.json")
    assert read_heartbeat(tmp_path / "beat.json") is None


def test_a_file_is_not_read_beyond_what_a_heartbeat_can_be(tmp_path: Path) -> None:
    record = b'{"pid": 1, "count": 2, "activity": "step"}'
    for size, found in ((MAX_BYTES, Heartbeat(1, 2, "step")), (MAX_BYTES + 1, None)):
        (tmp_path / "beat.json").write_bytes(record.ljust(size))
        assert read_heartbeat(tmp_path / "beat.json") == found


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        HeartbeatWriter(tmp_path / "missing" / "beat.json")
