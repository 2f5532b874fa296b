"""The queue in a browser: recipes are added, ordered by keyboard, run and finished."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from lora_rocm.supervisor.queue_dir import QueueDir
from lora_rocm.ui import launch
from tests.supervisor.fake_run import RECIPE
from tests.ui.browser.conftest import Tab
from tests.ui.browser.test_real_run import RECIPE as REAL_RECIPE
from tests.ui.browser.test_real_run import WAIT_MS

ROOT = Path(__file__).parents[3]
NAMES = ("q-cat", "q-dog")


def recipes(tab: Tab, text: str) -> QueueDir:
    """Two recipes and an empty queue."""
    queue = QueueDir(tab.folder / "queue")
    shutil.rmtree(queue.path, ignore_errors=True)
    for name in NAMES:
        (tab.folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return queue


def add_both(tab: Tab) -> None:
    for name in NAMES:
        tab.page.get_by_label(f"{name}.yaml").check()
    tab.page.get_by_role("button", name="Add to the queue").click()
    tab.page.locator("#queue-report", has_text="Added").wait_for()
    assert not tab.page.get_by_label(f"{NAMES[0]}.yaml").is_checked()  # so nobody adds it twice


def test_two_recipes_are_added_ordered_run_and_finished(tab: Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``queue run`` in its own process, as from the page, but with fake workers."""
    queue = recipes(tab, RECIPE)
    code = f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['queue', sys.argv[-1]]; "
    code += "import os; os.environ['PYTHONPATH'] = sys.path[0]; "
    code += "runpy.run_module('tests.commands.queue_process', run_name='__main__')"
    monkeypatch.setattr(launch, "python_command", lambda *words: [sys.executable, "-c", code, *words])
    page = tab.open("/queue")
    add_both(tab)
    up = page.get_by_role("button", name="Move q-cat up")
    up.focus()
    page.keyboard.press("Enter")
    page.locator("#queue-report", has_text="place 1").wait_for()
    assert [item.name for item in queue.items()] == ["q-cat", "q-dog"]
    page.locator("[aria-label='Move q-cat up']:focus").wait_for()  # the focus is still there
    page.get_by_role("button", name="Remove q-dog").click()
    page.get_by_role("button", name="Undo").wait_for()
    with page.expect_response("**/queue/items"):  # the news of this change leave its undo in place
        page.evaluate("document.body.dispatchEvent(new CustomEvent('live:queue'))")
    tab.settle()
    page.get_by_role("button", name="Undo").click()
    page.locator("#queue-report", has_text="Restored").wait_for()
    assert tab.axe() == []
    page.get_by_role("button", name="Run the queue").click()
    done = page.get_by_role("region", name="Finished").get_by_role("link")
    done.nth(1).wait_for(timeout=WAIT_MS)
    assert queue.items() == [] and done.count() == 2
    page.get_by_text("The queue is empty").wait_for()
    tab.settle()
    assert tab.axe() == []
    for width in (360, 2560):
        page.set_viewport_size({"width": width, "height": 900})
        assert tab.widest() <= 0, width
    done.first.click()
    page.locator("h1", has_text="q-").wait_for()


@pytest.mark.slow
def test_a_recipe_is_edited_in_the_queue(tab: Tab) -> None:
    queue = recipes(tab, RECIPE)
    page = tab.open("/queue")
    add_both(tab)
    page.get_by_role("button", name="Edit the recipe q-dog").click()
    text = page.locator("#queue-text")
    text.fill(text.input_value().replace("40", "50"))
    assert tab.axe() == []
    page.get_by_role("button", name="Save").click()
    page.get_by_text("Saved.").wait_for()
    assert "max_train_steps: 50" in queue.find("q-dog").path.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_real_recipes_finish(tab: Tab) -> None:
    queue = recipes(tab, REAL_RECIPE.replace("STEPS", "20"))
    page = tab.open("/queue")
    add_both(tab)
    page.get_by_role("button", name="Run the queue").click()
    page.get_by_text("Time left").wait_for(timeout=WAIT_MS)
    page.get_by_role("region", name="Finished").get_by_role("link").nth(1).wait_for(timeout=WAIT_MS)
    assert queue.items() == [] and tab.axe() == []
