"""Two things at once in a browser: double clicks, answers in another order, typing while the page waits for one."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.commands.queue import add
from lora_rocm.rundir.clicks import read_clicks
from lora_rocm.supervisor.queue_dir import QueueDir
from tests.supervisor.fake_run import RECIPE
from tests.ui.browser.conftest import Held, Tab, uncounted_recipe, wait_until
from tests.ui.drawn_grid import with_grid
from tests.ui.image_folders import write_folder


def answered(tab: Tab) -> None:
    """Wait until the page has drawn what it got."""
    tab.settle()
    tab.page.evaluate("new Promise((done) => setTimeout(done, 50))")


@pytest.fixture
def queue(tab: Tab) -> QueueDir:
    """A queue of two recipes."""
    found = QueueDir(tab.folder / "queue")
    shutil.rmtree(found.path, ignore_errors=True)
    for name in ("two-cat", "two-dog"):
        (tab.folder / f"{name}.yaml").write_text(RECIPE, encoding="utf-8")
        add(found.path, [str(tab.folder / f"{name}.yaml")])
    return found


@pytest.fixture
def recipe(tab: Tab, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    return uncounted_recipe(tab, request.node.name, RECIPE, monkeypatch)


def test_a_double_click_is_one_change(tab: Tab, queue: QueueDir) -> None:
    page = tab.open("/queue")
    page.get_by_label("two-cat.yaml").check()
    found = Held(tab, "**/queue/add")
    page.get_by_role("button", name="Add to the queue").dblclick()
    found.wait()
    found.go()
    page.locator("#queue-report", has_text="Added").wait_for()
    answered(tab)
    assert len(found.routes) == 1 and [item.name for item in queue.items()] == ["two-cat", "two-dog", "two-cat-2"]
    # A plain form is sent once as well
    page.goto(tab.address + "/images")
    found = Held(tab, "**/images/new")
    page.locator("#field-name").fill("two-pictures")
    page.get_by_role("button", name="Make").dblclick()
    found.wait()
    found.go()
    page.wait_for_url("**/images/view?*")
    assert len(found.routes) == 1


def test_an_older_answer_is_not_drawn_over_a_newer_one(tab: Tab, queue: QueueDir) -> None:
    page = tab.open("/queue")
    names = page.locator("#queue .queue-name b")
    before = page.request.get(tab.address + "/queue/items").text()
    answered(tab)
    found = Held(tab, "**/queue/items")
    page.evaluate("document.body.dispatchEvent(new CustomEvent('live:queue', {detail: {steps: []}}))")
    found.wait()
    page.get_by_role("button", name="Move two-dog up").click()
    page.locator("#queue-report", has_text="place 1").wait_for()
    assert names.all_inner_texts() == ["two-dog", "two-cat"]
    found.routes[0].fulfill(body=before, content_type="text/html")
    answered(tab)
    assert names.all_inner_texts() == ["two-dog", "two-cat"]


def test_what_happened_without_a_stream_is_shown(tab: Tab) -> None:
    """As in a hidden tab, after a lost connection, and before the stream of a new page is open."""
    page, background = tab.page, tab.server.context.background
    for closes, opens in (("", ""), ("pagehide", "pageshow")):
        end = threading.Event()
        work = background.start("machine-transfer", lambda work, end=end: end.wait(20) and "a table")
        found = Held(tab, "**/live*")
        found.is_open = bool(closes)
        tab.open("/machine")
        page.locator("#cancel-machine-transfer").wait_for()
        if closes:
            page.wait_for_timeout(300)
            page.evaluate("name => dispatchEvent(new Event(name))", closes)
        else:
            found.wait()
            answered(tab)
        end.set()
        work.wait(10)
        page.wait_for_timeout(300)
        assert page.locator("#tests .badge-running").count() == 1
        if closes:
            page.evaluate("name => dispatchEvent(new PageTransitionEvent(name, {persisted: true}))", opens)
        else:
            found.is_open = True
            found.routes[0].continue_()
        page.locator("#tests .badge-done").wait_for()


def test_a_run_is_started_with_what_the_page_shows(tab: Tab, recipe: Path) -> None:
    page = tab.open(f"/recipe/edit?file={recipe.name}")
    page.locator("#plan .chips").wait_for()
    trained = list[str]()

    def refuse(route: Any) -> None:
        trained.append(recipe.read_text(encoding="utf-8"))
        route.fulfill(status=422, body="<h2>refused</h2>")

    page.route("**/recipe/start?*", refuse)
    found = Held(tab, "**/recipe/draft?*")
    page.get_by_label("Rank", exact=True).fill("3")
    page.locator("#start").dblclick()
    found.wait()
    found.go()
    page.locator("#problem", has_text="refused").wait_for()
    assert len(trained) == 1 and "rank: 3" in trained[0]
    # The next check does not end this problem; Ctrl+S saves what was typed a moment before, and does
    page.get_by_label("Rank", exact=True).fill("5")
    page.get_by_text("Not saved yet").wait_for()
    assert page.locator("#problem", has_text="refused").count() == 1
    page.get_by_label("Rank", exact=True).fill("6")
    page.keyboard.press("Control+s")
    page.locator("#problem:empty").wait_for(state="attached")
    assert "rank: 6" in recipe.read_text(encoding="utf-8")
    tab.expect(422)


def test_nothing_that_is_typed_in_a_recipe_is_lost(tab: Tab, recipe: Path) -> None:
    page = tab.open(f"/recipe/edit?file={recipe.name}")
    page.locator("#plan .chips").wait_for()
    area, state = page.locator("#recipe-text"), page.locator("#saved-state")
    look = "dispatchEvent(new Event('focus'))"
    # The preset that was chosen last is shown
    presets = page.locator("[data-preset]")
    found = Held(tab, "**/recipe/preset?*")
    presets.nth(1).click()
    found.wait()
    found.is_open = True
    presets.first.click()
    page.locator("[data-apply]").wait_for()
    found.go()
    answered(tab)
    assert page.locator("#preset b").first.inner_text() == presets.first.inner_text()
    # While it is applied
    found = Held(tab, "**/preset/apply?*")
    page.locator("[data-apply]").click()
    found.wait()
    area.fill(area.input_value() + "# typed\n")
    found.go()
    page.locator("#preset .good").wait_for()
    assert "# typed" in area.input_value()
    # An answer about the file before it was saved
    found = Held(tab, "**/recipe/present?*")
    page.evaluate(look)
    found.wait()
    before = {"text": RECIPE, "version": page.locator("recipe-editor").get_attribute("data-version"), "can_undo": False}
    page.locator("#save").click()
    page.get_by_text("Saved", exact=True).wait_for()
    found.routes[0].fulfill(json=before)
    found.is_open = True
    answered(tab)
    assert "# typed" in area.input_value() and "# typed" in recipe.read_text(encoding="utf-8")
    # Enter in the search does not save; a file that was gone for a moment is followed again
    area.fill(area.input_value() + "# more\n")
    page.get_by_role("button", name="All keys").click()
    page.locator("#find-key").press("Enter")
    answered(tab)
    assert "# more" not in recipe.read_text(encoding="utf-8")
    page.keyboard.press("Control+s")
    wait_until(page, lambda: "# more" in recipe.read_text(encoding="utf-8"))
    page.get_by_text("Saved", exact=True).wait_for()
    content = recipe.read_text(encoding="utf-8")
    recipe.unlink()
    page.evaluate(look)
    wait_until(page, lambda: "deleted" in state.inner_text())
    recipe.write_text(content + "# by hand\n", encoding="utf-8")
    page.evaluate(look)
    wait_until(page, lambda: "# by hand" in area.input_value())
    assert page.locator("#save").is_disabled()


def test_nothing_that_is_typed_in_a_caption_is_lost(tab: Tab) -> None:
    folder = tab.folder / "two captions"
    shutil.rmtree(folder, ignore_errors=True)
    write_folder(folder)
    (folder / "image 0.caption").write_text("a second one", encoding="utf-8")
    page = tab.open("/images/view?dir=two+captions&ext=.txt+.caption")
    tiles, title = page.locator(".image-tile"), page.locator(".image-title")
    tiles.nth(3).wait_for()
    # The image that was opened last is shown
    found = Held(tab, "**/images/item?*name=image+1*")
    tiles.nth(1).click()
    found.wait()
    tiles.nth(0).click()
    title.filter(has_text="image 0").wait_for()
    found.go()
    answered(tab)
    opened = page.locator(".image-tile.opened .tile-file")
    assert title.inner_text() == opened.inner_text() == "image 0.png"
    # Saving one caption keeps the other, what is typed meanwhile, and the focus
    one, two = page.locator("#caption-1"), page.locator("#caption-2")
    two.fill("the second is changed")
    one.fill("saved")
    found = Held(tab, "**/images/caption?*")
    page.keyboard.press("Control+s")
    found.wait()
    page.keyboard.type(" and more")
    found.go()
    wait_until(page, lambda: "Saved" in page.locator("form.caption").first.inner_text())
    page.keyboard.type("!")
    assert one.input_value() == "saved and more!" and two.input_value() == "the second is changed"
    assert (folder / "image 0.txt").read_text(encoding="utf-8") == "saved"
    page.keyboard.press("Control+Enter")  # saves both
    title.filter(has_text="image 1").wait_for()
    assert (folder / "image 0.txt").read_text(encoding="utf-8") == "saved and more!"
    assert (folder / "image 0.caption").read_text(encoding="utf-8") == "the second is changed"


def test_files_that_are_dropped_during_an_upload_are_sent_after_it(tab: Tab, tmp_path: Path) -> None:
    folder = tab.folder / "two uploads"
    shutil.rmtree(folder, ignore_errors=True)
    write_folder(folder)
    page = tab.open("/images/view?dir=two+uploads")
    names = ["one.txt", "two.txt"]
    found = Held(tab, "**/images/upload?*")
    for name in names:
        file = {"name": name, "mimeType": "text/plain", "buffer": name.encode()}
        page.locator("#upload-files").set_input_files(file)
        found.wait()
    found.go()
    wait_until(page, lambda: all((folder / name).exists() for name in names))


def test_a_vote_is_for_the_pair_that_was_seen(tab: Tab) -> None:
    run_dir = tab.run("two-votes")
    with_grid(run_dir)
    page = tab.open("/choose/run?dir=runs/two-votes")
    first = page.get_by_role("button", name="Picture 1")
    first.click()
    page.locator("#votes", has_text="Votes: 1.").wait_for()
    first.dispatch_event("click", {"detail": 2})  # the second click of a double click
    answered(tab)
    assert len(read_clicks(run_dir)) == 1
    first.focus()
    page.keyboard.press("Enter")
    page.locator("#votes", has_text="Votes: 2.").wait_for()
    assert page.locator("#vote-first:focus").count() == 1


def test_what_the_user_opened_stays_open(tab: Tab) -> None:
    """A run that trains is drawn again each second."""
    tab.run("two-details")
    page = tab.open("/runs/view?dir=runs/two-details")
    page.locator("#state summary").click()
    with page.expect_response("**/runs/state?*"):
        page.evaluate("document.body.dispatchEvent(new CustomEvent('live:state', {detail: {steps: []}}))")
    answered(tab)
    assert page.locator("#state details[open]").count() == 1


def test_a_changed_text_of_the_queue_is_discarded_only_if_the_user_says_so(tab: Tab, queue: QueueDir) -> None:
    page, asked = tab.open("/queue"), list[str]()

    def keep(dialog: Any) -> None:
        asked.append(dialog.type)
        dialog.dismiss()

    page.on("dialog", keep)
    edit, text = page.get_by_role("button", name="Edit the recipe two-dog"), page.locator("#queue-text")
    edit.click()
    text.wait_for()
    edit.click()  # the control: nothing is changed
    answered(tab)
    assert asked == []
    text.press_sequentially("# typed")
    edit.click()
    page.get_by_role("link", name="Close").click()
    wait_until(page, lambda: len(asked) == 2)
    assert asked == ["confirm", "beforeunload"] and "# typed" in text.input_value()
    page.locator("#queue-recipe").get_by_role("button", name="Save").click()
    page.get_by_text("Saved.").wait_for()
    page.get_by_role("link", name="Close").click()
    text.wait_for(state="detached")
    assert len(asked) == 2


def test_a_stroke_that_is_painted_while_the_mask_is_saved_stays(tab: Tab) -> None:
    folder = tab.folder / "two strokes"
    shutil.rmtree(folder, ignore_errors=True)
    write_folder(folder)
    page = tab.open("/images/edit?dir=two+strokes&name=image+0.png")
    canvas, save = page.locator("mask-editor[data-loaded] canvas"), page.get_by_role("button", name="Save mask")
    canvas.press("Space")
    found = Held(tab, "**/images/mask?*")
    save.click()
    found.wait()
    for key in (*("ArrowRight",) * 4, "Space"):
        canvas.press(key)
    found.go()
    mask = folder / "image 0-masklabel.png"
    wait_until(page, mask.exists)
    answered(tab)
    first = mask.read_bytes()
    with page.expect_navigation():  # the second one is saved against the version of the first
        save.click()
    assert mask.read_bytes() != first


def test_what_has_the_focus_is_not_below_the_navigation(tab: Tab) -> None:
    """At 360 px the navigation is fixed at the lower edge."""
    page = tab.page
    page.set_viewport_size({"width": 360, "height": 740})
    tab.run("two-stops")
    tab.open("/runs/view?dir=runs/two-stops")
    page.locator("#files a").first.wait_for()
    bottoms = list[float]()
    for _ in range(40):
        page.keyboard.press("Tab")
        bottoms += page.evaluate(
            "() => [document.activeElement].filter((at) => at.closest('main') && at.id !== 'content')"
            ".map((at) => at.getBoundingClientRect().bottom)"
        )
    edge = page.evaluate("document.querySelector('nav.parts').getBoundingClientRect().top")
    assert len(bottoms) > 10 and max(bottoms) <= edge
