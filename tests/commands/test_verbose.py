"""``--verbose``: details on standard error, and standard output as without it."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import pytest

from lora_rocm.commands.worker_log import followed
from tests.command_line import command_line


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("mode", [(), ("--json",), ("-q",)])
def test_details_are_on_standard_error_in_every_mode(mode: tuple[str, ...], there: Path) -> None:
    plain, verbose = (command_line("check", "demo.yaml", "--schema-only", *mode, *more) for more in ((), ("-v",)))
    assert plain.stdout == verbose.stdout and "[lora-rocm]" not in plain.stderr
    lines = [line for line in verbose.stderr.splitlines() if line not in plain.stderr.splitlines()]
    assert len(lines) == 3 and all(line.startswith("[lora-rocm] ") for line in lines) and str(there) in lines[1]


def test_an_error_has_its_code(there: Path) -> None:
    said = command_line("status", "nowhere", "-v").stderr
    assert "code:  no-run" in said and said.splitlines()[-1].split()[3] == "2"


def test_the_variable_does_the_same(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_ROCM_VERBOSE", "1")
    assert command_line("check", "demo.yaml", "--schema-only").stderr.splitlines()[-1].split()[3] == "0"
    monkeypatch.setenv("LORA_ROCM_VERBOSE", "0")
    assert "[lora-rocm]" not in command_line("check", "demo.yaml", "--schema-only").stderr


def test_child_processes_are_named(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def schema() -> dict[str, object]:
        logging.getLogger("lora_rocm.processes.tool").debug("child process: %s", "x\x1b y")
        return {}

    monkeypatch.setattr("lora_rocm.recipe.reference.json_schema", schema)
    ended = command_line("schema", "-v")
    assert "child process: x\\x1b y" in ended.stderr and json.loads(ended.stdout) == {}
    assert "child process" not in command_line("schema").stderr


def test_the_log_of_training_is_shown_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_rocm.commands.worker_log.POLL_S", 0.01)
    log, seen = tmp_path / "worker.log", list[str]()
    log.write_bytes(b"of an earlier start\n")
    with followed(log, seen.append), log.open("ab") as file:
        file.write(b"one\r\ntw")
        file.flush()
        limit_s = time.monotonic() + 20
        while not seen and time.monotonic() < limit_s:
            time.sleep(0.01)
        assert seen == ["one"]
        file.write(b"o\ntail\xff")
    assert seen == ["one", "two", "tail\ufffd"]
    with followed(tmp_path / "none", seen.append):
        pass
    assert len(seen) == 3
