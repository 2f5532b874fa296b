"""A prompt is drawn in a browser, and its values are used again. The child is replaced; ``slow`` has the real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lora_rocm.commands import tries
from lora_rocm.commands.sample_export import SampleResult
from tests.ui.browser.conftest import Tab
from tests.ui.drawn_grid import with_files


def test_a_prompt_is_drawn_with_its_base_beside(tab: Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    def sample(source: Path, *, output: Path, **options: Any) -> SampleResult:
        path = output / "seed.png"
        Image.new("RGB", (64, 64), (int(options["strength"] * 200), 40, 90)).save(path)
        return SampleResult((path,))

    monkeypatch.setattr(tries, "sample", sample)
    with_files(tab.run("to try"))
    page = tab.open("/try")
    page.get_by_role("link", name="to try").click()
    page.get_by_text("No picture yet").wait_for()
    page.get_by_label("Prompt", exact=True).fill("a größe on a table")
    page.get_by_label("Strength").fill("0.75")
    page.get_by_role("button", name="Draw").click()
    page.locator("#history .attempt figure img").nth(1).wait_for()
    page.locator("#drawing .badge-done").wait_for()
    assert page.get_by_label("Prompt", exact=True).input_value() == "a größe on a table"
    tab.settle()
    for width in (360, 1280, 2560):
        page.set_viewport_size({"width": width, "height": 900})
        assert tab.widest() <= 0, width
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        assert tab.axe() == [], theme
    page.get_by_label("Prompt", exact=True).fill("another")
    page.get_by_role("link", name="Use these values").click()
    page.locator("#field-strength").wait_for()
    assert page.locator("#field-strength").input_value() == "0.75"
    assert page.get_by_label("Prompt", exact=True).input_value() == "a größe on a table"
