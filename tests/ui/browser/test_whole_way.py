"""A new user gets from an empty folder to a chosen LoRA in the folder of ComfyUI, in the browser alone (slow)."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.ui.server import PageServer
from tests.ui.browser.conftest import Tab

WAIT_MS = 200_000
COLOURS = ("red", "green", "blue", "gold")


@pytest.fixture
def new_user(browser: Any, tmp_path: Path) -> Iterator[Tab]:
    """A tab that has opened the printed link of a server in an empty folder."""
    folder, before = tmp_path / "Neuer Ordner ü", Path.cwd()
    folder.mkdir()
    os.chdir(folder)
    with PageServer.listening(folder, Path("runs"), "127.0.0.1", 0) as made:
        thread = threading.Thread(target=made.serve, daemon=True)
        thread.start()
        profile = browser.new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
        page = profile.new_page()
        tab = Tab(page, made)
        page.on("pageerror", lambda error: tab.faults.append(str(error)))
        page.goto(made.link)
        yield tab
        profile.close()
        made.stop()
        thread.join(10)
    os.chdir(before)
    assert not tab.faults


def pictures(folder: Path) -> list[Path]:
    from PIL import Image

    folder.mkdir()
    paths = [folder / f"Bild {number} ä.png" for number in range(len(COLOURS))]
    for path, colour in zip(paths, COLOURS, strict=True):
        Image.new("RGB", (96, 96), colour).save(path)
    return paths


def bring_images(page: Any, paths: list[Path]) -> None:
    page.get_by_role("link", name="Bring your images").click()
    page.get_by_label("Name of a new folder").fill("Bilder ü")
    page.get_by_role("button", name="Make the folder").click()
    page.get_by_text("There is no image yet").wait_for()
    page.locator("#upload-files").set_input_files(paths)
    page.get_by_text(paths[0].name).click()
    for path, colour in zip(paths, COLOURS, strict=True):
        page.get_by_label(f"Caption in {path.stem}.txt").fill(f"xyz {colour}")
        page.keyboard.press("Control+Enter")
    page.locator(".tile-caption", has_text=f"xyz {COLOURS[-1]}").wait_for()
    page.locator("#item").get_by_text("Saved.").wait_for()


def make_recipe(page: Any) -> None:
    page.get_by_role("link", name="New recipe with these images").click()
    assert page.get_by_label("Folder of images").input_value() == "Bilder ü"
    page.get_by_label("Name of the recipe").first.fill("Farben ü")
    page.get_by_role("button", name="Make the recipe").click()
    page.locator("#new-problem .problem").wait_for()  # no preset, no model: what was written stays
    page.locator("#field-source").select_option("demo")
    page.get_by_role("button", name="Make the recipe").click()
    page.get_by_role("link", name="Open the recipe").click(timeout=WAIT_MS)
    # Short, and with little to draw: by the fields, and by the YAML
    for key, value in (("train.max_train_steps", "12"), ("train.epochs", ""), ("output.save_every_n_steps", "4")):
        page.locator(f'[id="simple-{key}"]').fill(value)
    page.locator('[id="simple-sample.prompts"]').fill("xyz red\nxyz blue")
    page.locator('[id="simple-output.name"]').fill("farben-ü")
    page.keyboard.press("Tab")
    page.get_by_text("Not saved yet").wait_for()
    text = page.locator("#recipe-text")
    for _ in range(100):  # the fields arrive in the YAML after a moment
        if "farben-ü" in text.input_value() and "max_train_steps: 12" in text.input_value():
            break
        page.wait_for_timeout(100)
    text.fill(text.input_value().replace("  steps: 20\n", "  steps: 2\n").replace("kohya, diffusers, peft", "kohya"))


def choose(page: Any, comfy: Path) -> None:
    page.get_by_role("link", name="Choose the best file").click()
    page.get_by_role("link", name="To the pictures").click()
    page.get_by_label("Strengths").fill("1")
    page.get_by_label("Prompts").fill("xyz red\nxyz blue")
    page.get_by_role("button", name="Make the missing pictures").click()
    page.get_by_role("link", name="Compare them").click(timeout=WAIT_MS)
    for vote in range(6):
        if vote % 2:
            page.keyboard.press("1")
        else:
            page.locator("button.picture").nth(1).click()
        page.get_by_text(f"Votes: {vote + 1}.").wait_for()
    page.locator("[name=own_folder]").fill(str(comfy))
    page.get_by_role("button", name="Copy into the folder").click()
    page.locator("#take .good").wait_for()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_new_user_gets_from_an_empty_folder_to_a_chosen_lora(new_user: Tab, tmp_path: Path) -> None:
    page, comfy = new_user.page, tmp_path / "ComfyUI ö"
    (comfy / "models" / "loras").mkdir(parents=True)
    bring_images(page, pictures(tmp_path / "photos"))
    assert len(list((new_user.folder / "Bilder ü").glob("*.txt"))) == len(COLOURS)
    make_recipe(page)
    # Train
    page.get_by_role("button", name="Save and start training").click()
    page.locator("#state .badge-finished").wait_for(timeout=WAIT_MS)
    page.locator(".pictures img").first.wait_for()
    run_address = page.url
    # Choose, and copy into the folder of ComfyUI, which is named by its own folder
    choose(page, comfy)
    copies = list((comfy / "models" / "loras").iterdir())
    assert len(copies) == 1 and "farben-ü" in copies[0].name and new_user.axe() == []
    # Try
    page.goto(run_address)
    page.get_by_role("link", name="Try a prompt").click()
    page.get_by_label("Prompt", exact=True).fill("xyz gold")
    page.get_by_role("button", name="Draw").click()
    page.locator("article.attempt img").nth(1).wait_for(timeout=WAIT_MS)
    assert new_user.axe() == []
