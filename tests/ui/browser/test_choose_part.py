"""The blind test in a browser, by mouse and by keys, to a settled answer; then the file is copied."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.commands import comparison_grid
from lora_rocm.commands.sample_export import SCRIPT
from lora_rocm.processes.jobs import CompareJob
from lora_rocm.rundir.clicks import read_clicks
from lora_rocm.ui.background import key_of
from tests.supervisor.fake_run import event
from tests.ui.browser.conftest import Tab
from tests.ui.drawn_grid import STEPS, made_answers, with_files, with_grid, with_text_recipe

WIDTHS_PX = (360, 1280, 2560)


def test_a_taste_is_found_with_the_keys(tab: Tab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user prefers the redder picture, which has the higher step, then the bluer one. No name shows the step."""
    monkeypatch.setenv("LORA_ROCM_HOME", str(tmp_path / "home"))
    run_dir = tab.run("blind")
    with_grid(run_dir)
    page = tab.open("/choose")
    page.get_by_role("link", name="blind").click()
    page.get_by_role("heading", name="Which one is better?").wait_for()
    for width in WIDTHS_PX:
        page.set_viewport_size({"width": width, "height": 900})
        assert tab.widest() <= 0, width
    page.set_viewport_size({"width": 1280, "height": 900})
    page.locator("#answer summary").click()
    assert tab.axe() == []
    page.locator("#answer summary").click()
    # One vote by mouse, one taken back, the others by keys
    page.get_by_role("button", name="Picture 1").click()
    page.locator("#votes", has_text="Votes: 1.").wait_for()
    page.locator("#ranking tbody tr").first.wait_for(state="attached")
    page.get_by_role("button", name="Take the last vote back").click()
    page.locator("#votes", has_text="Votes: 0.").wait_for()
    for number in range(1, 120):
        value = page.evaluate(
            """async () => {
              const found = [];
              for (const image of document.querySelectorAll(".pair img")) {
                await image.decode();
                const canvas = new OffscreenCanvas(1, 1).getContext("2d");
                canvas.drawImage(image, 0, 0, 1, 1);
                const [red, , blue] = canvas.getImageData(0, 0, 1, 1).data;
                found.push(4 * red + blue);
              }
              return found;
            }"""
        )
        page.keyboard.press("1" if value[0] > value[1] else "2")
        page.locator("#votes", has_text=f"Votes: {number}.").wait_for()
        if page.locator("[data-settled]").count():
            break
    settled = re.search(r"step (\d+) at strength", page.locator("[data-settled]").inner_text())
    assert page.evaluate("document.getElementById('answer').open")
    assert settled is not None and int(settled[1]) == STEPS[-1] and len(read_clicks(run_dir)) == number
    # Two votes on one pair count once; keys in a field do not vote
    page.get_by_label("Prompts").press("1")
    page.wait_for_timeout(100)
    assert len(read_clicks(run_dir)) == number
    # The chosen file
    folder = tmp_path / "loras"
    folder.mkdir()
    page.locator("[name=own_folder]").fill(str(folder))
    page.get_by_role("button", name="Copy into the folder").click()
    page.get_by_text("Copied to").wait_for()
    assert len(list(folder.iterdir())) == 1
    tab.settle()
    assert tab.axe() == []
    page.emulate_media(color_scheme="dark")
    assert tab.axe() == []


def test_votes_keep_the_exports_and_their_buttons(tab: Tab) -> None:
    """A vote exchanges parts of the page. Text areas that the user has resized have a style, which is not copied."""
    run_dir = with_files(tab.run("answers"))
    with_text_recipe(run_dir, tab.folder)
    made_answers(run_dir, ["hello", "bye"])

    def with_button(route: Any) -> None:
        answer = route.fetch()
        text = '<div class="command"><code>a</code><copy-button id="kept" data-copy="Copy"></copy-button></div>'
        route.fulfill(response=answer, body=answer.text() + text)

    tab.page.route("**/choose/take*", with_button)
    page = tab.open("/choose/run?dir=runs%2Fanswers")
    page.locator("#exports form").wait_for()
    for number in (1, 2):
        page.evaluate("for (const each of document.querySelectorAll('[id]')) each.style.width = ''")
        page.locator("button.picture").first.click()
        page.locator("#votes", has_text=f"Votes: {number}.").wait_for()
        page.locator("#kept button").wait_for()
        tab.settle()
    assert page.locator("#exports form").count() == 1


@pytest.mark.parametrize("is_writing", [False, True])
def test_the_focus_is_at_the_vote_when_the_answers_are_made(
    is_writing: bool, tab: Tab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child waits, so that the page shows its progress first. A user who writes meanwhile stays in the field."""
    run_dir, go_on = with_files(tab.run("answers")), threading.Event()
    with_text_recipe(run_dir, tab.folder)

    def child(job: CompareJob, listen: Any, notify: Any, require_wanted: Any) -> None:
        assert go_on.wait(30)
        rows = [0, *(updates for updates, _ in job.files)]
        for updates in rows:
            path = job.output / f"{updates}.txt"
            path.write_text(f"answer {updates}", encoding="utf-8")
            fields = {"updates": updates, "total": len(rows), "losses": {}, "images": [str(path)]}
            listen(event("compared", **fields))

    monkeypatch.setattr(comparison_grid, "run_model_tool", child)
    page = tab.open("/choose/run?dir=runs%2Fanswers")
    page.get_by_label("Prompts").fill("hello")
    page.get_by_role("button", name="Make the missing answers").click()
    page.locator("#drawing .badge-running").wait_for()
    if is_writing:
        page.get_by_label("Strengths").focus()
    go_on.set()
    page.locator("#drawing .badge-done").wait_for()
    page.locator("#vote button.picture").first.wait_for()
    tab.settle()
    page.wait_for_timeout(100)
    assert page.evaluate("document.activeElement.id") == ("field-strengths" if is_writing else "vote")
    if not is_writing:
        page.keyboard.press("1")
        page.locator("#votes", has_text="Votes: 1.").wait_for()


def test_a_named_folder_of_llama_cpp_enables_its_button(tab: Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of the field stays, because only the button is exchanged."""
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    run_dir = with_files(tab.run("answers"))
    with_text_recipe(run_dir, tab.folder)
    (tab.folder / "llama.cpp").mkdir()
    (tab.folder / "llama.cpp" / SCRIPT).touch()
    page = tab.open("/choose/run?dir=runs%2Fanswers")
    button, field = page.locator("#export-gguf"), page.get_by_label("Folder of llama.cpp")
    page.locator("#export-gguf[aria-disabled=true]").click(force=True)
    page.wait_for_timeout(200)
    assert tab.server.context.background.of(key_of("export", "runs/answers")) is None and tab.axe() == []
    field.press_sequentially("llama.cpp", delay=10)
    page.locator("#export-gguf:not([aria-disabled])").wait_for()
    assert field.input_value() == "llama.cpp" and page.evaluate("document.activeElement.id") == "field-llama_cpp"
    assert button.count() == 1 and button.get_attribute("type") is None
    field.fill("nothing")
    page.locator("#export-gguf[aria-disabled=true]").wait_for()
