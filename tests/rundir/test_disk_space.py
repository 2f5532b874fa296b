"""Free space, asked for before it is needed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lora_rocm.errors import StorageError
from lora_rocm.rundir.disk_space import RESERVE_BYTES, free_bytes, require, shortage
from tests.wording import says


def test_free_bytes_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    here, later = free_bytes(tmp_path), free_bytes(tmp_path / "größe x" / "later")
    assert here is not None and later is not None and abs(here - later) < 1 << 30 and here > 0


def test_a_drive_that_tells_nothing_is_not_taken_for_a_full_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("lora_rocm.rundir.disk_space.shutil.disk_usage", lambda path: usage._replace(total=0, free=0))
    assert free_bytes(tmp_path) is None and shortage(tmp_path, 1 << 60, "x") == ""
    require(tmp_path, 1 << 60, "x", "y")


def test_what_does_not_fit_is_refused_with_figures(tmp_path: Path) -> None:
    def free(path: Path) -> int:
        return RESERVE_BYTES + 2048

    require(tmp_path, 2048, "a file", "Free some.", free)
    assert shortage(tmp_path, 2048, "two files", free) == ""
    with pytest.raises(StorageError) as caught:
        require(tmp_path, 2049, "a file", "Free some.", free)
    error = caught.value
    assert error.code == "disk-low" and error.where == str(tmp_path) and error.fix == "Free some."
    assert "2.0 KiB needed, 1.0 MiB free" in error.what
    assert says(shortage(tmp_path, 4096, "two files", free), "rundir/two-files-need-about-4-0-kib")
