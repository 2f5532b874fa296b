"""No process leaves while the GPU works: after an error, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lora_rocm.device.failure import settle
from lora_rocm.train import tools, worker


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU in use; each wait for it."""
    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: found.append("waited"))
    return found


def test_a_gpu_in_use_is_waited_for(waits: list[str]) -> None:
    settle()
    assert waits == ["waited"]


def test_a_gpu_that_nobody_used_is_left_alone(waits: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    settle()
    assert waits == []


def test_a_lost_gpu_is_no_second_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise RuntimeError("HIP error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    settle()


def test_a_worker_that_fails_waits(waits: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(worker, "Session", full)
    assert worker.main([str(tmp_path)]) != 0
    assert waits == ["waited"]


def test_a_tool_that_fails_waits(waits: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["tools", "sample", str(tmp_path / "missing.json")])
    assert tools.main() != 0
    assert waits == ["waited"]


def test_a_tool_that_is_done_waits(waits: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tmp_path / "job.json"
    job.write_text("{}", encoding="utf-8")
    monkeypatch.setitem(tools.TOOLS, "sample", lambda asked: None)
    monkeypatch.setattr("sys.argv", ["tools", "sample", str(job)])
    assert tools.main() == 0 and waits == ["waited"]
