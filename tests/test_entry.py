"""Ctrl+C before the commands are imported ends the program like any command."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lora_rocm import entry
from lora_rocm.commands import cli_command
from lora_rocm.commands.output import Failed
from lora_rocm.errors import StoppedError
from tests.command_line import command_line
from tests.documents import faults

PACKAGE = Path(entry.__file__).parent
BEGIN = "import sys; sys.argv[0] = 'lora-rocm'; from lora_rocm.entry import main; sys.exit(main())"
"""The content of the program that ``pip`` writes."""
interrupts = pytest.mark.skipif(os.name == "nt", reason="a Windows process gets Ctrl+C from its console alone")


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


@pytest.mark.parametrize("words", [("lora-rocm", "status"), ("lora-rocm", "status", "--json")])
def test_an_interrupted_import_is_a_document_under_json(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "lora_rocm.cli", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    monkeypatch.setattr(sys, "argv", [*words])
    with pytest.raises(SystemExit):
        entry.main()
    said = capsys.readouterr()
    assert (said.out != "") == ("--json" in words) and said.err == "Stopped.\n"
    assert said.out == "" or list(faults(json.loads(said.out), Failed)) == []


def test_an_interrupt_between_the_command_line_and_the_command_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_command.Command, "parse_args", interrupted)
    plain, document = command_line("status"), command_line("status", "--json")
    assert (plain.exit_code, plain.stdout, plain.stderr) == (entry.STOPPED, "", "Stopped.\n")
    assert (document.exit_code, document.stderr) == (entry.STOPPED, "Stopped.\n")
    assert document.stdout == entry.DOCUMENT, "as the program prints it before"


def test_little_is_imported_before_the_program_is_in_control() -> None:
    """Python's own modules and the two of the program."""
    listed = "import sys; before = {*sys.modules}\nfrom lora_rocm.entry import main\nprint({*sys.modules} - before)"
    done = subprocess.run([sys.executable, "-c", listed], capture_output=True, text=True, check=True)
    assert set(re.findall(r"'([^']+)'", done.stdout)) <= {"lora_rocm", "lora_rocm.entry"}


def own_frames(text: str) -> list[str]:
    """Frames of a traceback that are in the package and later than the begin of ``entry.main``."""
    files = re.findall(r'File "([^"]+)", line \d+, in (\S+)', text)
    before = {str(PACKAGE / name) for name in ("__init__.py", "entry.py")}
    return [f"{file} {name}" for file, name in files if file.startswith(str(PACKAGE)) and file not in before]


WAITING = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
class Waiting:
    def find_spec(self, name, path=None, target=None):
        if name == "lora_rocm.errors":
            print("waits", flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Waiting())
"""
"""The import of the commands waits for the signal in its middle. A shell's background job ignores it otherwise."""


@interrupts
def test_ctrl_c_while_the_commands_are_imported(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WAITING + BEGIN, "status", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path) as child:
        assert child.stdout is not None and child.stderr is not None
        assert child.stdout.readline() == b"waits\n"
        child.send_signal(signal.SIGINT)
        text = child.stderr.read().decode()
    assert child.returncode == entry.STOPPED and text == "Stopped.\n"


@interrupts
@pytest.mark.slow
def test_ctrl_c_at_any_moment(tmp_path: Path) -> None:
    """Before ``entry.main`` Python's own start shows what it shows; from there on nothing of ours is in a traceback."""
    stopped = 0
    for delay_s in (step / 100 for step in range(40)):
        command = [sys.executable, "-c", BEGIN, "status", str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path) as child:
            time.sleep(delay_s)
            child.send_signal(signal.SIGINT)
            text = child.communicate()[1].decode()
        assert own_frames(text) == [], (delay_s, text)
        stopped += child.returncode == entry.STOPPED and text == "Stopped.\n"
    assert stopped > 5, "the moments hit the start of the program"


def test_a_frame_of_the_program_is_seen() -> None:
    assert own_frames(f'  File "{PACKAGE / "cli.py"}", line 3, in <module>\n')
    assert own_frames('  File "<frozen site>", line 3, in <module>\n') == []
