"""Masks and crops: saved where training reads them, never over an image, against their version, and undoable."""

from __future__ import annotations

import json
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lora_rocm.dataset.companions.masks import MASK
from lora_rocm.dataset.sources.scan import scan
from lora_rocm.recipe.schema import DataSection
from lora_rocm.recipe.source_sections import DataSource
from lora_rocm.ui.edits import Edits
from lora_rocm.ui.image_set.crop_rows import with_crop
from tests.ui.image_folders import write_folder, write_image
from tests.ui.site import Site, code_of

HERE = {"dir": "pictures", "name": "image 0.png"}


@pytest.fixture
def folder(site: Site) -> Path:
    """A folder with four images of 96 x 64 pixels."""
    return write_folder(site.folder / "pictures")


def png(size: tuple[int, int] = (96, 64), value: int = 0) -> bytes:
    """Return a picture as the editor sends it: grey, with all channels."""
    buffer = BytesIO()
    Image.new("RGBA", size, (value, value, value, 255)).save(buffer, "PNG")
    return buffer.getvalue()


def version_of_mask(site: Site, **query: str) -> str:
    return re.findall(r'data-version="([^"]*)"', site.get("/images/edit", **{**HERE, **query}))[0]


def save_mask(site: Site, content: bytes | None, version: str, **query: str) -> Any:
    files = None if content is None else {"mask": ("mask.png", content, "image/png")}
    given = {"params": {**HERE, **query}, "data": {"version": version}}
    return site.client.post("/images/mask", files=files, follow_redirects=False, **given)


def save_crop(site: Site, sides: tuple[object, ...], **more: str) -> Any:
    version = re.findall(r'name="version" value="([^"]*)"', site.get("/images/edit", **HERE))[0]
    fields = dict(zip(("left", "top", "width", "height"), map(str, sides), strict=True))
    data = {"version": version, **fields, **more}
    return site.client.post("/images/crop", params=HERE, data=data, follow_redirects=False)


def test_a_mask_is_where_training_finds_it(site: Site, folder: Path) -> None:
    original = (folder / "image 0.png").read_bytes()
    assert version_of_mask(site) == "missing"
    assert save_mask(site, png(value=0), "missing").status_code == 303
    data = DataSection(sources=(DataSource(path=str(folder), mask_path="beside"),))
    found = {sample.key: sample.companion(MASK) for sample in scan(data).samples}
    mask = found["image 0.png"]
    assert mask is not None and mask.place == folder / "image 0-masklabel.png" and found["image 1.png"] is None
    assert site.client.get("/images/items", params={"dir": "pictures"}).json()["rows"][0][2] == "m"
    picture = site.client.get("/images/mask", params=HERE)
    with Image.open(BytesIO(picture.content)) as image:
        assert image.mode == "L" and image.getextrema() == (0, 0) and image.size == (96, 64)
    assert (folder / "image 0.png").read_bytes() == original
    assert site.client.post("/images/undo", params={"dir": "pictures"}).status_code == 200
    assert not (folder / "image 0-masklabel.png").exists()
    with Image.open(BytesIO(site.client.get("/images/mask", params=HERE).content)) as image:
        assert image.getextrema() == (255, 255)  # without a mask, all counts


def test_the_mask_that_training_finds_is_changed(site: Site, folder: Path) -> None:
    (folder / "masks").mkdir()
    (folder / "masks" / "image 0.png").write_bytes(png(value=200))
    version = version_of_mask(site)
    assert save_mask(site, png(value=10), version).status_code == 303
    with Image.open(folder / "masks" / "image 0.png") as image:
        assert image.mode == "L" and image.getextrema() == (10, 10)
    answer = save_mask(site, png(value=20), version)  # the other browser
    assert answer.status_code == 409 and code_of(answer.text) == "edit-conflict"
    assert save_mask(site, png(value=20), answer.headers["x-version"]).status_code == 303
    assert save_mask(site, None, version_of_mask(site)).status_code == 303
    assert not (folder / "masks" / "image 0.png").exists()


def test_a_recipe_names_the_folder_of_masks(site: Site, folder: Path) -> None:
    masks = site.folder / "the masks"
    masks.mkdir()
    text = "model: {family: sd15, name_or_path: x}\ntrain: {max_train_steps: 1}\ndata: {path: %s, mask_path: %s}\n"
    (site.folder / "r.yaml").write_text(text % (json.dumps(str(folder)), json.dumps(str(masks))), encoding="utf-8")
    assert save_mask(site, png(), "missing", recipe="r.yaml").status_code == 303
    assert [path.name for path in masks.iterdir()] == ["image 0.png"]
    (site.folder / "r.yaml").write_text(
        "model: {family: sd15, name_or_path: x}\ntrain: {max_train_steps: 1}\n"
        f"data: {{path: {json.dumps(str(folder))}, alpha_mask: true}}\n",
        encoding="utf-8",
    )
    assert code_of(save_mask(site, png(), "missing", recipe="r.yaml").text) == "mask-of-alpha"


def test_what_is_no_mask_is_refused(site: Site, folder: Path, tmp_path: Path) -> None:
    assert code_of(save_mask(site, png((64, 64)), "missing").text) == "mask-proportions"
    assert code_of(save_mask(site, b"no picture", "missing").text) == "image-unreadable"
    for name in ("../image 0.png", "missing.png", "image 0-masklabel.png"):
        assert code_of(save_mask(site, png(), "missing", name=name).text) == "no-image"
    (folder / "image 1-masklabel.png").symlink_to(write_image(tmp_path / "secret.png"))
    before = (tmp_path / "secret.png").read_bytes()
    assert code_of(save_mask(site, png(), "missing", name="image 1.png").text) == "outside-folders"
    assert (tmp_path / "secret.png").read_bytes() == before
    assert sorted(path.name for path in folder.glob("*masklabel*")) == ["image 1-masklabel.png"]


def test_a_crop_is_a_row_that_training_reads(site: Site, folder: Path) -> None:
    before = b'{"file_name": "image 1.png", "text": "a caption"}\nnot json'
    (folder / "metadata.jsonl").write_bytes(before)
    assert save_crop(site, (8, 0, 80, 64)).status_code == 303
    data = DataSection(sources=(DataSource(path=str(folder), crop_column="crop"),))
    assert {sample.key: sample.given.crop for sample in scan(data).samples}["image 0.png"] == (8, 0, 80, 64)
    assert save_crop(site, (0, 0, 10, 10)).status_code == 303
    lines = (folder / "metadata.jsonl").read_bytes().splitlines(keepends=True)
    assert b"".join(lines[:2]) == before + b"\n" and json.loads(lines[2])["crop"] == [0, 0, 10, 10]
    assert save_crop(site, (0, 0, 1, 1), remove="1").status_code == 303
    assert (folder / "metadata.jsonl").read_bytes() == before + b"\n"
    for _ in range(3):
        assert site.client.post("/images/undo", params={"dir": "pictures"}).status_code == 200
    assert (folder / "metadata.jsonl").read_bytes() == before


def test_a_crop_that_cannot_be_saved_is_refused(site: Site, folder: Path) -> None:
    for sides in ((0, 0, 97, 1), (90, 0, 10, 10), (0, 0, 0, 5), ("x", 0, 1, 1), ("-1", 0, 5, 5), ("", "", "", "")):
        assert code_of(save_crop(site, sides).text) == "crop-outside"
    (folder / "metadata.csv").write_text('file_name,crop\nimage 0.png,"[0, 0, 5, 5]"\n', encoding="utf-8")
    assert code_of(save_crop(site, (0, 0, 9, 9)).text) == "crop-elsewhere"
    assert not (folder / "metadata.jsonl").exists()


def test_only_the_row_of_the_image_changes() -> None:
    line = b'{"file_name": "./a.png", "weight": 2}\n'
    other = b'\xef\xbb\xbf{"file_name": "b.png", "crop": [1, 1, 2, 2]}\n'
    after, had = with_crop(other + line, "a.png", "crop", (0, 0, 1, 2), "text")
    assert not had and after.splitlines()[0] == other.strip().removeprefix(b"\xef\xbb\xbf")
    assert json.loads(after.splitlines()[1]) == {
        "file_name": "./a.png",
        "weight": 2,
        "text": None,
        "crop": [0, 0, 1, 2],
    }
    assert with_crop(after, "a.png", "crop", None, None)[1] and with_crop(b"", "a.png", "crop", None, "text") == (
        b"",
        False,
    )


def test_a_saved_crop_is_confirmed_and_the_next_image_is_one_click_away(site: Site, folder: Path) -> None:
    before = site.get("/images/edit", **HERE)
    assert re.search(r'value="ignore" checked', before) and 'role="status">' not in before.partition("crop-title")[2]
    answer = save_crop(site, (0, 0, 32, 32))
    after = site.client.get(answer.headers["location"])
    assert answer.headers["location"].endswith("#crop-title") and re.search(r'value="rectangle" checked', after.text)
    assert 'class="good" role="status"' in after.text.partition("crop-title")[2]
    assert "name=image+1.png" in after.text
    last = site.get("/images/edit", dir="pictures", name="image 3.png")
    assert set(re.findall(r"/images/edit[^\"]*name=image\+(\d)", last)) <= {"3"}


def test_a_crop_that_was_written_by_hand_is_the_one_that_is_shown(site: Site, folder: Path) -> None:
    """Written in place, so that only the file changes. Otherwise the version would be of a crop that nobody saw."""
    for width in (80, 70):
        row = {"file_name": "image 0.png", "crop": [8, 0, width, 64], "text": f"wide {width}"}
        (folder / "metadata.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
        shown = re.findall(r'name="width"[^>]* value="(\d+)"', site.get("/images/edit", **HERE))
        assert shown == [str(width)]


def test_a_crop_that_changes_while_the_page_is_made_is_not_older_than_its_version(
    site: Site, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = folder / "metadata.jsonl"
    table.write_text('{"file_name": "image 0.png", "crop": [8, 0, 80, 64]}\n', encoding="utf-8")
    site.get("/images/edit", **HERE)
    read = Edits.read

    def late(self: Edits, path: Path) -> tuple[bytes | None, str]:
        if path == table:
            monkeypatch.setattr(Edits, "read", read)
            table.write_text('{"file_name": "image 0.png", "crop": [8, 0, 70, 64]}\n', encoding="utf-8")
        return read(self, path)

    monkeypatch.setattr(Edits, "read", late)
    text = site.get("/images/edit", **HERE)
    assert re.findall(r'name="width"[^>]* value="(\d+)"', text) == ["70"]
    assert re.findall(r'name="version" value="([^"]*)"', text) == [site.context.edits.read(table)[1]]


def test_the_editor_undoes_only_the_change_that_it_shows(site: Site, folder: Path) -> None:
    save_mask(site, png(), "missing")
    text = site.get("/images/edit", **HERE)
    newest = re.findall(r'id="newest-change" name="newest" value="([^"]+)"', text)[0]
    save_crop(site, (8, 0, 80, 64))  # in another tab
    given = {"params": {"dir": "pictures"}, "data": {"newest": newest}}
    assert code_of(site.client.post("/images/undo", **given).text) == "edit-conflict"
    assert (folder / "metadata.jsonl").exists() and (folder / "image 0-masklabel.png").exists()
    assert 'hx-include="#newest-change"' in text
