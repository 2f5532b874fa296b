"""Debian's Firefox over WebDriver BiDi, which it speaks itself: one tab, through a plain WebSocket.

It has only the commands that the tests need. Messages without a number are events; errors of the console are collected.
"""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WAIT_S = 60.0
PREFERENCES = """\
user_pref("app.update.enabled", false);
user_pref("browser.shell.checkDefaultBrowser", false);
user_pref("datareporting.policy.dataSubmissionEnabled", false);
user_pref("network.captive-portal-service.enabled", false);
user_pref("remote.active-protocols", 1);
user_pref("ui.prefersReducedMotion", 1);
"""


class BidiError(Exception):
    """Firefox refused a command, or closed the connection."""


class WebSocket:
    """A client of the WebSocket protocol (RFC 6455) for text messages."""

    def __init__(self, port: int, path: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), WAIT_S)
        key = base64.b64encode(os.urandom(16)).decode()
        lines = (
            f"GET {path} HTTP/1.1",
            f"Host: 127.0.0.1:{port}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {key}",
            "Sec-WebSocket-Version: 13",
        )
        self._socket.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("ascii"))
        answer = b""
        while not answer.endswith(b"\r\n\r\n"):
            answer += self._exactly(1)
        if b" 101 " not in answer.partition(b"\r\n")[0]:
            raise BidiError(answer.decode("latin-1"))

    def send(self, text: str) -> None:
        """Send a message, masked as the protocol wants it."""
        self._frame(0x1, text.encode("utf-8"))

    def receive(self) -> str:
        """Return the next message."""
        whole = b""
        while True:
            head, length = self._exactly(2)
            if length == 126:
                (length,) = struct.unpack(">H", self._exactly(2))
            elif length == 127:
                (length,) = struct.unpack(">Q", self._exactly(8))
            content, kind = self._exactly(length), head & 0x0F
            if kind == 0x8:
                raise BidiError("Firefox closed the connection")
            if kind == 0x9:
                self._frame(0xA, content)
            elif kind in (0x0, 0x1):
                whole += content
                if head & 0x80:
                    return whole.decode("utf-8")

    def close(self) -> None:
        self._socket.close()

    def _frame(self, kind: int, content: bytes) -> None:
        length, mask = len(content), os.urandom(4)
        if length < 126:
            size = bytes([0x80 | length])
        elif length < 1 << 16:
            size = struct.pack(">BH", 0x80 | 126, length)
        else:
            size = struct.pack(">BQ", 0x80 | 127, length)
        repeated = (mask * (length // 4 + 1))[:length]
        masked = (int.from_bytes(content, "big") ^ int.from_bytes(repeated, "big")).to_bytes(length, "big")
        self._socket.sendall(bytes([0x80 | kind]) + size + mask + masked)

    def _exactly(self, num_bytes: int) -> bytes:
        pieces, left = [], num_bytes
        while left:
            piece = self._socket.recv(min(left, 1 << 20))
            if not piece:
                raise BidiError("Firefox closed the connection")
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)


@dataclass
class FirefoxTab:
    """A tab of Firefox. faults: errors of scripts and of the policy."""

    link: WebSocket
    context: str = ""
    faults: list[str] = field(default_factory=list)
    _number: int = 0

    def ask(self, method: str, **values: Any) -> Any:
        """Send a command and return its result."""
        self._number += 1
        self.link.send(json.dumps({"id": self._number, "method": method, "params": values}))
        while True:
            found = json.loads(self.link.receive())
            if found.get("id") == self._number:
                if found.get("type") == "error":
                    raise BidiError(f"{method}: {found.get('error')}: {found.get('message')}")
                return found["result"]
            if found.get("method") == "log.entryAdded" and found["params"]["level"] == "error":
                self.faults.append(str(found["params"]["text"]))

    def open(self, address: str) -> None:
        """Open an address, and wait until it is loaded."""
        try:
            self.ask("browsingContext.navigate", context=self.context, url=address, wait="complete")
        except BidiError as error:
            if "NS_BINDING_ABORTED" not in str(error):
                raise
            time.sleep(1)  # the page before it was just going elsewhere
            self.ask("browsingContext.navigate", context=self.context, url=address, wait="complete")

    def resize(self, width: int, height: int) -> None:
        self.ask("browsingContext.setViewport", context=self.context, viewport={"width": width, "height": height})

    def run(self, expression: str) -> Any:
        """Return the value of an expression in the page, as JSON has it."""
        text = f"Promise.resolve({expression}).then((value) => JSON.stringify(value ?? null))"
        target = {"context": self.context}
        found = self.ask("script.evaluate", expression=text, target=target, awaitPromise=True)
        if found["type"] != "success":
            raise BidiError(f"{expression[:200]}: {found['exceptionDetails']['text']}")
        return json.loads(found["result"]["value"])

    def load(self, script: str) -> None:
        """Run a script in the page."""
        self.ask("script.evaluate", expression=script, target={"context": self.context}, awaitPromise=False)

    def wait(self, expression: str) -> Any:
        """Wait until an expression is true, and return its value."""
        end_s = time.monotonic() + WAIT_S
        while time.monotonic() < end_s:
            try:
                if found := self.run(expression):
                    return found
            except BidiError as error:  # the page is being replaced
                if "no such frame" not in str(error) and "Abort" not in str(error):
                    raise
            time.sleep(0.1)
        raise BidiError(f"not in {WAIT_S} s: {expression}")

    def click(self, selector: str) -> None:
        """Click in the middle of an element with the mouse."""
        place = self.wait(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null;"
            " e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            " return [Math.round(r.left + r.width / 2), Math.round(r.top + r.height / 2)]; })()"
        )
        down, up = {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}
        moves = [{"type": "pointerMove", "x": place[0], "y": place[1]}, down, up]
        actions = [{"type": "pointer", "id": "mouse", "actions": moves}]
        self.ask("input.performActions", context=self.context, actions=actions)

    def press(self, keys: str) -> None:
        """Press keys one after another."""
        strokes = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        actions = [{"type": "key", "id": "keyboard", "actions": strokes}]
        self.ask("input.performActions", context=self.context, actions=actions)


@contextmanager
def firefox(program: str, profile: Path) -> Iterator[FirefoxTab]:
    """Start Firefox with an empty profile, and open a tab in it."""
    profile.mkdir(parents=True)
    (profile / "user.js").write_text(PREFERENCES, encoding="utf-8")
    words = [program, "--headless", "--no-remote", "--profile", str(profile), "--remote-debugging-port", "0"]
    environment = {**os.environ, "HOME": str(profile), "MOZ_CRASHREPORTER_DISABLE": "1"}
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stderr is not None
        port = None
        for line in process.stderr:
            if found := re.search(rb"BiDi listening on ws://127\.0\.0\.1:(\d+)", line):
                port = int(found[1])
                break
        if port is None:
            raise BidiError("Firefox ended without listening")
        threading.Thread(target=process.stderr.read, daemon=True).start()  # so that the pipe never fills
        tab = FirefoxTab(WebSocket(port, "/session"))
        try:
            tab.ask("session.new", capabilities={})
            tab.ask("session.subscribe", events=["log.entryAdded"])
            tab.context = tab.ask("browsingContext.create", type="tab")["context"]
            yield tab
        finally:
            tab.link.close()
            process.terminate()
