"""The way through all parts in Debian's firefox-esr (slow): mouse, keys, live updates, axe-core, no failed script."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_rocm.rundir.clicks import read_clicks
from lora_rocm.rundir.events import EventWriter
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.queue_dir import QueueDir
from lora_rocm.ui.application import PARTS
from lora_rocm.ui.server import PageServer
from tests.supervisor.fake_run import event
from tests.supervisor.wire import step_fields
from tests.ui.browser.conftest import AXE, serving
from tests.ui.browser.firefox import FirefoxTab, firefox
from tests.ui.browser.test_every_state import fill_folder

PROGRAM = "firefox-esr"
REQUIRED = "LORA_ROCM_REQUIRE_FIREFOX"
RULES = "['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice']"
FOUND = (
    f"axe.run({{runOnly: {RULES}}}).then((all) => all.violations.map((each) => each.id + ': ' + each.nodes[0].html))"
)
SETTLED = "document.readyState === 'complete' && !document.querySelector('.htmx-request')"
CONTROL = "\ue009"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    """A server with something in each part."""
    folder = tmp_path_factory.mktemp("my models")
    fill_folder(folder)
    with serving(folder) as server:
        yield server


@pytest.fixture(scope="module")
def tab(served: PageServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FirefoxTab]:
    """A tab of Firefox that has opened the link."""
    program = shutil.which(PROGRAM)
    if program is None:
        if os.environ.get(REQUIRED):
            pytest.fail(f"there is no {PROGRAM} here")
        pytest.skip(f"there is no {PROGRAM} here")
    with firefox(program, tmp_path_factory.mktemp("firefox") / "profile") as made:
        made.resize(1280, 900)
        made.open(served.link)
        yield made


@pytest.fixture
def no_faults(tab: FirefoxTab) -> Iterator[None]:
    """No script fails, and nothing is stopped by the policy."""
    tab.faults.clear()
    yield
    tab.run("1")  # so that the events before it are read
    assert tab.faults == []


def address(served: PageServer, path: str) -> str:
    return served.link.partition("/?")[0] + path


def held(tab: FirefoxTab, key: str, letter: str) -> None:
    """Press a letter while another key is held."""
    order = (("keyDown", key), ("keyDown", letter), ("keyUp", letter), ("keyUp", key))
    actions = [{"type": "key", "id": "keyboard", "actions": [{"type": kind, "value": value} for kind, value in order]}]
    tab.ask("input.performActions", context=tab.context, actions=actions)


def press(tab: FirefoxTab, name: str) -> None:
    """Press a button by its name."""
    tab.run(f"[...document.querySelectorAll('button')].find((each) => each.textContent.trim() === '{name}').click()")


def folder_of(served: PageServer) -> Path:
    return served.context.folders.working


def test_the_token_disappears_and_each_part_opens_by_a_click(
    tab: FirefoxTab, served: PageServer, no_faults: None
) -> None:
    assert tab.run("location.href") == address(served, "/")
    for part in PARTS:
        tab.wait(SETTLED)
        tab.run("window.isOld = true")  # the first part is the page itself: its address does not show that it is new
        tab.click(f'nav.parts a[href="{part.path}"]')
        tab.wait(f"!window.isOld && location.pathname === '{part.path}' && {SETTLED}")
        tab.wait(f"document.querySelector('nav.parts [aria-current]')?.getAttribute('href') === '{part.path}'")
    tab.wait(SETTLED)


@pytest.mark.parametrize("part", [part.path for part in PARTS])
def test_a_part_is_accessible_and_fits(part: str, tab: FirefoxTab, served: PageServer, no_faults: None) -> None:
    for width in (1280, 360, 2560):
        tab.resize(width, 900)
        tab.open(address(served, part))
        tab.wait(SETTLED)
        assert tab.run("document.documentElement.scrollWidth - innerWidth") <= 0, width
        if width != 2560:
            tab.load(AXE.read_text(encoding="utf-8"))
            assert tab.run(FOUND) == [], width
    tab.resize(1280, 900)


def test_a_caption_is_written_by_mouse_and_keys(tab: FirefoxTab, served: PageServer, no_faults: None) -> None:
    tab.open(address(served, "/images/view?dir=pictures"))
    tab.click(".image-tile:nth-child(1)")
    tab.wait(f"{SETTLED} && document.querySelector('form.caption textarea')?.value")
    tab.click("form.caption textarea")
    tab.wait("document.activeElement.matches('form.caption textarea')")
    held(tab, CONTROL, "a")
    tab.press("a zibu")
    held(tab, CONTROL, "\ue007")  # Enter: saves, and opens the next image
    tab.wait("[...document.querySelectorAll('.tile-caption')].some((each) => each.textContent === 'a zibu')")
    assert (folder_of(served) / "pictures" / "image 0.txt").read_text(encoding="utf-8") == "a zibu"


def test_the_mask_editor_draws(tab: FirefoxTab, served: PageServer, no_faults: None) -> None:
    tab.open(address(served, "/images/edit?dir=pictures&name=image%201.png"))
    tab.wait("document.querySelector('mask-editor[data-loaded]')?.tagName")
    tab.click("mask-editor canvas")
    press(tab, "Save mask")
    tab.wait(SETTLED)
    for _ in range(100):
        if (folder_of(served) / "pictures" / "image 1-masklabel.png").exists():
            break
        tab.run("new Promise((done) => setTimeout(done, 100))")
    assert (folder_of(served) / "pictures" / "image 1-masklabel.png").exists()


def test_a_field_changes_the_text_of_a_recipe(tab: FirefoxTab, served: PageServer, no_faults: None) -> None:
    tab.open(address(served, "/recipe/edit?file=cat.yaml"))
    tab.click("[id='simple-train.max_train_steps']")
    held(tab, CONTROL, "a")
    tab.press("77\ue004")  # Tab leaves the field
    tab.wait("[...document.querySelectorAll('textarea')].some((each) => each.value.includes('max_train_steps: 77'))")
    press(tab, "Save")
    tab.wait("document.body.textContent.includes('Saved')")
    for _ in range(100):
        if "max_train_steps: 77" in (folder_of(served) / "cat.yaml").read_text(encoding="utf-8"):
            break
        tab.run("new Promise((done) => setTimeout(done, 100))")
    assert "max_train_steps: 77" in (folder_of(served) / "cat.yaml").read_text(encoding="utf-8")


def test_the_queue_is_ordered(tab: FirefoxTab, served: PageServer, no_faults: None) -> None:
    tab.open(address(served, "/queue"))
    tab.click("button[aria-label='Move dog up']")
    tab.wait("document.querySelector('#queue-report')?.textContent.includes('place 1')")
    assert [item.name for item in QueueDir(folder_of(served) / "queue").items()] == ["dog", "cat"]


def test_a_run_updates_itself(tab: FirefoxTab, served: PageServer, no_faults: None) -> None:
    """The live stream and the chart."""
    tab.open(address(served, "/runs/view?dir=runs/trains"))
    tab.wait("document.querySelector('run-chart[data-field=loss] canvas')?.tagName")
    writer = EventWriter(RunDir(folder_of(served) / "runs" / "trains").events(), session=1)
    writer.write(event("step", **step_fields(30)))
    writer.close()
    tab.wait("document.querySelector('run-chart[data-field=loss] .chart').getAttribute('aria-label').includes('30)')")


def test_a_vote_is_counted(tab: FirefoxTab, served: PageServer, no_faults: None) -> None:
    tab.open(address(served, "/choose/run?dir=runs/a-run"))
    tab.click(".pair button")
    tab.wait("document.querySelector('#votes')?.textContent.includes('Votes: 1.')")
    tab.press("2")
    tab.wait("document.querySelector('#votes')?.textContent.includes('Votes: 2.')")
    assert len(read_clicks(RunDir(folder_of(served) / "runs" / "a-run"))) == 2


def test_the_policy_stops_a_script(tab: FirefoxTab, served: PageServer) -> None:
    """The negative control of the fixture ``no_faults``."""
    tab.open(address(served, "/"))
    tab.load("document.getElementById('problem').innerHTML = '<img src=x onerror=\"document.title=1\">'")
    tab.run("new Promise((done) => setTimeout(done, 500))")
    assert tab.run("document.title") != "1" and any("Content-Security-Policy" in fault for fault in tab.faults)
