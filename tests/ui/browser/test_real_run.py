"""A real run of the tiny model: started, stopped, continued and finished from the page (slow: minutes)."""

from __future__ import annotations

import pytest

from tests.ui.browser.conftest import Tab

RECIPE = """\
model: {name_or_path: "builtin:tiny-sdxl"}
data: {path: "builtin:demo", resolution: 64, bucket_step: 32}
train: {max_train_steps: 60, batch_size: 1}
sample: {prompts: [a zibu], every_n_steps: 30, steps: 4}
runtime: {device: cpu}
"""
WAIT_MS = 240_000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_is_started_stopped_continued_and_finished(tab: Tab) -> None:
    path = tab.folder / "real.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    context = tab.server.context
    run_dir = context.launches.train(path, [], tab.folder)
    page = tab.open("/")
    page.get_by_role("link", name=run_dir.name).wait_for(timeout=WAIT_MS)
    page.get_by_role("link", name=run_dir.name).click()
    page.get_by_text("Training", exact=True).wait_for(timeout=WAIT_MS)
    page.get_by_role("button", name="Stop").click()
    page.locator("#state .badge-stopped").wait_for(timeout=WAIT_MS)
    page.get_by_role("button", name="Resume").click()
    page.locator("#state .badge-finished").wait_for(timeout=WAIT_MS)
    page.locator(".pictures img").first.wait_for()
    assert page.get_by_role("link", name="lora.safetensors", exact=True).is_visible() and tab.axe() == []
