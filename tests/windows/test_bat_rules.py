"""Rules for the text of the .bat files that Wine 8 cannot show: Windows' cmd reads these things differently.

Text of the user (paths, arguments) is expanded once and between quotes, so that %, !, ^, &, ( and ) in it stay text.
``call`` would read percent signs and carets again; delayed expansion would remove exclamation marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "scripts" / "windows").glob("*.bat"))
CALLS_A_NAME = re.compile(r"call \.\\%LR_OWN%\\plan\.bat$")
MAY_STAND_BARE = {"LR_ARGS", "LR_CODE", "LR_CODE_PAGE", "LR_DO", "LR_NEW_ENOUGH", "LR_OWN", "LR_PYTHON", "LR_SETUP"}
MAY_STAND_BARE |= {"ERRORLEVEL", "LR_THEN", "RANDOM"}
CHANCE = re.compile(r"%(RANDOM|TIME|DATE)\b", re.IGNORECASE)
"""Variables that are the same for all that start in one moment."""
OWN_FOLDER = """\
set "{name}=lora-rocm-%RANDOM%%RANDOM%"
ver >nul
mkdir "%TEMP%\\%{name}%" 2>nul
if not errorlevel 1 goto %LR_THEN%
if exist "%TEMP%\\%{name}%" goto own"""
"""The one use of chance: the name of a folder that is made only where there was none."""


def faults(content: bytes) -> Iterator[str]:
    """The faults of one file, line by line."""
    if not content.isascii():
        yield "is not ASCII"
    if content.count(b"\n") != content.count(b"\r\n") or not content.endswith(b"\r\n"):
        yield "has lines that do not end in CR LF: cmd can miss a label"
    for number, line in enumerate(content.decode("ascii", "replace").splitlines(), 1):
        if line.startswith("rem "):
            continue
        if re.search(r"\bcall\b", line) and not CALLS_A_NAME.search(line):
            yield f"{number}: call reads percent signs and carets again"
        if re.search("enabledelayedexpansion", line, re.IGNORECASE):
            yield f"{number}: delayed expansion eats exclamation marks"
        if "%*" in line and line != "set LR_ARGS=%*":
            yield f"{number}: arguments are taken once, as written"
        if re.search(r"^\s*cd\b", line, re.IGNORECASE):
            yield f"{number}: cd cannot go to a network path"
        bare = re.findall(r"%(\w+)(?::[^%]*)?%", re.sub(r'"[^"]*"', "", re.sub(r'%\w+:"=[^%]*%', "", line)))
        yield from (f"{number}: {name} stands outside quotes" for name in bare if name not in MAY_STAND_BARE)


def shared_names(content: bytes) -> Iterator[str]:
    """The places where two files that are started in one moment could write to the same file."""
    lines = [line for line in content.decode("ascii").splitlines() if not line.startswith("rem ")]
    drawn = set()
    for number, line in enumerate(lines, 1):
        if not CHANCE.search(line):
            continue
        name = line.removeprefix('set "').partition("=")[0]
        drawn.add(name)
        if lines[number - 1 : number + 4] != OWN_FOLDER.format(name=name).splitlines() or ":own" not in lines[:number]:
            yield f"{number}: a name by chance is not tried with mkdir first"
    for number, line in enumerate(lines, 1):
        if any(re.search(rf'>\s*"?[^">]*%{re.escape(name)}%[^\\]', f"{line} ") for name in drawn):
            yield f"{number}: writes to a file named by chance, which is not in a folder of its own"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_file_is_named_by_chance_alone(path: Path) -> None:
    assert list(shared_names(path.read_bytes())) == []


@pytest.mark.parametrize(
    "line",
    [
        'set "LR_ANSWER=lora-rocm-check-%RANDOM%%RANDOM%.json"',
        '"%LR_PROGRAM%" check x >"%TEMP%\\answer-%RANDOM%.json"',
        'set "LR_ANSWER=%TIME::=%"',
        '"%LR_PROGRAM%" env >"%TEMP%\\%LR_OWN%.bat"',
        '"%LR_PROGRAM%" env >%LR_OWN%',
    ],
)
def test_a_file_named_by_chance_is_noticed(line: str) -> None:
    """Negative control: one more line in the sound file."""
    sound = (ROOT / "scripts" / "windows" / "_run.bat").read_bytes()
    assert list(shared_names(sound + line.encode("ascii") + b"\r\n"))
    assert list(shared_names(sound.replace(b"ver >nul\r\nmkdir", b"md")))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_rules_hold(path: Path) -> None:
    assert list(faults(path.read_bytes())) == []


@pytest.mark.parametrize(
    "line",
    [
        b'call "%~dp0_run.bat"',
        b"setlocal EnableDelayedExpansion",
        b'"%LR_PROGRAM%" train %*',
        b"cd /d x",
        b"echo %LR_ROOT%",
        b"echo \xc3\xbc",
    ],
)
def test_faults_are_noticed(line: bytes) -> None:
    assert list(faults(line + b"\r\n"))


def test_wrong_line_ends_are_noticed() -> None:
    assert list(faults(b"@echo off\nrem x\n")) and not list(faults(b"@echo off\r\nrem x\r\n"))


def test_git_keeps_the_line_ends() -> None:
    attributes = (ROOT / ".gitattributes").read_text(encoding="utf-8").splitlines()
    assert "*.bat text eol=crlf" in attributes


def test_every_file_ends_in_the_shared_one() -> None:
    for path in FILES:
        if path.stem != "_run":
            lines = path.read_text(encoding="ascii").splitlines()
            assert lines[0] == "@echo off" and lines[1].startswith("rem ")
            assert lines[2:] == [
                "setlocal disabledelayedexpansion",
                'set "LR_FILE=%~f0"',
                f'set "LR_DO={path.stem}"',
                "set LR_ARGS=%*",
                '"%~dp0_run.bat"',
            ]


def test_what_is_missing_is_said_before_anything_is_installed() -> None:
    lines = (ROOT / "scripts" / "windows" / "_run.bat").read_text(encoding="ascii").splitlines()
    install = next(number for number, line in enumerate(lines) if "install.py" in line)
    for name in ("train", "resume", "sample"):
        assert f'if "%LR_DO%"=="{name}" goto leave' in lines[:install]
    assert not any("LR_ARGS goto" in line for line in lines[install:])
