"""The command as users start it: exit codes, one line or findings, JSON, report, and when the GPU is tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lora_rocm.commands import doctor as command
from lora_rocm.commands.output import Output, OutputMode
from lora_rocm.errors import MachineError
from lora_rocm.hardware.facts import HostFacts
from lora_rocm.hardware.selftest_result import Result, SelftestVerdict
from tests.doctor.injections import BARE, LINUX, STACK, case
from tests.golden import HOSTS, machines
from tests.wording import says, worded

ROOT = Path(__file__).parents[2]
BROKEN = ["broken-no-permission", "windows-krackan", "linux-radeon-vii", "windows-rx9060xt"]
PASSED = SelftestVerdict(STACK, (Result("gemm.square-bf16-NN", "passed", 0.1),))
WRONG = SelftestVerdict(
    STACK, tuple(Result(f"copies.{way}-fp32", "failed", 0.1) for way in ("pageable", "pinned", "mapped"))
)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lora_rocm", "doctor", *map(str, arguments)],
        capture_output=True,
        encoding="utf-8",
        cwd=ROOT,
        env={**os.environ, "PYTHONUTF8": "1"},
    )


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[str]]:
    """Make this machine another one; returns what the self-test was asked for."""

    def pretend(facts: HostFacts, answer: SelftestVerdict | MachineError = PASSED) -> list[str]:
        asked: list[str] = []

        def self_test(situation: object, notify: Callable[[str], None]) -> SelftestVerdict:
            asked.append("self-test")
            notify("testing")
            if isinstance(answer, MachineError):
                raise answer
            return answer

        situation = replace(case(facts)[0], app_dir=str(tmp_path))
        monkeypatch.setattr(command, "situation_here", lambda deep: situation)
        monkeypatch.setattr(command, "self_test", self_test)
        return asked

    return pretend


def doctor(**options: object) -> int:
    return examined(None, OutputMode.HUMAN, **options)


def examined(facts: Path | None, mode: OutputMode, **options: object) -> int:
    """``lora-rocm doctor``, in this process."""
    output = Output(mode)
    found = command.doctor(facts, **options, notify=output.on_stderr)  # type: ignore[arg-type]
    output.show(command.result_of(found), command.render(found))
    return found.exit_code


def test_quick_on_this_very_machine() -> None:
    done = run("--quick")
    assert done.returncode in (0, 3) and "Traceback" not in done.stderr
    assert done.stdout.startswith("Nothing wrong: ") or "read:" in done.stdout


def test_json_and_report_on_this_very_machine(tmp_path: Path) -> None:
    path = tmp_path / "mein bericht.md"
    done = run("--quick", "--json", "--report", path)
    found = json.loads(done.stdout)
    assert found["facts"]["origin"] == "probe" and found["healthy"] is all(
        one["level"] == "note" for one in found["findings"]
    )
    text = path.read_text(encoding="utf-8")
    assert says(text, "commands/lora-rocm-doctor-report") and str(Path.home()) + "/" not in text
    assert "mein bericht.md" in done.stderr


def test_a_recorded_machine() -> None:
    done = run("--facts", HOSTS / "linux-rx7900xtx.json")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("Nothing wrong: Radeon RX 7900 XTX (gfx1100)") and done.stdout.count("\n") == 1


def test_errors_are_sentences(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    facts = HOSTS / "linux-rx7900xtx.json"
    for code, arguments in {
        2: ("--facts", tmp_path / "none.json"),
        3: ("--facts", facts, "--report", tmp_path / "file" / "report.md"),
    }.items():
        done = run(*arguments)
        assert done.returncode == code and "fix:" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("machine", machines())
def test_exit_code_says_whether_something_breaks(machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = HOSTS / f"{machine}.json"
    code = examined(path, OutputMode.JSON)
    found = json.loads(capsys.readouterr().out)["findings"]
    refused = [one for one in found if one["level"] == "breaks" or one["id"] in command.REFUSED]
    assert code == (3 if refused else 0)
    assert code == 3 or machine not in BROKEN


def test_the_json_is_frozen(capsys: pytest.CaptureFixture[str]) -> None:
    examined(HOSTS / "linux-strix-halo.json", OutputMode.JSON, quick=True)
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == 1
    assert set(found) == {
        "format", "lora_rocm", "machine", "healthy", "findings", "variables", "settings", "selftest", "facts",
    }  # fmt: skip
    assert set(found["findings"][0]) == {"id", "level", "title", "evidence", "effect", "cure", "source"}
    assert found["healthy"] is False and found["selftest"] is None


def test_the_gpu_is_tested_and_the_result_told(
    live: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = live(LINUX)
    assert doctor() == 0
    said = capsys.readouterr()
    assert asked == ["self-test"] and "self-test passed" in said.out
    assert said.out.count("\n") == 1 and said.err == "testing\n"


def test_a_gpu_that_computes_wrong_breaks(live: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    live(LINUX, WRONG)
    assert doctor() == 3
    assert WRONG.unusable and WRONG.unusable in " ".join(capsys.readouterr().out.split())


def test_a_test_that_cannot_be_made_is_a_finding(
    live: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    live(LINUX, MachineError("worker-died", "The test process died.", fix="Look at the kernel log."))
    assert doctor() == 3
    said = capsys.readouterr().out
    assert "The test process died." in said and "Look at the kernel log." in said


@pytest.mark.parametrize(
    ("facts", "options"),
    [
        (LINUX, {"quick": True}),
        (BARE, {}),
        (replace(LINUX, torch=None), {}),
        (replace(LINUX, python="3.9.1 64-bit"), {}),
    ],
)
def test_the_gpu_is_left_alone(live: Callable[..., list[str]], facts: HostFacts, options: dict[str, bool]) -> None:
    asked = live(facts)
    doctor(**options)
    assert asked == []


def test_the_day_of_the_test_is_told(live: Callable[..., list[str]], tmp_path: Path) -> None:
    situation = replace(case(LINUX, PASSED)[0], app_dir=str(tmp_path))
    assert command._tested_on(situation) == ""
    path = command.path_of(tmp_path, STACK)
    path.write_text("{}", encoding="utf-8")
    os.utime(path, (1795000000, 1795000000))
    assert command._tested_on(situation).startswith("2026-11-")


def test_cures_name_the_python_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")
    assert command._with_own_python("python -m pip uninstall -y x") == worded(
        "commands/venv-bin-python-m-pip-uninstall-y"
    )
    assert command._with_own_python("make install") == "make install"
    monkeypatch.setattr(sys, "executable", "/my venv/bin/python")
    assert command._with_own_python("python -m pip uninstall -y x") == worded("commands/python-m-pip-uninstall-y-x")
