"""Images in a browser, the way a user goes: a small grid, captions, a conflict, many changes, masks, files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.ui.browser.conftest import Tab
from tests.ui.image_folders import write_folder, write_image

MAX_TILES = 200


@pytest.fixture
def folder(tab: Tab) -> Path:
    """A new folder with four images."""
    shutil.rmtree(tab.folder / "pictures", ignore_errors=True)
    return write_folder(tab.folder / "pictures")


def open_folder(tab: Tab, more: str = "") -> Any:
    page = tab.open(f"/images/view?dir=pictures{more}")
    page.locator(".image-tile").first.wait_for()
    return page


def fits(tab: Tab) -> None:
    """Check that the page is accessible, light and dark, and as wide as its window."""
    for theme in ("light", "dark"):
        tab.page.emulate_media(color_scheme=theme)
        assert tab.axe() == [], theme
    tab.page.set_viewport_size({"width": 360, "height": 800})
    assert tab.widest() <= 0 and tab.axe() == []
    tab.page.set_viewport_size({"width": 1280, "height": 900})


def test_captions_are_edited_by_keyboard(tab: Tab, folder: Path) -> None:
    tab.open("/images")
    tab.page.get_by_role("link", name="pictures").click()
    page = tab.page
    page.locator(".image-tile").first.wait_for()
    page.locator("#grid").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.locator("#caption-1").wait_for()
    assert page.locator("#caption-1").input_value() == "woman, smile, outdoors"
    page.keyboard.press("Control+a")
    page.keyboard.type("a new caption")
    page.keyboard.press("Control+Enter")  # saves, and opens the next image
    page.get_by_role("heading", name="image 2.png").wait_for()
    assert (folder / "image 1.txt").read_text(encoding="utf-8") == "a new caption"
    page.locator(".tile-caption", has_text="a new caption").wait_for()
    fits(tab)
    page.get_by_role("button", name="Undo the last change").click()
    page.locator(".tile-caption", has_text="woman, smile").wait_for()


@pytest.mark.slow
def test_a_conflict_keeps_the_text(tab: Tab, folder: Path) -> None:
    page = open_folder(tab)
    page.locator(".image-tile").first.click()
    page.locator("#caption-1").fill("mine")
    (folder / "image 0.txt").write_text("theirs", encoding="utf-8")
    page.get_by_role("button", name="Save", exact=True).click()
    page.locator(".theirs").wait_for()
    assert page.locator(".theirs").inner_text() == "theirs" and page.locator("#caption-1").input_value() == "mine"
    assert tab.axe() == []
    page.get_by_role("button", name="Save", exact=True).click()
    page.locator(".theirs").wait_for(state="detached")
    assert (folder / "image 0.txt").read_text(encoding="utf-8") == "mine"
    tab.expect(409)


def test_many_captions_are_changed(tab: Tab, folder: Path) -> None:
    page = open_folder(tab)
    page.locator("summary", has_text="Tags").click()
    page.get_by_role("button", name="Remove woman").click()
    page.get_by_role("button", name="Preview").click()
    page.locator(".difference").nth(1).wait_for()
    page.locator("summary", has_text="Buckets").click()
    page.locator(".buckets").wait_for()
    page.locator("summary", has_text="twice").click()
    page.locator("#alike button").first.wait_for()
    fits(tab)
    page.locator("#grid").focus()
    page.keyboard.press("Space")
    page.get_by_label("selected images").check()
    page.get_by_role("button", name="Change captions").click()
    page.get_by_text("Changed captions: 1.").wait_for()
    assert (folder / "image 0.txt").read_text(encoding="utf-8") == "red dress"
    assert (folder / "image 1.txt").read_text(encoding="utf-8") == "woman, smile, outdoors"


@pytest.mark.slow
def test_a_mask_is_painted_and_a_crop_drawn_by_keyboard(tab: Tab, folder: Path) -> None:
    page = open_folder(tab)
    page.locator(".image-tile").first.click()
    page.get_by_role("link", name="Mask and crop").click()
    page.locator("mask-editor[data-loaded]").wait_for()
    fits(tab)
    canvas = page.locator("mask-editor canvas")
    canvas.focus()
    for key in ("Space", "Control+ArrowLeft", "Control+ArrowLeft", "]"):
        page.keyboard.press(key)
    assert page.locator("output[for=brush]").inner_text() == page.locator("#brush").input_value() == "9"
    with page.expect_navigation():
        page.get_by_role("button", name="Save mask").click()
    with Image.open(folder / "image 0-masklabel.png") as mask:
        assert mask.getpixel((48, 32)) == 0 and mask.getpixel((2, 2)) == 255
    page.get_by_role("radio", name="rectangle").check()
    page.locator("mask-editor[data-loaded]").wait_for()
    page.locator("mask-editor canvas").focus()
    for key in ("Control+ArrowLeft", "Control+ArrowUp"):
        page.keyboard.press(key)
    assert page.get_by_label("Left").input_value() != "0"
    page.get_by_role("button", name="Save as crop").click()
    page.get_by_role("button", name="Use the whole image").wait_for()
    assert '"crop": [' in (folder / "metadata.jsonl").read_text(encoding="utf-8")


def test_files_are_brought_in(tab: Tab, tmp_path: Path) -> None:
    shutil.rmtree(tab.folder / "brought", ignore_errors=True)
    write_image(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("brought caption", encoding="utf-8")
    (tmp_path / "b.exe").write_bytes(b"x")
    page = tab.open("/images")
    page.get_by_label("Name of a new folder").fill("brought")
    page.get_by_role("button", name="Make the folder").click()
    page.locator("image-grid .empty").wait_for()
    assert tab.axe() == []
    page.locator("#upload-files").set_input_files([tmp_path / "a.png", tmp_path / "a.txt", tmp_path / "b.exe"])
    page.locator(".tile-caption", has_text="brought caption").wait_for()
    assert page.locator(".refused li").count() == 1
    assert sorted(path.name for path in (tab.folder / "brought").iterdir()) == ["a.png", "a.txt"]


def test_a_large_folder_has_few_tiles(tab: Tab, folder: Path) -> None:
    for number in range(4, 600):
        shutil.copy(folder / "image 3.png", folder / f"image {number}.png")
    page = open_folder(tab)
    page.set_viewport_size({"width": 2560, "height": 1440})
    page.locator("#grid").focus()
    page.keyboard.press("End")
    page.locator(".tile-file", has_text="image 99.png").wait_for()
    assert 0 < page.locator(".image-tile").count() <= MAX_TILES
    assert page.locator(".image-tile.active").get_attribute("aria-posinset") == "600"
