"""Every route of the application, also of a future part: who may ask, the policy, and paths."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from lora_rocm.hardware.app_dir import own_app_dir
from lora_rocm.ui.application import PARTS
from lora_rocm.ui.security import HEADERS, POLICY
from tests.markers import markers
from tests.test_architecture import package_modules
from tests.ui.route_table import (
    SAFE,
    Entry,
    entries,
    fields_outside,
    fill,
    named_in,
    recorded_names,
    usual_fields,
    watched,
)
from tests.ui.site import ADDRESS, PORT, Site

ENTRIES = entries()
CHANGING = [entry for entry in ENTRIES if entry.method not in SAFE]
READING = [entry for entry in ENTRIES if entry.method in SAFE]
SECRET = "the secret of another folder"
NAMED_BY_USER = {(entry.path, field) for entry in ENTRIES for field in fields_outside(entry.endpoint)}
"""Fields that name a folder anywhere on the machine: a comment in the handler has the reason."""


NAMING = {path for path, _ in NAMED_BY_USER}


class Reached:
    """A fake of the application behind the guard."""

    def __init__(self) -> None:
        self.requests = list[str]()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.requests.append(f"{scope['method']} {scope['path']}")
        await PlainTextResponse("reached")(scope, receive, send)


@pytest.fixture
def behind(site: Site) -> Reached:
    reached = Reached()
    site.client.app.app = reached  # type: ignore[attr-defined]
    return reached


def test_each_part_has_its_routes_in_the_table() -> None:
    paths = {entry.path for entry in ENTRIES}
    assert {part.path for part in PARTS} <= paths and len(PARTS) >= 8
    assert len(CHANGING) >= 40 and len(READING) >= 50  # the table is read, not empty


def test_a_change_needs_proof_cookie_host_and_origin(site: Site, behind: Reached) -> None:
    """Each of the four alone is refused before a handler sees the request. The last request is the control."""
    own = f"http://127.0.0.1:{PORT}"
    whole = {
        "x-csrf": site.context.access.csrf,
        "cookie": f"{site.context.access.cookie_name}={site.context.access.cookie}",
        "host": f"127.0.0.1:{PORT}",
        "origin": own,
    }
    wrong = {
        "x-csrf": [None, "", "0" * len(whole["x-csrf"])],
        "cookie": [None, f"{site.context.access.cookie_name}=x", f"other={site.context.access.cookie}"],
        "host": ["evil.example", f"evil.example:{PORT}", "127.0.0.1:1"],
        "origin": ["http://evil.example", "null", "http://127.0.0.1:1", f"http://evil.example:{PORT}"],
    }
    bare = TestClient(site.client.app, ADDRESS)
    for entry in CHANGING:
        for name, value in ((name, value) for name, values in wrong.items() for value in values):
            headers = {key: each for key, each in (whole | {name: value}).items() if each is not None}
            answer = bare.request(entry.method, entry.path, headers=headers, data={"a": "b"})
            assert answer.status_code in (403, 421) and not behind.requests, (str(entry), name, value)
            assert answer.headers["content-security-policy"] == POLICY
        assert bare.request(entry.method, entry.path, headers=whole).text == "reached"
        assert behind.requests == [str(entry)]
        behind.requests.clear()


def test_reading_needs_cookie_and_host(site: Site, behind: Reached) -> None:
    for path in ("/live", "/static/page.css", *(entry.path for entry in READING)):
        assert site.stranger.get(path).status_code == 403
        assert site.client.get(path, headers={"host": f"evil.example:{PORT}"}).status_code == 421
        fetched = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}
        assert site.client.get(path, headers=fetched).status_code == 403
        assert not behind.requests, path
        assert site.client.get(path).text == "reached"
        behind.requests.clear()


def test_a_link_changes_nothing(site: Site) -> None:
    reading = {entry.path for entry in READING}
    for entry in CHANGING:
        for method in ("GET", "HEAD", "PUT", "DELETE", "PATCH"):
            if entry.path not in reading:  # else the same address shows what the other method changes
                assert site.client.request(method, entry.path).status_code == 405, (method, entry.path)


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No child process starts. The audit hook still sees its arguments."""

    def refused(self: Any, words: Any, *rest: Any, **more: Any) -> None:
        sys.audit("subprocess.Popen", words, words, more.get("cwd"), None)
        raise OSError("no processes in this test")

    monkeypatch.setattr(subprocess.Popen, "__init__", refused)
    monkeypatch.setattr(subprocess.Popen, "__del__", lambda self: None)


def settle(site: Site) -> None:
    """Wait for the work in the background."""
    for work in list(site.context.background._works.values()):
        work.wait(10)


def test_every_answer_has_the_policy(site: Site, no_processes: None) -> None:
    """Filled and without fields, for a page and for a piece of one."""
    fill(site)
    shown = set[str]()
    for entry in READING:
        for fields in (usual_fields(site, entry.path), {}):
            answer = site.client.get(entry.path, params=fields, headers={} if fields else {"hx-request": "true"})
            policy = answer.headers["content-security-policy"]
            is_own = policy == POLICY and "unsafe" not in policy
            assert is_own or (policy.startswith("sandbox allow-scripts; ") and entry.path == "/runs/report"), entry
            assert HEADERS.keys() <= answer.headers.keys() and answer.status_code < 500, (entry, answer.text[:500])
            if fields and answer.status_code == 200:
                shown.add(entry.path)
    settle(site)
    unseen = {entry.path for entry in READING} - shown
    assert len(unseen) <= 7, unseen  # controls: the fields do lead to content


def hostile_values(site: Site, outside: Path) -> list[str]:
    """Paths to a file and a folder elsewhere: by dots, whole, and by a link in the page's own folder."""
    os.symlink(outside, site.folder / "leads-out")
    for folder in ("pictures", "runs/a-run", "queue"):
        os.symlink(outside / "secret.txt", site.folder / folder / "secret.txt")
    return ["../outside/secret.txt", str(outside), "leads-out/secret.txt", "secret.txt"]


def send(site: Site, entry: Entry, fields: dict[str, str]) -> str:
    body = None if entry.method in SAFE else fields
    headers = {"hx-request": "true"}  # a refusal is then a box without the whole page
    answer = site.client.request(
        entry.method, entry.path, params=fields, data=body, headers=headers, follow_redirects=False
    )
    return answer.text


@pytest.mark.parametrize("part", [part.key for part in PARTS])
@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one path", "all paths"])
def test_no_field_leads_out_of_the_named_folders(
    part: str, is_whole: bool, site: Site, no_processes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each field of each route gets paths that lead elsewhere. Nothing there is opened, listed or changed.

    Here each field gets one of them, in turn; all of them in the slow set.
    """
    fill(site)
    outside = site.folder.parent / "outside"
    outside.mkdir()
    secret = outside / "secret.txt"
    secret.write_text(SECRET, encoding="utf-8")
    asked, texts, found = recorded_names(monkeypatch), hostile_values(site, outside), set[tuple[str, str]]()
    named = site.context.folders.named
    routes = {route.path for each in PARTS if each.key == part for route in each.routes}  # type: ignore[attr-defined]
    with watched(outside) as reached:
        for entry in (each for each in ENTRIES if each.path in routes):
            asked.clear()
            usual = usual_fields(site, entry.path)
            done, names = set[str](), {*named_in(sys.modules[entry.endpoint.__module__])} & {*usual} | {"dir"}
            while names - done:
                name = min(names - done)
                done.add(name)
                one = str(outside) if entry.path in NAMING else texts[len(done) % len(texts)]
                for text in texts if is_whole else [one]:
                    answer = send(site, entry, usual | {name: text})
                    settle(site)
                    assert SECRET not in answer, (entry, name, text)
                    if reached:
                        found.add((entry.path, name))
                        allowed = (entry.path, name) in NAMED_BY_USER
                        assert allowed, f"{entry}: the field {name} = {text!r} reached {reached[0]}"
                    # Forget what the user named
                    site.context.folders._named[:] = named
                    shutil.rmtree(own_app_dir(), ignore_errors=True)
                    for path in (path for path in outside.iterdir() if path != secret):
                        assert (entry.path, name) in NAMED_BY_USER, (entry, name, path)
                        path.unlink()
                    reached.clear()
                names |= {each for each in asked if each.isidentifier()}
    assert secret.read_text(encoding="utf-8") == SECRET
    assert found == {each for each in NAMED_BY_USER if each[0] in routes}  # the table of exceptions is exact


def test_each_reason_for_a_folder_outside_is_at_a_field_of_a_handler() -> None:
    reasons = sum(len(markers(module.source, "outside")) for module in package_modules())
    handlers = {entry.endpoint for entry in CHANGING if fields_outside(entry.endpoint)}
    assert len(handlers) == reasons > 0 and not any(fields_outside(entry.endpoint) for entry in READING)


async def _handler(request: Any) -> None:
    request.get("first")
    request.get("second")  # outside: the user names it
    request.get("third")  # outside: ok


def test_only_the_field_with_a_reason_may_lead_outside() -> None:
    assert fields_outside(_handler) == {"second"}


def test_the_watch_sees_files_and_children(tmp_path: Path, no_processes: None) -> None:
    """The control of the test above: each way out is seen."""
    outside, link = tmp_path / "out", tmp_path / "link"
    outside.mkdir()
    (outside / "a").write_text("x", encoding="utf-8")
    os.symlink(outside, link)
    ways = {
        "open": lambda: (link / "a").read_text(encoding="utf-8"),
        "os.scandir": lambda: list(os.scandir(link)),
        "os.listdir": lambda: os.listdir(outside),
        "os.mkdir": lambda: (outside / "b").mkdir(),
        "os.remove": lambda: (outside / "a").unlink(),
        "subprocess.Popen": lambda: subprocess.run(["cat", str(outside / "a")], check=False),
    }
    for name, way in ways.items():
        with watched(outside) as reached:
            try:
                way()
            except OSError:
                assert name == "subprocess.Popen"
        assert [event for event, _ in reached][:1] == [name]
