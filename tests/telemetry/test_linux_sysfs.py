"""AMD GPUs on Linux, read from a folder in the place of the root."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.rundir.event_types import TelemetryEvent
from lora_rocm.telemetry.linux_sysfs import SysfsReader
from lora_rocm.telemetry.reader import ABSENT, CARD, MEMORY, OWN_MEMORY, POWER, POWER_CAP, TEMPERATURE, faults
from tests.telemetry.trees import HALO, TRAINER, XTX, write_tree

KIB = 1 << 10
ALL = ("temperatures_c", "limits_c", "power_w", "memory_bytes", "own_bytes", "main_bytes", "moved_bytes")


def read(root: Path, address: str = XTX, pids: tuple[int, ...] = (TRAINER,)) -> TelemetryEvent:
    (found,) = SysfsReader(root, (address,), lambda: pids).read()
    return found


def failing(monkeypatch: pytest.MonkeyPatch, code: int, which: Callable[[str], bool]) -> list[str]:
    """Opening these files fails with an error of the system, also where the tests run as root. Returns all opened."""
    opened, real = list[str](), Path.open

    def open_path(path: Path, *arguments: Any, **options: Any) -> Any:
        opened.append(path.as_posix())
        if which(path.as_posix()):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", open_path)
    return opened


def test_all_that_a_discrete_card_offers(tmp_path: Path) -> None:
    write_tree(tmp_path)
    found = read(tmp_path)
    assert found.temperatures_c == {"edge": 61.0, "junction": 84.0, "mem": 78.0}
    assert found.limits_c == {"edge": 100.0, "junction": 110.0, "mem": 108.0}
    assert (found.power_w, found.power_cap_w) == (303.0, 339.0)
    assert (found.memory_bytes, found.memory_total_bytes) == (18253611008, 25753026560)
    assert found.main_bytes == 268435456 and not found.unread and not found.asleep
    # one client has two files; another is on the second GPU; a third has the keys of an old kernel; pid 999 is not ours
    assert found.own_bytes == (16800000 + 2048) * KIB and found.own_main_bytes == (67140 + 1024) * KIB
    assert found.moved_bytes == 0


def test_what_an_apu_does_not_offer_is_absent_and_no_fault(tmp_path: Path) -> None:
    write_tree(tmp_path, "strix-halo")
    found = read(tmp_path, HALO)
    assert found.temperatures_c == {"edge": 71.0} and found.limits_c == {} and found.power_w == pytest.approx(118.034)
    assert found.power_cap_w is None and found.own_bytes is None and found.moved_bytes is None
    assert found.unread == {POWER_CAP: ABSENT, OWN_MEMORY: ABSENT} and list(faults(found)) == []


def test_moved_memory_is_that_of_the_driver(tmp_path: Path) -> None:
    write_tree(tmp_path)
    path = tmp_path / "proc" / str(TRAINER) / "fdinfo" / "17"
    text = path.read_text(encoding="utf-8").replace("amd-evicted-vram:\t0 KiB", "amd-evicted-vram:\t59648 KiB")
    for name in ("17", "18"):
        path.with_name(name).write_text(text, encoding="utf-8")
    assert read(tmp_path).moved_bytes == 59648 * KIB


@pytest.mark.parametrize("status", ["suspended", "suspending", "resuming"])
def test_a_card_that_sleeps_is_not_woken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    write_tree(tmp_path, changes={"power/runtime_status": f"{status}\n"})
    opened = failing(monkeypatch, errno.EIO, lambda path: not path.endswith("power/runtime_status"))
    listed, real = list[str](), os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: (listed.append(str(path)), real(path))[1])
    found = read(tmp_path)
    assert found.asleep and not found.unread and all(not getattr(found, name) for name in ALL)
    assert [Path(path).name for path in opened] == ["runtime_status"] and listed == []


def test_a_card_that_is_awake_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tree(tmp_path)
    opened = failing(monkeypatch, errno.EIO, lambda path: False)
    assert not read(tmp_path).asleep
    assert opened[0].endswith("power/runtime_status"), "before any file that would wake it"
    assert not [path for path in opened if path.endswith("gpu_busy_percent")]


def test_without_power_management_it_is_read(tmp_path: Path) -> None:
    write_tree(tmp_path, changes={"power/runtime_status": None, "power/control": "on\n"})
    assert read(tmp_path).power_w == 303.0


@pytest.mark.parametrize(
    ("part", "what"),
    [("temp2_input", TEMPERATURE), ("power1_average", POWER), ("power1_cap", POWER_CAP), ("vram_used", MEMORY)],
)
def test_one_forbidden_file_takes_nothing_else_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, what: str
) -> None:
    write_tree(tmp_path)
    failing(monkeypatch, errno.EACCES, lambda path: path.endswith(part))
    found = read(tmp_path)
    assert dict(faults(found)) == {what: "permission denied"}
    assert found.own_bytes and found.temperatures_c["edge"] == 61.0 and (what == MEMORY or found.memory_bytes)


def test_forbidden_memory_of_processes_is_one_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tree(tmp_path)
    failing(monkeypatch, errno.EACCES, lambda path: "/fdinfo/" in path)
    assert dict(faults(read(tmp_path))) == {OWN_MEMORY: "permission denied"}


def test_whether_it_sleeps_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tree(tmp_path)
    opened = failing(monkeypatch, errno.EACCES, lambda path: path.endswith("runtime_status"))
    assert dict(faults(read(tmp_path))) == {CARD: "permission denied"} and len(opened) == 1


def test_a_card_that_has_gone_and_one_that_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = write_tree(tmp_path)
    reader = SysfsReader(tmp_path, (XTX,), lambda: (TRAINER,))
    with monkeypatch.context() as patch:
        failing(patch, errno.ENODEV, lambda path: "/sys/" in path and "runtime_status" not in path)
        (lost,) = reader.read()
        assert {why for _, why in faults(lost)} == {"no such device"} and lost.own_bytes
    shutil.rmtree(device)
    (gone,) = reader.read()
    assert list(dict(faults(gone))) == [CARD]
    write_tree(tmp_path)
    assert reader.read()[0].power_w == 303.0


def test_processes_that_ended_and_nonsense_in_files_are_got_over(tmp_path: Path) -> None:
    write_tree(tmp_path, changes={"mem_info_vram_used": "much\n", "hwmon/hwmon4/temp3_crit": "\n"})
    found = read(tmp_path, pids=(TRAINER, 77777))
    assert found.memory_bytes is None and list(dict(faults(found))) == [MEMORY, TEMPERATURE]
    assert found.own_bytes and found.temperatures_c["mem"] == 78.0 and "mem" not in found.limits_c
