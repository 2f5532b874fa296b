"""A run in a browser: it updates by itself, its curve grows, and hostile texts stay texts."""

from __future__ import annotations

import shutil

import pytest

from lora_rocm.rundir.events import EventWriter
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.lock import locked
from tests.supervisor.fake_run import data_fields, event, failure_fields
from tests.supervisor.wire import start_fields, step_fields
from tests.ui.browser.conftest import Tab
from tests.ui.hostile_runs import with_hostile_texts


def begun(tab: Tab, name: str) -> tuple[RunDir, EventWriter]:
    """A run that has begun."""
    run_dir = RunDir(tab.folder / "runs" / name)
    shutil.rmtree(run_dir.path, ignore_errors=True)
    run_dir.create()
    run_dir.recipe.write_text("model: {}\n", encoding="utf-8")
    writer = EventWriter(run_dir.events(), session=1)
    writer.write(event("start", **start_fields()))
    writer.write(event("data", **data_fields()))
    return run_dir, writer


def test_a_run_is_followed_while_it_trains(tab: Tab) -> None:
    run_dir, writer = begun(tab, "live")
    with locked(run_dir):
        page = tab.open("/runs/view?dir=runs/live")
        chart = page.locator("run-chart[data-field=loss] .chart")
        page.get_by_text("No step yet.").first.wait_for()
        for updates in range(1, 6):
            writer.write(event("step", **step_fields(updates)))
        page.locator("run-chart[data-field=loss] canvas").wait_for()
        page.locator("run-chart[data-field=loss] .chart[aria-label$='5)']").wait_for()
        page.locator("#state dd", has_text="5").first.wait_for()
        writer.write(event("step", **step_fields(6)))
        page.locator("run-chart[data-field=loss] .chart[aria-label$='6)']").wait_for()
        page.get_by_label("Logarithmic").check()
        page.get_by_label("Smoothing").fill("0")
        assert chart.is_visible() and tab.axe() == []
        page.get_by_role("button", name="Stop").click()
        page.get_by_text("Asked to stop").wait_for()
        assert run_dir.stop.exists()
    page.locator("#state .badge-died").wait_for()  # its process is gone, whatever it was doing
    writer.close()


def test_a_failure_appears_with_its_meaning(tab: Tab) -> None:
    run_dir, writer = begun(tab, "fails")
    page = tab.open("/runs/view?dir=runs/fails")
    supervisor = EventWriter(run_dir.events("supervisor"))
    supervisor.write(event("failure", **failure_fields(what="The driver reset the GPU.")))
    page.locator(".badge-failure").wait_for()
    assert "The driver reset the GPU." in page.locator("#stories").inner_text()
    supervisor.close()
    writer.close()


def test_two_runs_are_drawn_over_each_other(tab: Tab) -> None:
    tab.run("one")
    tab.run("two")
    page = tab.open("/runs/view?dir=runs/one")
    page.locator("run-chart[data-field=loss] canvas").wait_for()
    page.get_by_label("With run").select_option("runs/two")
    page.locator(".u-legend .u-label", has_text="two").wait_for()
    # The legend has values only where a step is pointed at
    values = page.locator("run-chart[data-field=loss] .u-legend .u-value")
    assert not any(values.all_inner_texts()) and not values.first.is_visible()
    page.locator("run-chart[data-field=loss] .u-over").hover()
    values.first.wait_for()
    assert all(values.all_inner_texts())


@pytest.mark.slow
def test_previews_files_recipe_and_log_are_there(tab: Tab) -> None:
    run_dir = tab.run("whole")
    run_dir.worker_log.write_text("a line of the log", encoding="utf-8")
    page = tab.open("/runs/view?dir=runs/whole")
    page.locator(".pictures img").first.wait_for()
    page.get_by_role("link", name="lora.safetensors", exact=True).wait_for()
    page.get_by_text("Recipe of this run").click()
    page.locator("#recipe pre").wait_for()
    page.get_by_text("Log of the worker").click()
    page.get_by_text("a line of the log").wait_for()
    tab.settle()
    for width in (360, 1280, 2560):
        page.set_viewport_size({"width": width, "height": 900})
        assert tab.widest() <= 0, width
    assert tab.axe() == []
    page.emulate_media(color_scheme="dark")
    assert tab.axe() == []


def test_a_run_is_renamed_and_deleted(tab: Tab) -> None:
    run_dir = tab.run("to delete")
    tab.expect(404)  # the page may ask for the run once more before it leaves
    page = tab.open("/runs/view?dir=runs/to%20delete")
    page.get_by_text("Rename, archive, delete").click()
    page.get_by_label("New name of the folder").fill("ünder a new name")
    page.get_by_role("button", name="Rename").click()
    page.get_by_role("heading", name="ünder a new name").wait_for()
    page.get_by_text("Rename, archive, delete").click()
    page.get_by_text("Delete this run").click()
    page.locator("#freed", has_text="KiB").wait_for()
    page.get_by_role("button", name="Delete for good").click()
    page.get_by_role("heading", name="Runs").wait_for()
    assert not run_dir.path.exists() and not run_dir.path.with_name("ünder a new name").exists()


def test_hostile_texts_do_nothing(tab: Tab) -> None:
    run_dir = RunDir(tab.folder / "runs" / "hostile")
    shutil.rmtree(run_dir.path, ignore_errors=True)
    with_hostile_texts(run_dir)
    page = tab.open("/runs/view?dir=runs/hostile")
    page.get_by_text("Log of the worker").click()
    page.locator("#log pre").wait_for()
    tab.settle()
    assert "harmed" not in page.title() and page.locator("img[onerror]").count() == 0
    assert tab.axe() == []
    page.close()  # it would notice that its run is gone
    shutil.rmtree(run_dir.path)


def test_a_run_that_disappears_is_named(tab: Tab) -> None:
    run_dir = tab.run("vanishes")
    page = tab.open("/runs/view?dir=runs/vanishes")
    page.locator(".pictures img").first.wait_for()
    tab.settle()
    shutil.rmtree(run_dir.path)
    page.locator("#problem .problem").wait_for()
    assert "no-run" in page.locator("#problem").inner_text()
    tab.expect(404)  # the page may ask for a picture that has just gone
