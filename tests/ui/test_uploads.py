"""Files that a browser sends: bounded, decoded, named safely, and never over another file."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lora_rocm.errors import UserError
from lora_rocm.ui.image_set import uploads
from lora_rocm.ui.image_set.uploads import usable_name
from tests.ui.site import Site, code_of


def png(colour: int = 0) -> bytes:
    buffer = BytesIO()
    Image.new("RGB", (32, 32), (colour, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def send(site: Site, *files: tuple[str, bytes], folder: str = "new ü") -> Any:
    listed = [("files", (name, content)) for name, content in files]
    return site.client.post("/images/upload", params={"dir": folder}, files=listed)


@pytest.fixture
def folder(site: Site) -> Path:
    """A new folder, made in the page."""
    answer = site.client.post("/images/new", data={"name": "new ü"}, follow_redirects=False)
    assert answer.status_code == 303 and "new" in answer.headers["location"]
    assert "data-to" in site.get("/images/view", dir="new ü")
    return site.folder / "new ü"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_images_and_captions_are_saved(site: Site, folder: Path) -> None:
    found = send(site, ("ä b.png", png()), ("ä b.txt", "schön".encode()), ("sub\\c.PNG", png(9))).json()
    assert found == {"saved": ["ä b.png", "ä b.txt", "c.PNG"], "refused": []}
    assert (folder / "ä b.png").read_bytes() == png() and names(folder) == ["c.PNG", "ä b.png", "ä b.txt"]
    rows = site.client.get("/images/items", params={"dir": "new ü"}).json()["rows"]
    assert [row[:2] for row in rows] == [["c.PNG", ""], ["ä b.png", "schön"]]


def test_no_file_is_replaced(site: Site, folder: Path) -> None:
    assert send(site, ("a.png", png(1))).json()["saved"] == ["a.png"]
    assert [name for name, _ in send(site, ("a.png", png(2)), ("a.png", png(1))).json()["refused"]] == ["a.png"] * 2
    assert (folder / "a.png").read_bytes() == png(1)
    (folder / "link.png").symlink_to(site.folder.parent / "elsewhere.png")
    assert send(site, ("link.png", png())).json()["saved"] == [] and not (site.folder.parent / "elsewhere.png").exists()


def test_what_is_neither_image_nor_caption_is_refused(
    site: Site, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "MAX_IMAGE_BYTES", 500)
    files = [("a.png", b"no image"), ("a.exe", b""), ("b.png", png() + bytes(500)), ("a.txt", b"\xff\xfe\x00x")]
    files += [("long.txt", b"x" * 70_000), (".hidden.png", png()), ("nul.png", png()), ("a\u202e.png", png())]
    found = send(site, *files).json()
    assert found["saved"] == [] and len(found["refused"]) == len(files) and names(folder) == []


@pytest.mark.parametrize(
    "name", ["", "x", "..", "../..", "a:b.png", "con.png", " .png", "a\x00.png", "a" * 300 + ".png"]
)
def test_a_name_that_cannot_be_used_is_refused(name: str) -> None:
    with pytest.raises(UserError) as raised:
        usable_name(name)
    assert raised.value.code == "upload-refused"
    assert usable_name("../../etc/a.png") == "a.png"  # only the last part counts


def test_files_go_only_into_named_folders(site: Site, folder: Path) -> None:
    for place, code in (("..", "outside-folders"), ("nothing", "no-folder")):
        assert code_of(send(site, ("a.png", png()), folder=place).text) == code
    for name, code in (("..", "folder-name"), ("a/b", "folder-name"), ("new ü", "folder-exists")):
        assert code_of(site.client.post("/images/new", data={"name": name}).text) == code
    refused = site.client.post(
        "/images/upload", params={"dir": "new ü"}, files={"files": ("a.png", png())}, headers={"X-CSRF": "wrong"}
    )
    assert refused.status_code == 403 and names(folder) == []
