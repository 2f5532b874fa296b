"""Common behaviour of all child processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lora_rocm.errors import LoraRocmError, MachineError, UserError
from lora_rocm.processes.process import error_from_event, kill_tree, own_group
from lora_rocm.rundir.event_types import ErrorEvent


def test_on_windows_a_child_has_a_console_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is attached to the parent's is ended with it when the window is closed."""
    for number, name in enumerate(("CREATE_NEW_PROCESS_GROUP", "CREATE_NO_WINDOW")):
        monkeypatch.setattr(subprocess, name, 1 << number, raising=False)
    monkeypatch.setattr(sys, "platform", "win32")
    assert own_group() == {"creationflags": 3}


def test_killing_who_is_gone_is_fine() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""], **own_group())
    child.wait()
    assert kill_tree(child.pid)


def test_error_from_event_keeps_the_branch() -> None:
    error = LoraRocmError("c", "what", where="w", fix="f")
    for code, branch in ((2, UserError), (3, MachineError), (99, MachineError)):
        again = error_from_event(ErrorEvent(**{**error.to_event(), "exit_code": code}))
        assert isinstance(again, branch) and str(again) == str(error)
