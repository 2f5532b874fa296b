"""The server of the page: chooses a port, opens the browser, and serves until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from lora_rocm.commands.output import unheard
from lora_rocm.errors import MachineError, UserError
from lora_rocm.ui.access import Access
from lora_rocm.ui.application import create_app
from lora_rocm.ui.context import UiContext
from lora_rocm.ui.folders import Folders
from lora_rocm.ui.security import TOKEN

PORTS_TRIED = 50
HEADERS_TIMEOUT_S = 15.0
"""Longest time in which a request's headers have to arrive."""
MAX_CONNECTIONS = 256
CLOSE_S = 3
BACKLOG = 256


class TimedProtocol(H11Protocol):
    """The protocol of uvicorn, which otherwise waits without end for the rest of a request's headers."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Run a timer while the headers of a request are incomplete."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEADERS_TIMEOUT_S, self._close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        self._timer = None
        if (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing():
            self.transport.close()


class UiServer(uvicorn.Server):
    """The server, which ends its live streams first when it is asked to end."""

    def __init__(self, config: uvicorn.Config, context: UiContext) -> None:
        super().__init__(config)
        self.context = context

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.context.close()
        super().handle_exit(sig, frame)


def listen(host: str, port: int, notify: Callable[[str], None]) -> socket.socket:
    """Return a socket that listens on this port, or on the next free one, which is reported.

    Raises:
        UserError: host-unknown: the host is not an address or name of this machine.
        MachineError: no-port: no port is free.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError):
        fix = "Give an address of this machine, such as 127.0.0.1 or 0.0.0.0."
        raise UserError("host-unknown", "There is no such host.", where=f"--host {host}", fix=fix) from None
    fault: OSError | None = None
    for number in [port] if port == 0 else range(port, min(port + PORTS_TRIED, 65536)):
        found = socket.socket(
            family, socket.SOCK_STREAM, socket.IPPROTO_TCP
        )  # else asyncio sets no TCP_NODELAY: +40 ms
        try:
            _bind_alone(found, (str(address[0]), number))
            found.listen(BACKLOG)
        except OSError as error:
            found.close()
            fault = error
            continue
        if number != port:
            notify(f"Port {port} is in use, so the page uses port {number}.")
        return found
    fix = "Give another port with --port, or an address of this machine with --host."
    what = f"The page cannot listen: {fault}."
    raise MachineError("no-port", what, where=f"{host}, ports {port} to {port + PORTS_TRIED - 1}", fix=fix)


def _bind_alone(found: socket.socket, address: tuple[str, int]) -> None:
    """Bind a socket so that no other program can bind the same port on Windows, and a restart can elsewhere."""
    if sys.platform == "win32":
        found.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
    else:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind(address)


def link_of(host: str, access: Access) -> str:
    """Return the link that opens the page in a browser."""
    name = host
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:  # every address: the link needs one
            name = _address_here() or "127.0.0.1"
    name = f"[{name}]" if ":" in name else name
    return f"http://{name}:{access.port}/?{TOKEN}={access.token}"


def _address_here() -> str:
    """Return this machine's address in its network; empty if it has none. Nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # reserved for documentation
        return str(probe.getsockname()[0])
    return ""


@dataclass
class PageServer:
    """A server that listens, and answers once ``serve`` is called. As a context it closes its socket at the end.

    Attributes:
        link: the address with the token.
        context: the values that its handlers share.
    """

    link: str
    context: UiContext
    _server: UiServer
    _socket: socket.socket

    @classmethod
    def listening(
        cls, working: Path, runs: Path, host: str, port: int, notify: Callable[[str], None] = unheard
    ) -> PageServer:
        """Return a server that listens on a free port.

        Args:
            working: the folder with the files that the page may show and change.
            runs: the folder of runs, relative to ``working``.
            host: address to listen on.
            port: first port to try; 0 for any.
            notify: receives lines for the terminal.

        Raises:
            UserError, MachineError: see ``listen``.
        """
        found = listen(host, port, notify)
        access = Access(found.getsockname()[1])
        context = UiContext(Folders(working, runs), access, notify)
        server = UiServer(_config(create_app(context, host)), context)
        return cls(link_of(host, access), context, server, found)

    def serve(self) -> None:
        """Answer requests until Ctrl-C, SIGTERM or ``stop``."""
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again after it has ended
            self._server.run(sockets=[self._socket])
        self.context.wait_closed(CLOSE_S)

    def stop(self) -> None:
        """Ask the server to end, from any thread."""
        self.context.close()
        self._server.should_exit = True

    def __enter__(self) -> PageServer:
        return self

    def __exit__(self, *raised: object) -> None:
        self.context.close()
        self._socket.close()


def _config(app: ASGIApp) -> uvicorn.Config:
    """Return the settings of uvicorn. It logs nothing: requests contain the user's file names."""
    log = logging.getLogger("uvicorn")
    log.addHandler(logging.NullHandler())
    log.propagate = False
    return uvicorn.Config(
        app,
        http=TimedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=CLOSE_S,
    )


def open_browser(link: str) -> None:
    """Open a link in the user's browser, without waiting. Without a desktop nothing happens."""
    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return
    threading.Thread(target=webbrowser.open, args=(link,), daemon=True, name="ui-browser").start()
