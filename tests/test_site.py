"""The site in ``docs/``: it builds strictly without a network, and its pages load nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from scripts import docs_site

ROOT = Path(__file__).parents[1]
WITHOUT_NETWORK = """
import socket, sys
def refuse(*_):
    raise OSError("this build has no network")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
from mkdocs.__main__ import cli
cli(sys.argv[1:])
"""
LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}
"""Tag -> its attribute that a browser fetches at once. A link for the reader (``<a>``) is none of these."""


class Loaded(HTMLParser):
    """The files that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in LOADING and values.get("rel") != "canonical":
            self.found.append(values.get(LOADING[tag]) or "")


def from_elsewhere(html: str) -> list[str]:
    parser = Loaded()
    parser.feed(html)
    return [address for address in parser.found if re.match(r"(https?:)?//", address)]


def build(folder: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    """Without --quiet, which also keeps warnings from counting as errors."""
    command = [
        sys.executable,
        "-c",
        WITHOUT_NETWORK,
        "build",
        "--strict",
        "-f",
        str(config),
        "-d",
        str(folder),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="part of the dev extra")
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_builds_strictly_without_a_network(site: Path) -> None:
    pages = {path.relative_to(site).with_suffix(".md").as_posix() for path in site.rglob("*.html")}
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert written <= pages and {"project/CHANGELOG.md", "recipes/sdxl.md"} <= pages


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    found = {path.name: from_elsewhere(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    assert {name: addresses for name, addresses in found.items() if addresses} == {}
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert re.findall(r"url\(['\"]?(?:https?:)?//|@import", styles) == []


def test_what_a_page_loads_from_elsewhere_is_noticed() -> None:
    page = (
        '<link rel=canonical href="https://a"><a href="https://b">b</a><img src="https://c"><script src=//d></script>'
    )
    assert from_elsewhere(page) == ["https://c", "//d"]


@pytest.mark.parametrize(
    ("link", "code"),
    [("index.md#title", 0), ("nowhere.md", 1), ("index.md#nowhere", 1), ("../nowhere/x.py", 1)],
)
def test_a_link_to_nothing_fails_the_build(link: str, code: int, tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="part of the dev extra")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Title\n\n[text]({link})\n", encoding="utf-8")
    settings = (
        "site_name: x\ntheme: {name: mkdocs}\nplugins: []\nvalidation: {anchors: warn, unrecognized_links: warn}\n"
    )
    (tmp_path / "mkdocs.yml").write_text(settings, encoding="utf-8")
    assert build(tmp_path / "site", tmp_path / "mkdocs.yml").returncode == code


def test_links_out_of_the_docs_lead_to_pages() -> None:
    def moved(link: str, source: str = "docs/start/install.md", page: str = "start/install.md") -> str:
        return docs_site.moved_links(f"[text]({link})", source, page)

    assert moved("../../recipes/sdxl.yaml") == "[text](../recipes/sdxl.md)"
    assert moved("../../CHANGELOG.md#fixed") == "[text](../project/CHANGELOG.md#fixed)"
    assert moved("../index.md") == "[text](../index.md)"
    assert moved("https://example.com") == "[text](https://example.com)"
    assert moved("docs/start/install.md", "CHANGELOG.md", "project/CHANGELOG.md") == "[text](../start/install.md)"
    assert moved("../../scripts/install.py") == "text"
    assert moved("../../scripts/nowhere.py") == "[text](../../scripts/nowhere.py)"


def test_a_section_has_the_order_and_the_groups_of_its_index(tmp_path: Path) -> None:
    folder = tmp_path / "how-to"
    (folder / "more").mkdir(parents=True)
    index = "# How to\n\n## Data\n\n- [Z](z.md) and [A](a.md)\n\n## Nothing\n\n## Machine\n\n- [M](m.md)\n"
    for name, text in {"index": index, "a": "", "m": "", "z": "", "left": "", "more/x": ""}.items():
        (folder / f"{name}.md").write_text(text, encoding="utf-8")
    assert docs_site.section(folder, tmp_path) == [
        "how-to/index.md",
        {"Data": ["how-to/z.md", "how-to/a.md"]},
        {"Machine": ["how-to/m.md"]},
        "how-to/left.md",
        {"More": ["how-to/more/x.md"]},
    ]


def test_pictures_are_small() -> None:
    sizes = {path.name: path.stat().st_size for path in (ROOT / "docs" / "images").iterdir()}
    assert {name for name, size in sizes.items() if size > 150_000} == set()
