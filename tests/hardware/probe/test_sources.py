"""Tools that hang, fail or return false answers, the remembered answers, and failing reads."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from lora_rocm.hardware.facts import Unread
from lora_rocm.hardware.probe.sources import (
    HIDING,
    MEMORY_FILE,
    NoRegistry,
    ProbeReads,
    Sources,
    recalled,
    remember,
    run_tool,
)
from tests.hardware.fake_machine import Registry, Tools
from tests.wording import saying

ECHO = [sys.executable, "-c", "print('answer')"]
ASK = ("tool", ["tool"], 1.0, "driver 1")


def look_at(tmp_path: Path, tools: Tools | None = None) -> ProbeReads:
    return ProbeReads(Sources("linux", environ={}, root=tmp_path, app_dir=tmp_path / "app", run=(tools or Tools()).run))


def test_a_tool_answers() -> None:
    assert run_tool(ECHO, 30.0).strip() == "answer"


def test_a_tool_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    """Both sleep for a minute; a shell between them and us, as a vendor's wrapper script would be."""
    pids = tmp_path / "pids"
    child = f"import os, time; open({str(pids)!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]); {child}"
    start = time.monotonic()
    with pytest.raises(TimeoutError, check=saying("hardware/no-answer-within-3-s")):
        run_tool([sys.executable, "-c", parent], 3.0)
    assert time.monotonic() - start < 40
    started = [int(word) for word in pids.read_text(encoding="utf-8").split()]
    assert len(started) == 2
    deadline = time.monotonic() + 30
    while any(is_alive(pid) for pid in started) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in started)


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_tool_that_fails_says_why() -> None:
    with pytest.raises(OSError, match=r"exit code 3: no device"):
        run_tool([sys.executable, "-c", "import sys; print('no device', file=sys.stderr); sys.exit(3)"], 30.0)


def test_a_tool_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError):
        run_tool(["no-such-tool-anywhere"], 1.0)


def test_output_that_is_no_text_is_read_all_the_same() -> None:
    assert "�" in run_tool([sys.executable, "-c", "import sys; sys.stdout.buffer.write(b'\\xff')"], 30.0)


def test_a_tool_sees_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in HIDING:
        monkeypatch.setenv(name, "9")
    monkeypatch.setenv("HIP_PATH", "kept")
    command = [sys.executable, "-c", "import os; print(*sorted(os.environ))"]
    names = run_tool(command, 30.0).split()
    assert "HIP_PATH" in names and not set(HIDING) & set(names)


def test_an_answer_is_remembered_until_boot_driver_or_command_change(tmp_path: Path) -> None:
    tools = Tools({"tool": "first"})
    look = look_at(tmp_path, tools)
    assert look.ask(*ASK) == "first"
    tools.answers["tool"] = "second"
    assert look.ask(*ASK) == "first"
    assert len(tools.asked) == 1
    assert look.ask("tool", ["tool"], 1.0, "driver 2") == "second"
    look.boot = "another"
    assert look.ask("tool", ["tool"], 1.0, "driver 2") == "second"
    assert look.ask("tool", ["tool", "-v"], 1.0, "driver 2") == "second"
    assert len(tools.asked) == 4
    assert look.unread == []


def test_a_failure_is_remembered_and_asked_again_on_request(tmp_path: Path) -> None:
    tools = Tools({"tool": TimeoutError("no answer within 1 s")})
    look = look_at(tmp_path, tools)
    assert look.ask(*ASK) is None
    assert look.unread == [Unread("tool", "no answer within 1 s")]
    assert look.ask(*ASK) is None
    assert len(tools.asked) == 1
    assert "earlier attempt" in look.unread[-1].why
    tools.answers["tool"] = "well again"
    look.again = True
    assert look.ask(*ASK) == "well again"
    assert look.ask(*ASK) == "well again"
    assert len(tools.asked) == 2


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"[]", b"{", b'{"format": 99, "tools": {}}', b'{"format": 1, "tools": []}',
     b'{"format": 1, "tools": {"tool": 5}}', b'{"format": 1, "tools": {"tool": {"key": "\\ndriver 1\\ntool"}}}',
     b"[" * 100_000],
)  # fmt: skip
def test_a_damaged_memory_is_forgotten(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / MEMORY_FILE).write_bytes(content)
    look = look_at(tmp_path, Tools({"tool": "answer"}))
    assert look.ask(*ASK) == "answer"
    assert look.ask(*ASK) == "answer"
    assert json.loads((tmp_path / "app" / MEMORY_FILE).read_text(encoding="utf-8"))["tools"]["tool"]["said"] == "answer"


def test_where_nothing_can_be_written_it_is_just_slower(tmp_path: Path) -> None:
    (tmp_path / "app").write_text("a file in place of the folder", encoding="utf-8")
    tools = Tools({"tool": "answer"})
    look = look_at(tmp_path, tools)
    assert look.ask(*ASK) == look.ask(*ASK) == "answer"
    assert len(tools.asked) == 2 and look.unread == []
    remember(None, "tool", {})
    assert recalled(None, "tool", "") is None


def test_a_memory_that_cannot_be_replaced_leaves_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows refuses to rename over a file that somebody has open."""

    def refuse(source: str, target: Path) -> None:
        raise PermissionError(13, "Access is denied")

    monkeypatch.setattr(os, "replace", refuse)
    remember(tmp_path, "tool", {"key": "", "said": "x"})
    assert list(tmp_path.iterdir()) == []


def test_two_tools_do_not_forget_each_other(tmp_path: Path) -> None:
    remember(tmp_path, "one", {"key": "k", "said": "1", "failed": None})
    remember(tmp_path, "two", {"key": "k", "said": "2", "failed": None})
    assert recalled(tmp_path, "one", "k") is not None
    assert recalled(tmp_path, "two", "other") is None


def test_reads_are_noted_where_they_fail(tmp_path: Path) -> None:
    look = look_at(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "number").write_text("0x10\n", encoding="utf-8")
    (tmp_path / "words").write_bytes(b"\xff words")
    assert look.text("/not-there") is None and look.unread == []
    assert look.number("/number") == 16
    assert look.number("/words") is None
    assert look.text("/folder") is None
    assert look.text("/a\0b") is None
    assert look.names("/number") == [] and look.names("/nowhere") == []
    assert [item.what for item in look.unread] == ["/words", "/folder", "/a?b"]
    assert look.text("/gone", expected=True) is None and look.unread[-1] == Unread("/gone", "not there")


def test_a_folder_that_may_not_be_listed_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)
    look = look_at(tmp_path)
    assert look.names("/dev/dri") == []
    assert look.unread == [Unread("/dev/dri", "permission denied")]


def test_registry_keys_are_noted_where_they_may_not_be_read(tmp_path: Path) -> None:
    class Locked(Registry):
        def values(self, key: str) -> dict[str, object]:
            raise PermissionError(13, "Access is denied")

    look = look_at(tmp_path)
    assert look.values("A") == {} and look.unread == []
    look.sources = replace(look.sources, registry=Locked({}))
    assert look.values("A") == {} and look.unread == [Unread(r"HKLM\A", "access is denied")]
    with pytest.raises(FileNotFoundError):
        NoRegistry().keys("A")


def test_paths_of_windows_lie_below_the_root(tmp_path: Path) -> None:
    sources = Sources("windows", environ={}, root=tmp_path)
    assert sources.path(r"C:\Windows\System32") == tmp_path / "C" / "Windows" / "System32"
    assert sources.path("/dev/kfd") == tmp_path / "dev" / "kfd"
    assert replace(sources, root=None).path("/dev/kfd") == Path("/dev/kfd")
