"""A line is run again only if Wine did not start what is there. No Wine is needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.windows.stage import Stage, windows_path


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    (tmp_path / "recorder.exe").touch()
    root = tmp_path / "checkout"
    root.mkdir()
    return Stage(root, {"TMPDIR": str(tmp_path)})


def unknown(program: str) -> str:
    return f"Can't recognize '\"Z:\\tmp\\checkout\\.venv\\Scripts\\{program}\"' as an internal or external command."


@pytest.mark.parametrize(
    ("code", "said", "programs", "is_busy"),
    [
        (1, "", None, True),
        (250, "", None, False),
        (0, "", ("py", "launch"), False),
        (0, "", ("python", "launch"), True),
        (0, "", ("py", "python", "launch"), False),
        (0, unknown("lora-rocm.exe"), ("launch",), True),
        (0, unknown("other.exe"), ("launch",), False),
    ],
)
def test_a_busy_wine_is_told_from_a_wrong_line(
    code: int, said: str, programs: tuple[str, ...] | None, is_busy: bool, stage: Stage, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    if programs is not None:
        calls = [{"program": name, "path": windows_path(stage.bin / f"{name}.exe")} for name in programs]
        log.write_text("\n".join(map(json.dumps, calls)), encoding="utf-8")
    assert stage.is_busy(code, said, log) is is_busy


def test_a_python_that_is_not_there_is_not_passed_over(stage: Stage, tmp_path: Path) -> None:
    (stage.bin / "py.exe").unlink()
    (tmp_path / "log").write_text(
        json.dumps({"program": "python", "path": windows_path(stage.bin / "python.exe")}), encoding="utf-8"
    )
    assert not stage.is_busy(0, "", tmp_path / "log")
