"""Children that write JSON, report errors, or die; and the message where the code of one cannot be imported."""

from __future__ import annotations

import ast
import errno
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from lora_rocm.errors import MachineError, StoppedError, StorageError, UserError, WorkerDiedError
from lora_rocm.foundation import files
from lora_rocm.foundation.safe_path import python_command
from lora_rocm.processes.tool import run_for_json, run_tool
from lora_rocm.rundir.event_types import Event
from lora_rocm.rundir.layout import RunDir
from tests.command_line import command_line
from tests.markers import markers, unmarked
from tests.supervisor.fake_run import write_whole_run
from tests.test_architecture import Module, package_modules
from tests.wording import saying, says


def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, imports: str = "import sys") -> str:
    main = textwrap.indent(body, "    ")
    (tmp_path / "child_module.py").write_text(f"{imports}\ndef main():\n{main}\n    return 0\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "child_module"


def as_tool(name: str) -> object:
    return run_tool(name, [], os.environ, lambda event: None)


def for_json(name: str) -> object:
    return run_for_json(name, [], os.environ)


both = pytest.mark.parametrize("run_it", [as_tool, for_json])


@pytest.mark.skipif(os.name == "nt", reason="a Windows console that is closed is told otherwise")
@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_tool_ends_with_the_one_who_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: str) -> None:
    told = "import json, os, time\nprint(json.dumps({'type': 'notice', 'text': str(os.getpid())}), flush=True)\n"
    name, pids = module(tmp_path, monkeypatch, told + "time.sleep(60)"), list[int]()

    def stop(event: Any) -> None:
        pids.append(int(event.text))
        os.kill(os.getpid(), getattr(signal, sent))

    with pytest.raises(KeyboardInterrupt):
        run_tool(name, [], {**os.environ, "TMPDIR": str(tmp_path)}, stop)
    assert not psutil.pid_exists(pids[0])


def test_run_tool_hands_on_events_and_skips_chatter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import json\nprint('hello')\nprint(json.dumps({'type': 'notice', 'text': 'ü ' + sys.argv[1]}))"
    events: list[Any] = []
    name = module(tmp_path, monkeypatch, text)
    assert run_tool(name, ["a"], {**os.environ, "PYTHONUTF8": "1"}, events.append) == 0
    (event,) = events
    assert (event.type, event.text) == ("notice", "ü a")


ERROR = '{"type": "error", "code": "c", "what": "no such LoRA", "where": "w", "fix": "f", "exit_code": 2}'


@both
def test_children_that_report_an_error(
    run_it: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="no such LoRA"):
        run_it(module(tmp_path, monkeypatch, f"print('''{ERROR}''')\nreturn 2"))


@both
def test_children_that_die(run_it: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkerDiedError, match="RuntimeError: broken") as caught:
        run_it(module(tmp_path, monkeypatch, "raise RuntimeError('broken')"))
    assert "Traceback" not in str(caught.value) and "child_module" in str(caught.value)


@both
@pytest.mark.parametrize(
    ("imports", "body", "code", "words"),
    [
        ("import no_such_package.deep", "pass", "package-missing", "The package no_such_package is not installed"),
        ("import sys", "import no_such_package", "package-missing", "The package no_such_package is not installed"),
        ("from json import no_such_name", "pass", "package-broken", "ImportError: cannot import name 'no_such_name'"),
        ("raise OSError('[WinError 1114] c10.dll')", "pass", "package-broken", "OSError: [WinError 1114] c10.dll"),
        ("import json\njson.no_such_name", "pass", "package-broken", "AttributeError: module 'json'"),
    ],
)
def test_a_package_that_cannot_be_imported_is_one_sentence(
    run_it: Callable[[str], object],
    imports: str,
    body: str,
    code: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(MachineError) as caught:
        run_it(module(tmp_path, monkeypatch, body, imports))
    assert (caught.value.code, caught.value.exit_code) == (code, 3) and (
        caught.value.what.startswith(words)
        or says(caught.value.what, "processes/a-package-that-training-needs-cannot-be", words=words)
    )
    assert "install" in caught.value.fix and "lora-rocm doctor" in caught.value.fix


def test_run_for_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_for_json(module(tmp_path, monkeypatch, "print('x')\nprint('{\"unet\": 3}')"), [], os.environ) == {
        "unet": 3
    }
    text = "print('wrong model', file=sys.stderr)\nreturn 2"
    with pytest.raises(UserError, match="wrong model"):
        run_for_json(module(tmp_path, monkeypatch, text), [], os.environ)


@both
def test_a_child_that_found_no_room_for_its_events_names_the_folder(
    run_it: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with a code alone: the file that its words go to is on the full disk."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    name = module(tmp_path, monkeypatch, "return 1", "")
    with pytest.raises(WorkerDiedError):  # the control
        run_it(name)

    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "write_through", full)
    with pytest.raises(StorageError) as caught:
        run_it(name)
    assert caught.value.code == "disk-full" and caught.value.where.startswith(str(tmp_path / "temporary"))
    assert not any((tmp_path / "temporary").iterdir())


def test_a_child_on_a_disk_that_is_really_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        body = "print('x' * 200_000, flush=True)"
        with pytest.raises(StorageError) as caught:
            as_tool(module(tmp_path, monkeypatch, body))
        assert caught.value.code == "disk-full" and str(disk) in caught.value.where
        (disk / "full").write_bytes(bytes(64 << 10))
        run = RunDir(tmp_path / "run")
        write_whole_run(run)
        for command in (("export", run.path, "--format", "comfyui"), ("sample", run.path, "--prompt", "a")):
            ended = command_line(*command)
            assert (
                ended.exit_code == 3 and says(ended.stderr, "processes/the-disk-is-full") and str(disk) in ended.stderr
            )
    finally:
        monkeypatch.undo()
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("fault", ["no room", "no folder"])
def test_temporary_folders_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "there"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "there") if fault == "no room" else None)

    def fail(*arguments: object, **options: object) -> str:
        raise OSError(errno.ENOSPC if fault == "no room" else errno.ENOENT, "it failed")

    monkeypatch.setattr(tempfile, "mkdtemp" if fault == "no room" else "_get_default_tempdir", fail)
    with pytest.raises(StorageError) as caught, files.temporary_folder():
        pass
    assert caught.value.where == str(tmp_path / "there")


def test_a_child_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = module(tmp_path, monkeypatch, "import time\ntime.sleep(60)")
    with pytest.raises(WorkerDiedError, check=saying("processes/still-at-work")):
        run_for_json(name, [], os.environ, limit_s=0.5)


def test_events_before_an_answer_are_heard_and_a_child_that_is_not_wanted_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notice = 'import sys\nprint(\'{"type": "notice", "text": "a"}\', flush=True)\n'
    name, heard = module(tmp_path, monkeypatch, notice + "print('{\"x\": 1}')"), list[Event]()
    assert run_for_json(name, [], os.environ, heard.append) == {"x": 1}
    assert [event.type for event in heard] == ["notice"]
    name = module(tmp_path, monkeypatch, notice + "import time\ntime.sleep(60)")
    began_s, heard = time.monotonic(), []

    def require_wanted() -> None:
        if heard:
            raise StoppedError("cancelled", "x")

    with pytest.raises(StoppedError):
        run_for_json(name, [], os.environ, heard.append, require_wanted)
    assert time.monotonic() - began_s < 30


@pytest.mark.parametrize("call", ["run_for_json(name, [], os.environ)", "run_tool(name, [], os.environ, print)"])
def test_a_child_ends_with_a_parent_that_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """The parent has no time to end it: no handler runs when a process is killed."""
    told = tmp_path / "told"
    body = f"import os, time\nopen({str(told)!r}, 'w').write(f'{{os.getpid()}} ')\ntime.sleep(100)"
    name = module(tmp_path, monkeypatch, body)
    text = f"import os\nfrom lora_rocm.processes.tool import *\nname = {name!r}\n{call}"
    parent = subprocess.Popen(python_command("-c", text), stdin=subprocess.DEVNULL)
    try:
        ends_s = time.monotonic() + 60
        while not (told.exists() and told.read_text(encoding="utf-8").endswith(" ")):
            assert parent.poll() is None and time.monotonic() < ends_s
            time.sleep(0.05)
        child = psutil.Process(int(told.read_text(encoding="utf-8")))
        time.sleep(0.3)
        assert child.is_running() and child.status() != psutil.STATUS_ZOMBIE, "it works while its parent lives"
    finally:
        parent.kill()
        parent.wait()
    child.wait(timeout=20)


def unexplained(module: Module) -> list[str]:
    """Children that are started with ``reads_input`` without a comment on what their input is for."""
    places = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in module.nodes
        if isinstance(node, ast.Call) and any(given.arg == "reads_input" for given in node.keywords)
    ]
    return list(unmarked(module.name, module.source, "input", places))


def test_only_modules_that_watch_their_input_themselves_are_left_alone() -> None:
    """The worker saves before it leaves, a tracker sends what is waiting, and the others work from their input."""
    assert [fault for module in package_modules() for fault in unexplained(module)] == []
    assert sum(len(markers(module.source, "input")) for module in package_modules()) > 3  # they are read


def test_a_child_that_reads_its_input_without_a_reason_is_noticed() -> None:
    call = "command = heavy_command(name, reads_input=True)"
    assert unexplained(Module("lora_rocm.commands.x", call))
    assert unexplained(Module("lora_rocm.commands.x", "a = 1  # input: it has the messages"))
    assert unexplained(Module("lora_rocm.commands.x", f"{call}  # input: it has the messages")) == []
