"""The number of threads and processes follows the cores that a process may use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from lora_rocm.hardware.probe.sources import Sources
from lora_rocm.processes import cores
from lora_rocm.processes.cores import core_count

PACKAGE = Path(cores.__file__).parents[1]


def machine(folder: Path, limit: str | None, cpu_count: int = 16) -> Sources:
    if limit is not None:
        path = folder / "sys" / "fs" / "cgroup" / "cpu.max"
        path.parent.mkdir(parents=True)
        path.write_text(limit, encoding="utf-8")
    return Sources("linux", root=folder, cpu_count=cpu_count)


@pytest.mark.parametrize(
    ("limit", "count"),
    [
        (None, 16),
        ("max 100000\n", 16),
        ("200000 100000\n", 2),
        ("250000 100000\n", 3),
        ("1000 100000\n", 1),
        ("6400000 100000\n", 16),
        ("0 100000\n", 1),
        ("200000 0\n", 16),
        ("damaged", 16),
    ],
)
def test_a_container_s_limit_counts(
    limit: str | None, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "_allowed", lambda: 16)
    assert core_count(machine(tmp_path, limit)) == count


def test_another_system_has_no_such_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_allowed", lambda: 16)
    machine(tmp_path, "200000 100000")
    assert core_count(Sources("windows", root=tmp_path, cpu_count=16)) == 16


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux sets the mask of a process")
def test_the_affinity_of_a_process_counts() -> None:
    program = (
        "import os, psutil; from lora_rocm.processes.cores import core_count\n"
        "psutil.Process().cpu_affinity(psutil.Process().cpu_affinity()[:1]); print(core_count())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "1\n"


def test_a_system_without_masks_counts_its_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(self: object) -> list[int]:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "cpu_affinity", refused)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert core_count(machine(tmp_path, None)) == 7


def test_nothing_else_counts_cores() -> None:
    """``os.cpu_count`` is a fact of the machine, not the number of threads to start."""
    found = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if "os.cpu_count" in path.read_text(encoding="utf-8")
    ]
    assert sorted(found) == ["hardware/probe/sources.py", "processes/cores.py", "rules/environment.py"]
