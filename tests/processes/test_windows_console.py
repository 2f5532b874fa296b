"""The closing of a console window, with a fake of Windows' calls."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from lora_rocm.processes.windows_console import CLOSE, LOGOFF, SHUTDOWN, on_console_close

CTRL_C, CTRL_BREAK = 0, 1
WAIT_S = 5.0


class Kernel32:
    """Keeps the handlers, and calls them in a separate thread as Windows does."""

    def __init__(self) -> None:
        self.handlers: list[Any] = []

    def SetConsoleCtrlHandler(self, handler: Any, add: bool) -> int:  # noqa: N802 - the name that Windows gives it
        (self.handlers.append if add else self.handlers.remove)(handler)
        return 1

    def send(self, event: int) -> tuple[threading.Thread, list[int]]:
        answers: list[int] = []
        thread = threading.Thread(target=lambda: answers.append(self.handlers[-1](event)), daemon=True)
        thread.start()
        return thread, answers


@pytest.mark.parametrize("event", [CLOSE, LOGOFF, SHUTDOWN])
def test_closing_is_told_and_the_answer_is_kept_back(event: int) -> None:
    """Windows ends the process as soon as the handler returns."""
    kernel32, told = Kernel32(), threading.Event()
    with on_console_close(told.set, kernel32):
        thread, answers = kernel32.send(event)
        assert told.wait(WAIT_S)
        thread.join(0.2)
        assert thread.is_alive() and answers == []
    assert kernel32.handlers == []


@pytest.mark.parametrize("event", [CTRL_C, CTRL_BREAK])
def test_ctrl_c_is_left_to_python(event: int) -> None:
    kernel32, told = Kernel32(), threading.Event()
    with on_console_close(told.set, kernel32):
        thread, answers = kernel32.send(event)
        thread.join(WAIT_S)
    assert answers == [0] and not told.is_set()


def test_elsewhere_nothing_is_done() -> None:
    with on_console_close(lambda: None):
        pass
