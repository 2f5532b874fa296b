"""The guard before all handlers: it decides who may ask, and bounds changes, sizes and the sources of a page.

In this order: the Host header (another site's name that resolves to this machine is refused), the token of the link,
the cookie, the origin of the request, the proof of a state change, and the size. Every answer gets the headers that
keep a page from loading anything from elsewhere.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lora_rocm.ui.access import Access, is_same

TOKEN, CSRF_FIELD, CSRF_HEADER = "token", "csrf", "x-csrf"
SAFE_METHODS = ("GET", "HEAD")
URLENCODED = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data"
MAX_BODY_BYTES = 1 << 20
MAX_UPLOAD_BYTES = 1 << 29
"""Largest body of a request with files. They are accepted only with the header of the proof, so before any is read."""
PIECE_TIMEOUT_S = 20.0
"""Longest wait for the next piece of a request's body."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; font-src 'self'; "
    "connect-src 'self'; manifest-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # with no-referrer, a plain HTML form would send no origin
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}
"""Headers of every answer that does not set them itself."""


class Refusal(Exception):
    """A request that is not passed on. status: the HTTP status. text: the reason, which the client gets."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


class TooLargeError(HTTPException):
    """The body is larger than allowed. A handler that reads the body passes it on."""

    def __init__(self) -> None:
        super().__init__(413, "This request is too large.")


class TooSlowError(HTTPException):
    """The client did not send the next piece of the body in time. A handler that reads the body passes it on."""

    def __init__(self) -> None:
        super().__init__(408, "This request took too long to arrive.")


class RequestGuard:
    """Passes on only the requests of this server's user.

    Args:
        app: the application with the handlers.
        access: the server's secrets.
        host: the value of ``--host``, a name or address that requests may use.
    """

    def __init__(self, app: ASGIApp, access: Access, host: str) -> None:
        self.app, self.access, self.names = app, access, frozenset(_own_names(host))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            headers = Headers(scope=scope)
            self._require_host(headers)
            if (answer := self._with_token(scope)) is not None:
                await answer(scope, receive, _with_headers(send))
                return
            self._require_cookie(headers)
            self._require_own_page(scope, headers)
            receive = await self._proven(scope, headers, _timed(receive))
        except Refusal as refusal:
            await PlainTextResponse(refusal.text + "\n", refusal.status)(scope, receive, _with_headers(send))
            return
        except HTTPException as error:
            answer = PlainTextResponse(f"{error.detail}\n", error.status_code)
            await answer(scope, receive, _with_headers(send))
            return
        await self.app(scope, receive, _with_headers(send))

    def _require_host(self, headers: Headers) -> None:
        """Refuse a name that is not this machine's: a page from elsewhere could resolve its own name to it."""
        hosts = headers.getlist("host")
        name, port = _host_and_port(hosts[0]) if len(hosts) == 1 else ("", None)
        if not (name in self.names or _is_address(name)) or port != self.access.port:
            raise Refusal(421, "This server does not answer under this name. Use the link that lora-rocm ui printed.")

    def _with_token(self, scope: Scope) -> Response | None:
        """Return the answer to a link with the token: the cookie, and the same address without the token."""
        pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for name, value in pairs if name == TOKEN]
        if scope["method"] not in SAFE_METHODS or not given:
            return None
        if not is_same(given[0], self.access.token):
            raise Refusal(403, "This link is from another start of lora-rocm ui. Open the link that it printed last.")
        rest = urlencode([(name, value) for name, value in pairs if name != TOKEN])
        path = "/" + scope["path"].lstrip("/\\")  # "//name" would lead to another server
        answer = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
        answer.set_cookie(self.access.cookie_name, self.access.cookie, httponly=True, samesite="strict", path="/")
        return answer

    def _require_cookie(self, headers: Headers) -> None:
        pairs = (part.strip().partition("=") for part in headers.get("cookie", "").split(";"))
        given = next((value for name, _, value in pairs if name == self.access.cookie_name), "")
        if not is_same(given, self.access.cookie):
            raise Refusal(403, "Open the link that lora-rocm ui printed in its terminal: it contains the token.")

    def _require_own_page(self, scope: Scope, headers: Headers) -> None:
        """Refuse requests that another site's page makes. A link there may be followed, but changes nothing."""
        site, mode = headers.get("sec-fetch-site", "none"), headers.get("sec-fetch-mode", "")
        follows_link = scope["method"] in SAFE_METHODS and mode == "navigate"
        if site not in ("none", "same-origin") and not follows_link:
            raise Refusal(403, "A page from elsewhere made this request, so it is refused.")
        origin = headers.get("origin")
        if origin is not None and scope["method"] not in SAFE_METHODS:
            name, port = _host_and_port(origin.partition("://")[2])
            own, own_port = _host_and_port(headers["host"])
            if (name, port or 80) != (own, own_port):
                raise Refusal(403, "A page from elsewhere made this request, so it is refused.")

    async def _proven(self, scope: Scope, headers: Headers, receive: Receive) -> Receive:
        """Check the proof of a state change, and bound the body. Return the function from which handlers read it."""
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        limit = MAX_UPLOAD_BYTES if kind == MULTIPART else MAX_BODY_BYTES
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > limit:
            raise TooLargeError
        if scope["method"] in SAFE_METHODS:
            return _bounded(receive, limit)
        if is_same(headers.get(CSRF_HEADER, ""), self.access.csrf):
            return _bounded(receive, limit)
        if kind == URLENCODED:  # a plain HTML form: the proof is a field
            body = await _whole(_bounded(receive, limit))
            try:
                fields = parse_qs(body.decode("utf-8", "replace"), max_num_fields=10_000)
            except ValueError:
                raise Refusal(400, "There are too many fields.") from None
            if is_same(fields.get(CSRF_FIELD, [""])[0], self.access.csrf):
                return _again(body, receive)
        raise Refusal(403, "This request lacks the proof that a page of this server made it. Reload the page.")


def _own_names(host: str) -> set[str]:
    """Return the names of this machine. Addresses are accepted as well: no page can resolve another name to them."""
    machine = socket.gethostname().lower()
    return {"localhost", host.lower(), machine, f"{machine}.local"} - {""}


def _host_and_port(text: str) -> tuple[str, int | None]:
    """Return the name and port of a Host header; 80 if it has no port, and None if it is malformed."""
    try:
        found = urlsplit(f"//{text}")
        name, port = found.hostname or "", found.port or 80
    except ValueError:
        return "", None
    is_plain = not (found.path or found.query or found.fragment or "@" in text)
    return (name, port) if is_plain else ("", None)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _with_headers(send: Send) -> Send:
    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = {name.lower() for name, _ in message["headers"]}
            added = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in given]
            message = {**message, "headers": [*message["headers"], *added]}
        await send(message)

    return guarded


def _timed(receive: Receive) -> Receive:
    """Bound the wait for each piece of the body. A handler that waits for the end of the connection is not affected."""
    is_complete = [False]

    async def timed() -> Message:
        if is_complete[0]:
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), PIECE_TIMEOUT_S)
        except TimeoutError:
            raise TooSlowError from None
        is_complete[0] = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    return timed


def _bounded(receive: Receive, limit: int) -> Receive:
    num_bytes = [0]

    async def bounded() -> Message:
        message = await receive()
        num_bytes[0] += len(message.get("body", b""))
        if num_bytes[0] > limit:
            raise TooLargeError
        return message

    return bounded


async def _whole(receive: Callable[[], Awaitable[Message]]) -> bytes:
    pieces = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            break
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            break
    return b"".join(pieces)


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a function that gives a body that was read already."""
    given = [False]

    async def again() -> Message:
        if given[0]:
            return await receive()
        given[0] = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
