"""The guard of the page: links, cookies, other sites, other names of this machine, state changes, sizes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from starlette.routing import Route
from starlette.testclient import TestClient

from lora_rocm.errors import UserError
from lora_rocm.ui import security
from lora_rocm.ui.application import PARTS
from lora_rocm.ui.folders import Folders
from lora_rocm.ui.security import HEADERS
from tests.program import snapshot
from tests.ui.hostile_runs import HOSTILE, IMAGE, SCRIPT, TURNED, with_hostile_texts, with_links_out
from tests.ui.site import ADDRESS, PORT, Site, code_of

CHANGING = [
    route.path for part in PARTS for route in part.routes if isinstance(route, Route) and "POST" in route.methods
]
READING = [route.path for part in PARTS for route in part.routes if isinstance(route, Route) and "GET" in route.methods]
OF_RUNS = [path for path in READING if path.split("/")[1] in ("", "runs", "choose", "try", "machine")]
"""Addresses that read runs."""


def test_nobody_gets_in_without_the_link(site: Site) -> None:
    for path in ("/", "/live", "/static/page.css", *READING):
        assert site.stranger.get(path).status_code == 403, path
    assert site.stranger.get("/", params={"token": "x" * 43}).status_code == 403
    assert site.stranger.get("/", params={"token": "é"}).status_code == 403
    assert site.stranger.get("/", headers={"cookie": f"{site.context.access.cookie_name}=x"}).status_code == 403


def test_the_link_gives_a_cookie_and_its_token_disappears(site: Site) -> None:
    link = {"token": site.context.access.token, "dir": "a b"}
    answer = site.stranger.get("/runs", params=link, follow_redirects=False)
    cookie = answer.headers["set-cookie"].lower()
    assert answer.status_code == 303 and answer.headers["location"] == "/runs?dir=a+b"
    assert "httponly" in cookie and "samesite=strict" in cookie and site.context.access.token not in cookie
    assert site.stranger.get("/runs").status_code == 200


def test_the_link_never_leads_to_another_server(site: Site) -> None:
    for path in ("//evil.example/", "/\\evil.example/", "///evil.example"):
        answer = site.stranger.get(
            f"{ADDRESS}{path}", params={"token": site.context.access.token}, follow_redirects=False
        )
        assert re.match(r"/(?![/\\])", answer.headers.get("location", "/x")), path


@pytest.mark.parametrize(
    ("host", "is_answered"),
    [
        (f"127.0.0.1:{PORT}", True),
        (f"localhost:{PORT}", True),
        (f"[::1]:{PORT}", True),
        (f"192.168.1.7:{PORT}", True),
        (f"evil.example:{PORT}", False),
        (f"127.0.0.1.evil.example:{PORT}", False),
        (f"localhost.evil.example:{PORT}", False),
        ("127.0.0.1:80", False),
        ("127.0.0.1", False),
        (f"user@127.0.0.1:{PORT}", False),
        (f"127.0.0.1:{PORT}/x", False),
        ("", False),
        (f"[::1:{PORT}", False),
    ],
)
def test_only_names_of_this_machine_are_answered(host: str, is_answered: bool, site: Site) -> None:
    """A page of another site could resolve its own name to this machine (DNS rebinding), but sends that name."""
    assert (site.client.get("/", headers={"host": host}).status_code == 200) is is_answered


@pytest.mark.parametrize("path", CHANGING)
def test_no_change_without_the_proof(path: str, site: Site) -> None:
    bare = TestClient(site.client.app, ADDRESS, cookies=site.client.cookies)
    assert bare.post(path, data={"folder": "."}).status_code == 403
    assert bare.post(path, data={"folder": ".", "csrf": "0" * 64}).status_code == 403
    assert bare.post(path, files={"csrf": b"x"}).status_code == 403
    assert bare.post(path, json={"csrf": site.context.access.csrf}).status_code == 403
    proof = {"X-CSRF": site.context.access.csrf}
    for method in ("PUT", "DELETE", "PATCH", "POST"):
        other = {"origin": "http://evil.example"}
        assert bare.request(method, path, headers=proof | other).status_code == 403
        neighbour = {"origin": "http://127.0.0.1:8188"}  # another program's page on this machine
        assert bare.request(method, path, headers=proof | neighbour).status_code == 403
        assert bare.request(method, path, headers=proof | {"sec-fetch-site": "same-site"}).status_code == 403


def test_a_plain_form_proves_itself_by_a_field(site: Site) -> None:
    bare = TestClient(site.client.app, ADDRESS, cookies=site.client.cookies)
    (site.folder / "more").mkdir()
    answer = bare.post("/machine/folders", data={"folder": "more", "csrf": site.context.access.csrf})
    assert answer.status_code == 200 and str(site.folder / "more") in answer.text


def test_another_page_cannot_read(site: Site) -> None:
    fetched = {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"}
    assert site.client.get("/", headers=fetched).status_code == 403
    followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert site.client.get("/", headers=followed).status_code == 200  # a link, which the cookie is not sent with


def test_every_answer_forbids_what_a_page_does_not_need(site: Site) -> None:
    answers = [site.client.get(path) for path in ("/", "/nothing", "/static/page.css", "/runs/view?dir=x")]
    answers.append(site.stranger.get("/"))
    for answer in answers:
        assert HEADERS.keys() <= answer.headers.keys()
    policy = answers[0].headers["content-security-policy"]
    assert "unsafe" not in policy and "http" not in policy and "default-src 'none'" in policy


PATHS_OUT = (
    "..",
    "../other",
    "runs/../../other",
    "/etc/passwd",
    "~",
    "runs/\0",
    "a" * 5000,
    "\ud800",
    "C:\\Windows",
    "//x/y",
)


@pytest.mark.parametrize("text", PATHS_OUT, ids=range(len(PATHS_OUT)))
def test_no_path_leads_out_of_the_named_folders(text: str, site: Site) -> None:
    (site.folder.parent / "other").mkdir()
    try:
        found = site.context.folders.resolve(text)
    except UserError as error:
        assert error.code == "outside-folders"
    else:
        assert found.is_relative_to(site.folder)  # an odd name in the folder is only a name
    answer = site.client.get("/runs/view", params={"dir": text.encode("utf-8", "replace")})
    assert answer.status_code in (403, 404, 422)


def test_a_link_out_is_refused_and_one_inside_is_followed(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside / "deep", outside):
        folder.mkdir(parents=True)
    os.symlink(outside, inside / "leads-out")
    os.symlink(inside / "deep", inside / "stays")
    folders = Folders(inside, Path("runs"))
    assert folders.resolve("stays/x") == inside.resolve() / "deep" / "x"
    with pytest.raises(UserError) as raised:
        folders.resolve("leads-out/x")
    assert raised.value.code == "outside-folders"
    folders.add(outside, "added")
    assert folders.resolve("leads-out/x") == outside.resolve() / "x"  # control: once named, it may be shown


@pytest.mark.parametrize("write", HOSTILE, ids=lambda write: write.__name__)
def test_a_hostile_run_is_shown_as_text(write: object, site: Site) -> None:
    run_dir = site.run_dir("hostile")
    write(run_dir)  # type: ignore[operator]
    for path in OF_RUNS:
        answer = site.client.get(path, params={"dir": "runs/hostile"})
        assert answer.status_code < 500 or code_of(answer.text) not in ("", "page-failed"), f"{path}: {answer.text}"
        assert SCRIPT not in answer.text and IMAGE not in answer.text and TURNED not in answer.text
        assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\u202e]", answer.text)


def test_hostile_names_of_runs_are_shown_as_text(site: Site) -> None:
    names = ["<b>x</b>", "a&b=c#d", "%2e%2e", "{{1234*5678}}", "\u202egpj", "a'b", "ü ñ"]
    for name in names:
        with_hostile_texts(site.run_dir(name))
    text = site.get("/runs")
    assert "<b>x</b>" not in text and "\u202e" not in text and "7006652" not in text
    for address in re.findall(r'href="(/runs/view[^"]*)"', text):
        assert site.client.get(address.replace("&amp;", "&")).status_code == 200


def test_no_file_outside_is_served_by_a_link_in_a_run(site: Site, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret", encoding="utf-8")
    run_dir = site.run_dir("linked")
    with_links_out(run_dir, secret)
    for path in OF_RUNS:
        for file in ("", "samples/step-00000020/00.png", "report.html", "../../../secret.txt", str(secret)):
            answer = site.client.get(path, params={"dir": "runs/linked", "file": file})
            assert "the secret" not in answer.text, (path, file)


def test_looking_at_a_run_changes_nothing_in_it(site: Site) -> None:
    """So the supervisor cannot notice whether a page exists."""
    run_dir = site.run()
    before = snapshot(run_dir.path)
    for path in READING:
        if path != "/runs/report":  # it writes the report again, as ``lora-rocm report`` does
            site.client.get(path, params={"dir": "runs/a-run", "field": "loss", "file": "samples/step-00000020/00.png"})
    assert snapshot(run_dir.path) == before


def test_a_large_body_is_refused_before_it_is_read(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    assert site.client.post("/machine/folders", content=b"x" * (security.MAX_BODY_BYTES + 1)).status_code == 413

    def endless() -> object:
        yield from (b"folder=" + b"x" * 65536 for _ in range(64))

    kind = {"content-type": security.URLENCODED}
    assert site.client.post("/machine/folders", content=endless(), headers=kind).status_code == 413
    many = "&".join(f"a{number}=1" for number in range(20_000))
    assert site.client.post("/machine/folders", content=many, headers=kind).status_code < 500
