"""Machine in a browser: findings arrive on their own, a change is proven by htmx and by a plain HTML form."""

from __future__ import annotations

from tests.ui.browser.conftest import Tab


def test_findings_and_changes(tab: Tab) -> None:
    page = tab.open("/machine")
    page.locator("#findings-title").wait_for()
    page.get_by_role("button", name="Forget them").click()
    page.locator("#forgotten p").wait_for()
    (tab.folder / "more pictures").mkdir(exist_ok=True)
    page.get_by_label("Folder to add").fill(str(tab.folder / "more pictures"))
    page.get_by_role("button", name="Add", exact=True).click()
    page.get_by_text("added here").wait_for()


def test_a_refused_change_shows_the_problem(tab: Tab) -> None:
    page = tab.open("/machine")
    page.get_by_label("Folder to add").fill("no such folder")
    page.get_by_role("button", name="Add", exact=True).click()
    page.locator(".problem").wait_for()
    assert "no-folder" in page.locator(".problem").inner_text()
    assert page.get_by_label("Folder to add").input_value() == "no such folder"
    page.goto(tab.address + "/runs/view?dir=nothing")
    page.get_by_role("button", name="Back").click()
    # A change that works ends the problem of the attempt before it
    page.locator("#findings-title").wait_for()
    page.evaluate("document.getElementById('problem').textContent = 'It did not work.'")
    page.get_by_role("button", name="Forget them").click()
    page.locator("#problem:empty").wait_for(state="attached")
    tab.expect(404)
