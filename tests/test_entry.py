"""Ctrl+C before the commands are imported ends the program like any command."""

from __future__ import annotations

import importlib
import sys

import pytest

from lora_rocm import entry
from lora_rocm.errors import StoppedError


class Interrupting:
    """A finder of modules that is interrupted at the commands."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "lora_rocm.cli":
            raise KeyboardInterrupt


def test_an_interrupted_import_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "lora_rocm.cli", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    with pytest.raises(KeyboardInterrupt):
        importlib.import_module("lora_rocm.cli")  # the control
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == StoppedError.exit_code == entry.STOPPED
    assert len(capsys.readouterr().err.splitlines()) == 1
