"""The server in its own process or in a thread: ports, the link, slow clients, many requests, its end."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from lora_rocm.errors import MachineError, UserError
from lora_rocm.foundation.safe_path import python_command
from lora_rocm.rundir.layout import RunDir
from lora_rocm.ui import command as ui_command
from lora_rocm.ui import security, server
from lora_rocm.ui.server import PageServer, listen
from tests.supervisor.fake_run import write_whole_run


@pytest.fixture
def served(tmp_path: Path) -> Iterator[PageServer]:
    with PageServer.listening(tmp_path, Path("runs"), "127.0.0.1", 0) as made:
        thread = threading.Thread(target=made.serve, daemon=True)
        thread.start()
        yield made
        made.stop()
        thread.join(10)
        assert not thread.is_alive()


@contextlib.contextmanager
def connected(served: PageServer) -> Iterator[tuple[http.client.HTTPConnection, dict[str, str]]]:
    """A connection to a server, and the headers of its user."""
    access = served.context.access
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", access.port, timeout=20)) as made:
        yield made, {"Cookie": f"{access.cookie_name}={access.cookie}", "X-CSRF": access.csrf}


def test_a_port_in_use_is_skipped_and_named() -> None:
    said: list[str] = []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with listen("127.0.0.1", port, said.append) as found:
            assert found.getsockname()[1] > port and len(said) == 1 and str(port) in said[0]
    said.clear()
    with listen("127.0.0.1", 0, said.append):
        assert said == []  # control


def test_an_impossible_host_is_refused() -> None:
    with pytest.raises(UserError) as unknown:
        listen("no such host.invalid", 0, lambda text: None)
    assert unknown.value.code == "host-unknown"
    with pytest.raises(MachineError) as foreign:
        listen("192.0.2.1", 0, lambda text: None)  # another machine's address
    assert foreign.value.code == "no-port"


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ui_command, "PACKAGES", ("starlette", "not_installed_anywhere"))
    with pytest.raises(MachineError) as raised:
        ui_command.ui(tmp_path, Path("runs"))
    assert raised.value.code == "ui-not-installed" and "not_installed_anywhere" in raised.value.what


def test_the_command_prints_its_link_answers_and_ends(tmp_path: Path) -> None:
    """As a user starts it. The time to the first page is measured by benchmarks/light.py."""
    words = python_command("-m", "lora_rocm", "ui", "--port", "0", "--no-browser", "--json", str(tmp_path))
    with subprocess.Popen(words, stdout=subprocess.PIPE, encoding="utf-8") as process:
        assert process.stdout is not None
        text = ""
        while not text.rstrip().endswith("}"):
            text += process.stdout.readline()
        link = urlsplit(json.loads(text)["link"])
        with contextlib.closing(http.client.HTTPConnection(str(link.hostname), link.port, timeout=20)) as asked:
            asked.request("GET", f"/?{link.query}")
            answer = asked.getresponse()
        assert answer.status == 303 and answer.headers["location"] == "/"
        process.send_signal(signal.SIGINT if os.name != "nt" else signal.CTRL_BREAK_EVENT)
        assert process.wait(20) == 0


@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_many_requests(count: int, served: PageServer) -> None:
    """Each hundredth is a list of runs; wrong paths, wrong hosts and missing proofs are among them."""
    write_whole_run(RunDir(served.context.folders.runs / "a"))
    with connected(served) as (asked, headers):
        _ask(asked, headers, count)
    assert served.context.live.num_streams == 0


def _ask(asked: http.client.HTTPConnection, headers: dict[str, str], count: int) -> None:
    kinds = [
        ("GET", "/static/theme.js", headers, 200),
        ("GET", "/nothing", headers, 404),
        ("GET", "/", {}, 403),
        ("GET", "/", {**headers, "Host": "evil.example"}, 421),
        ("GET", "/runs/view?dir=%2e%2e%2f%2e%2e", headers, 403),
        ("POST", "/machine/forget", {"Cookie": headers["Cookie"]}, 403),
    ]
    for number in range(count):
        method, path, given, wanted = ("GET", "/runs", headers, 200) if number % 100 == 0 else kinds[number % 6]
        asked.request(method, path, headers=given)
        answer = asked.getresponse()
        answer.read()
        assert answer.status == wanted, (method, path)


def _received(raw: socket.socket) -> bytes:
    """Return the next bytes from the server, within 10 s: none if it has ended the connection, also by a reset."""
    raw.settimeout(10)
    try:
        return raw.recv(65536)
    except TimeoutError:
        raise
    except OSError:
        return b""


def test_damaged_requests_do_not_harm(served: PageServer) -> None:
    port = served.context.access.port
    for head in (b"\0\0\0\0\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET " + b"x" * 200_000, b"POST / HTTP/1.1\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port), 10) as raw:
            with contextlib.suppress(OSError):  # the server may have ended the connection before it read all of this
                raw.sendall(head)
                raw.shutdown(socket.SHUT_WR)
            assert _received(raw)[:9] in (b"HTTP/1.1 ", b"")
    with connected(served) as (asked, headers):
        asked.request("GET", "/runs", headers=headers)
        assert asked.getresponse().status == 200


def test_slow_clients_are_cut_and_do_not_stop_others(served: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEADERS_TIMEOUT_S", 1.0)
    monkeypatch.setattr(security, "PIECE_TIMEOUT_S", 1.0)
    port, slow = served.context.access.port, []
    for _ in range(50):  # heads that never end
        raw = socket.create_connection(("127.0.0.1", port), 10)
        raw.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1")
        slow.append(raw)
    access = served.context.access
    body = socket.create_connection(("127.0.0.1", port), 10)
    lines = [
        f"POST /machine/folders HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nCookie: {access.cookie_name}={access.cookie}"
    ]
    lines.append("Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 1000\r\n\r\nfolder=")
    body.sendall("\r\n".join(lines).encode())
    began = time.monotonic()
    with connected(served) as (asked, headers):
        asked.request("GET", "/runs", headers=headers)
        assert asked.getresponse().status == 200 and time.monotonic() - began < 5
    for raw in slow:
        assert _received(raw) == b""
        raw.close()
    assert b" 408 " in _received(body)
    body.close()


def test_open_streams_do_not_delay_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CLOSE_S", 60)  # for streams that do not end by themselves
    with PageServer.listening(tmp_path, Path("runs"), "127.0.0.1", 0) as made:
        thread = threading.Thread(target=made.serve, daemon=True)
        thread.start()
        with connected(made) as (asked, headers):
            asked.request("GET", "/live", headers=headers)
            answer = asked.getresponse()
            assert answer.readline() == b"retry: 1000\n" and made.context.live.num_streams == 1
            began = time.monotonic()
            made.stop()
            thread.join(60)
            answer.close()
        assert time.monotonic() - began < 30 and not thread.is_alive()
