"""A conversation in a browser, in two tabs. The child is replaced (``chat_child``); the walk has the real one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lora_rocm.processes.jobs import ChatJob
from lora_rocm.processes.tool import Tool, started
from lora_rocm.recipe.load import dump_recipe, load_recipe
from lora_rocm.ui import chat_host
from tests.ui.browser.conftest import Held, Tab
from tests.ui.drawn_grid import with_files


@pytest.fixture(autouse=True)
def _replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def opened(job: ChatJob) -> Iterator[Tool]:
        with started([sys.executable, str(Path(__file__).parents[1] / "chat_child.py"), ""], os.environ) as tool:
            yield tool

    monkeypatch.setattr(chat_host, "opened_chat", opened)


def language_run(tab: Tab, name: str) -> None:
    run_dir, recipe = with_files(tab.run(name)), tab.folder / "text.yaml"
    (tab.folder / "chats.jsonl").write_text('{"prompt": "a", "completion": "b"}\n', encoding="utf-8")
    recipe.write_text(
        'model: {family: causal-lm, name_or_path: "builtin:tiny-llama"}\n'
        "data: {path: chats.jsonl}\ntrain: {max_train_steps: 1}\n",
        encoding="utf-8",
    )
    run_dir.recipe.write_text(dump_recipe(load_recipe(recipe).recipe), encoding="utf-8")


def test_two_sides_answer_and_a_second_tab_sees_it(tab: Tab) -> None:
    language_run(tab, "to chat")
    page = tab.open("/try")
    page.get_by_role("link", name="to chat").click()
    page.get_by_text("No message yet").wait_for()
    second = page.context.new_page()
    second.goto(page.url)
    message = page.get_by_role("textbox", name="Message", exact=True)
    message.fill("LONG")
    found = Held(tab, "**/try/chat/send?*")
    message.press("Enter")
    found.wait()
    message.press_sequentially("-NEXT")  # what is written meanwhile stays
    found.go()
    page.get_by_text("word word word").first.wait_for()
    assert message.input_value() == "LONG-NEXT"
    second.bring_to_front()
    second.get_by_text("word word word").first.wait_for()  # the other tab sees it stream
    second.get_by_role("button", name="Stop").click()
    page.bring_to_front()
    page.get_by_text("You stopped this answer.").first.wait_for()
    # Options, a refusal that keeps the message, and a failure that offers it again
    page.get_by_text("Options", exact=True).click()
    page.get_by_label("Temperature").fill("-1")
    message.fill("kept")
    page.get_by_role("button", name="Send").click()
    page.locator("#problem .problem").wait_for()
    assert message.input_value() == "kept"
    tab.expect(422)
    page.get_by_label("Temperature").fill("0")
    message.fill("DIE")
    page.get_by_role("button", name="Send").click()
    page.get_by_role("link", name="Write it again").wait_for()
    tab.settle()
    for width in (360, 1280, 2560):
        page.set_viewport_size({"width": width, "height": 900})
        assert tab.widest() <= 0, width
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        assert tab.axe() == [], theme
    page.get_by_role("link", name="Write it again").click()
    page.locator("#field-prompt").wait_for()
    assert message.input_value() == "DIE"
    # A new conversation, and the earlier one again
    page.get_by_role("button", name="New conversation").click()
    page.get_by_role("button", name="Continue it").click()
    page.get_by_text("You stopped this answer.").first.wait_for()
    second.close()
