"""The main memory that a process can still take is limited by its container."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from lora_rocm.device.main_memory import free_main_bytes
from lora_rocm.hardware.facts import System
from lora_rocm.hardware.probe.sources import Sources
from tests.hardware.fake_machine import put

GIB = 2**30


@pytest.mark.parametrize(
    ("system", "limit", "free"),
    [("linux", f"{8 * GIB}", 5), ("linux", "max", 64), ("linux", f"{500 * GIB}", 64), ("windows", f"{8 * GIB}", 64)],
    ids=["container", "no limit", "limit above the machine", "not Linux"],
)
def test_a_container_leaves_less_memory_than_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: System, limit: str, free: int
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * GIB))
    put(tmp_path, "/sys/fs/cgroup/memory.max", f"{limit}\n")
    put(tmp_path, "/sys/fs/cgroup/memory.current", f"{4 * GIB}\n")
    put(tmp_path, "/sys/fs/cgroup/memory.stat", f"inactive_file {GIB}\n")
    assert free_main_bytes(Sources(system, root=tmp_path)) == free * GIB
