"""Every page: no violation of WCAG 2.2 AA, readable at 360 and 2,560 px, light and dark, by keyboard, and by links."""

from __future__ import annotations

import pytest

from lora_rocm.ui.application import PARTS
from tests.ui.browser.conftest import Tab

PAGES = [part.path for part in PARTS]
NUM_LINES = """[...document.querySelectorAll("nav.parts li span")].map((each) => {
  const range = document.createRange();
  range.selectNodeContents(each);
  return range.getClientRects().length;
})"""
"""Number of lines of the name of each part in the navigation."""


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_accessible_and_fits(path: str, tab: Tab) -> None:
    tab.run("a-run")
    page = tab.open(path)
    tab.settle()
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        assert tab.axe() == [], f"{path} {theme}"
    for width in (360, 900, 2560):
        page.set_viewport_size({"width": width, "height": 800})
        assert tab.widest() <= 0, f"{path} at {width} px"
    page.set_viewport_size({"width": 360, "height": 800})
    assert tab.axe() == [], f"{path} at 360 px"
    assert page.evaluate(NUM_LINES) == [1] * len(PARTS), f"a name of a part wraps on {path}"


def test_a_violation_is_found(tab: Tab) -> None:
    """Negative control of the test above."""
    page = tab.open("/")
    page.evaluate("document.getElementById('content').append(document.createElement('img'))")
    page.emulate_media(color_scheme="light")
    page.evaluate("document.querySelector('h1').style.color = 'rgb(220, 220, 220)'")
    assert {"image-alt", "color-contrast"} <= {each.partition(":")[0] for each in tab.axe()}
    page.evaluate("document.getElementById('content').style.width = '4000px'")
    assert tab.widest() > 0


def test_the_link_opens_the_page_and_its_token_disappears(tab: Tab) -> None:
    tab.page.context.clear_cookies()
    tab.page.goto(tab.server.link)
    assert tab.page.url == f"{tab.address}/" and tab.page.get_by_role("heading", name="Start").is_visible()


def test_the_keyboard_reaches_the_content_and_every_part(tab: Tab) -> None:
    page = tab.open("/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.getAttribute('href')"))
    assert set(PAGES) <= set(reached)


def test_the_colours_are_kept(tab: Tab) -> None:
    page = tab.open("/")
    page.locator("#theme").select_option("dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    page.reload()
    assert page.locator("#theme").input_value() == "dark"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"


def test_an_unknown_page_shows_a_problem(tab: Tab) -> None:
    answer = tab.page.goto(f"{tab.address}/nothing")
    assert answer is not None and answer.status == 404
    assert tab.page.locator(".problem").is_visible() and tab.axe() == []
    tab.expect(404)


def test_the_policy_stops_scripts_in_the_page(tab: Tab) -> None:
    """The negative control of the policy: the effect of a hostile text without escaping."""
    page = tab.open("/")
    page.evaluate("document.getElementById('problem').innerHTML = '<img src=x onerror=\"document.title=`harmed`\">'")
    page.evaluate(
        "() => { const s = document.createElement('script'); s.text = 'document.title=1'; document.body.append(s); }"
    )
    page.wait_for_timeout(200)
    assert page.title() != "harmed"
    assert any("Content Security Policy" in fault for fault in tab.faults)
    tab.expect("Content Security Policy")
    tab.expect(404)  # the image


def test_the_page_names_a_lost_server_and_connects_again(tab: Tab) -> None:
    page = tab.open("/runs")
    page.route("**/live*", lambda route: route.abort())
    tab.server.context.live.close()  # as if it ended
    page.locator("#live-lost").wait_for()
    tab.server.context.live = type(tab.server.context.live)(tab.server.context.folders)
    page.unroute("**/live*")
    page.locator("#live-lost").wait_for(state="hidden", timeout=20_000)
    tab.expect("net::ERR_")
    tab.expect(503)


def test_a_new_run_appears_without_a_reload(tab: Tab) -> None:
    page = tab.open("/runs")
    tab.run("appears")
    page.get_by_role("link", name="appears").wait_for()
