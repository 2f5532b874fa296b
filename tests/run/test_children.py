"""Children that say JSON, report errors, or die."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.errors import UserError, WorkerDiedError
from lora_rocm.run.children import run_for_json, run_tool


def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> str:
    (tmp_path / "child_module.py").write_text(source, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "child_module"


def test_run_tool_hands_on_events_and_skips_chatter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = module(tmp_path, monkeypatch, 'import sys\nprint(\'hello\')\nprint(\'{"type": "notice", "text": "ü"}\')')
    events: list[dict[str, Any]] = []
    assert run_tool(name, ["a"], {**os.environ, "PYTHONUTF8": "1"}, events.append) == 0
    (event,) = events
    assert (event["type"], event["text"]) == ("notice", "ü")


ERROR = '{"type": "error", "code": "c", "what": "no such LoRA", "where": "w", "fix": "f", "exit_code": 2}'


def test_children_that_report_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = module(tmp_path, monkeypatch, f"import sys\nprint('''{ERROR}''')\nsys.exit(2)")
    with pytest.raises(UserError, match="no such LoRA"):
        run_tool(name, [], os.environ, lambda event: None)
    with pytest.raises(UserError, match="no such LoRA"):
        run_for_json(name, [], os.environ)


def test_children_that_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = module(tmp_path, monkeypatch, "raise RuntimeError('broken')")
    for run_it in (
        lambda: run_tool(name, [], os.environ, lambda event: None),
        lambda: run_for_json(name, [], os.environ),
    ):
        with pytest.raises(WorkerDiedError, match="RuntimeError: broken") as caught:
            run_it()
        assert "Traceback" not in str(caught.value) and name in str(caught.value)


def test_run_for_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_for_json(module(tmp_path, monkeypatch, "print('x')\nprint('{\"unet\": 3}')"), [], os.environ) == {
        "unet": 3
    }
    text = "import sys\nprint('wrong model', file=sys.stderr)\nsys.exit(2)"
    with pytest.raises(UserError, match="wrong model"):
        run_for_json(module(tmp_path, monkeypatch, text), [], os.environ)
