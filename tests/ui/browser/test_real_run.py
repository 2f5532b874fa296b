"""Real runs of the tiny model: started, stopped, continued and finished from the page (slow: minutes)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import psutil
import pytest

from lora_rocm.rundir.layout import RunDir
from tests.ui.browser.conftest import Tab

RECIPE = """\
model: {name_or_path: "builtin:tiny-sdxl"}
data: {path: "builtin:demo", resolution: 64, bucket_step: 32}
train: {max_train_steps: STEPS, batch_size: 1}
sample: {prompts: [a zibu], every_n_steps: 30, steps: 4}
runtime: {device: cpu, deterministic: true, threads: 1}
"""
WAIT_MS = 240_000


def recipe(tab: Tab, name: str, steps: int) -> Path:
    path = tab.folder / name
    path.write_text(RECIPE.replace("STEPS", str(steps)), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_is_started_stopped_continued_and_finished(tab: Tab) -> None:
    context = tab.server.context
    run_dir = context.launches.train(recipe(tab, "real.yaml", 60), [], tab.folder)
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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_page_that_watches_changes_no_byte_of_the_result(tab: Tab) -> None:
    context, loras = tab.server.context, []
    for name, watches in (("alone.yaml", False), ("watched.yaml", True)):
        run_dir = context.launches.train(recipe(tab, name, 20), ["sample.prompts=[]"], tab.folder)
        started = context.launches.of(run_dir)
        assert started is not None
        if watches:
            tab.page.goto(tab.address + "/runs")
            tab.page.get_by_role("link", name=run_dir.name).click(timeout=WAIT_MS)
            tab.page.locator("#state .badge-finished").wait_for(timeout=WAIT_MS)
        assert started.process.wait(WAIT_MS / 1000) == 0, started.end_of_output
        loras.append(RunDir(run_dir).lora.read_bytes())
    assert loras[0] == loras[1]


TEXT_RECIPE = """\
model: {family: causal-lm, name_or_path: "builtin:tiny-llama"}
data: {sources: [{dataset: chats.jsonl}]}
train: {max_train_steps: 2, batch_size: 1}
runtime: {device: cpu, deterministic: true, threads: 1}
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_is_exported_in_the_page_and_a_cancelled_child_is_gone(tab: Tab) -> None:
    context = tab.server.context
    rows = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"zibu {n}"}]} for n in "ab"
    ]
    (tab.folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (tab.folder / "chat.yaml").write_text(TEXT_RECIPE, encoding="utf-8")
    run_dir = RunDir(context.launches.train(tab.folder / "chat.yaml", [], tab.folder))
    started = context.launches.of(run_dir.path)
    assert started is not None and started.process.wait(WAIT_MS / 1000) == 0, started and started.end_of_output
    page = tab.open(f"/runs/view?dir=runs/{run_dir.path.name}")
    page.locator("summary", has_text="Export to another format").click()
    page.get_by_role("button", name="Write merged").click()
    page.get_by_role("link", name="Download config.json").wait_for(timeout=WAIT_MS)
    page.locator("#files summary", has_text="Folder merged").wait_for()
    assert run_dir.export_of("merged").is_dir() and tab.axe() == []
    # What the command refuses has its words; a cancelled export leaves no process and no piece of a file
    page.get_by_role("button", name="Write merged").click()
    page.locator("#exports .code", has_text="output-not-empty").wait_for()
    shutil.rmtree(run_dir.export_of("merged"))
    before = {child.pid for child in psutil.Process().children()}
    page.get_by_role("button", name="Write merged").click()
    page.locator("#exports .badge-running").wait_for()
    while not (found := [each for each in psutil.Process().children() if each.pid not in before]):
        page.wait_for_timeout(10)
    (child,) = found
    page.locator("#exports").get_by_role("button", name="Cancel").click()
    page.locator("#exports .badge-cancelled").wait_for()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert not [path for path in run_dir.path.iterdir() if "merged" in path.name]
