"""Completion in the four shells: the script is written and printed, and it completes commands, options and values."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lora_rocm.rundir.layout import RunDir
from tests.command_line import command_line
from tests.supervisor.fake_run import write_whole_run

VARIABLE = "_LORA_ROCM_COMPLETE"
SHELLS = ("bash", "zsh", "fish", "powershell")
PLACES = {
    "bash": ".bash_completions/lora-rocm.sh",
    "zsh": ".zfunc/_lora-rocm",
    "fish": ".config/fish/completions/lora-rocm.fish",
    "powershell": "profile.ps1",
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "Zoe K"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("USERPROFILE", str(folder))
    monkeypatch.delenv("ZDOTDIR", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return folder


def use(shell: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the program believe that this shell has started it; PowerShell is asked for its profile."""
    # Of a profile with other letters, the command-line library may guess the encoding wrongly.
    profile = subprocess.CompletedProcess([], 0, stdout=f"{home / 'profile.ps1'}\r\n".encode())
    monkeypatch.setattr("typer._completion_shared.subprocess.run", lambda *args, **options: profile)
    for module in ("completion", "_completion_shared"):
        monkeypatch.setattr(f"typer.{module}._get_shell_name", lambda: shell)


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_shown(shell: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(shell, home, monkeypatch)
    ended = command_line("--show-completion")
    assert ended.exit_code == 0 and VARIABLE in ended.stdout and "lora-rocm" in ended.stdout
    assert not any(home.iterdir())


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_installed(shell: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(shell, home, monkeypatch)
    ended = command_line("--install-completion")
    place = home / PLACES[shell]
    assert ended.exit_code == 0 and str(place) in ended.stdout
    assert VARIABLE in place.read_text(encoding="utf-8")


def completed(shell: str, words: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The completions of the last word, as the script of a shell asks for them."""
    last = words.rpartition(" ")[2]
    variables = {VARIABLE: f"complete_{shell}", "_TYPER_COMPLETE_ARGS": words}
    variables |= {"COMP_WORDS": words.replace(" ", "\n"), "COMP_CWORD": str(words.count(" "))}
    variables |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args", "_TYPER_COMPLETE_WORD_TO_COMPLETE": last}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ended = command_line()
    assert ended.exit_code == 0 and ended.stderr == ""
    return ended.stdout.splitlines()


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("lora-rocm st", "status"),
        ("lora-rocm runs --st", "--state"),
        ("lora-rocm runs --state fin", "finished"),
        ("lora-rocm export --format ku", None),
        ("lora-rocm cache pr", "prune"),
        ("lora-rocm train demo.y", "demo.yaml"),
    ],
)
def test_words_are_completed(shell: str, words: str, wanted: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "\n".join(completed(shell, words, monkeypatch))
    assert (wanted in said) if wanted is not None else ("kohya" not in said)


@pytest.mark.parametrize("command", ["status", "resume", "sample", "export --format peft"])
def test_runs_are_completed(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole_run(RunDir(tmp_path / "runs" / "cat-1"))
    (tmp_path / "runs" / "cat-pictures").mkdir()
    monkeypatch.chdir(tmp_path)
    assert completed("bash", f"lora-rocm {command} runs/c", monkeypatch) == [str(Path("runs") / "cat-1")]


@pytest.mark.skipif(sys.platform == "win32" or not shutil.which("bash"), reason="there is no bash here")
def test_bash_itself_completes(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        use("bash", home, patch)
        script = command_line("--show-completion").stdout
    program = home / "lora-rocm"
    main = "import sys; sys.argv[0] = 'lora-rocm'; from lora_rocm.cli import main; main()"
    program.write_text(f'#!/bin/sh\nexec {json.dumps(sys.executable)} -c {json.dumps(main)} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    function = "_lora_rocm_completion"
    assert function in script
    script += (
        f"\nCOMP_WORDS=(lora-rocm cache ver)\nCOMP_CWORD=2\n{function} lora-rocm\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    path = f"{home}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["verify"], done.stderr
