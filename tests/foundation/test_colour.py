"""Colours: only on a terminal that wants them."""

from __future__ import annotations

import io
import re

import pytest

from lora_rocm.foundation.colour import coloured_error, coloured_help, wants_colour

COLOUR = re.compile(r"\x1b\[[\d;]*m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def understands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_rocm.foundation.colour._understands_colour", lambda stream: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_only_a_terminal_is_coloured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wants_colour(Terminal()) and not wants_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "")  # the standard: an empty value does not count
    assert wants_colour(Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_colour(Terminal())


def test_a_dumb_terminal_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_colour(Terminal())


def test_the_text_stays_the_same() -> None:
    error = "It is wrong.\n  where: here\n      3 | rank: x\n        |       ^\n  fix:   Mend it."
    text = coloured_error(error)
    assert COLOUR.sub("", text) == error and len(COLOUR.findall(text)) == 8
    page = "Usage: x\n\n  Do this: now.\n\nOptions:\n  -h  Help: yes.\n"
    text = coloured_help(page)
    assert COLOUR.sub("", text) == page and len(COLOUR.findall(text)) == 4


def test_a_coloured_error_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from lora_rocm.commands.output import Output
    from lora_rocm.errors import UserError

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    error = UserError("x", "It is \x1b[31mwrong.", where="w", fix="f")
    Output().fail(error)
    assert COLOUR.search(terminal.getvalue()) and "\\x1b[31mwrong" in terminal.getvalue()
