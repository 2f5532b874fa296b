"""A fork in a browser: from a click on the curve to the new run's page, with a refusal that loses no input."""

from __future__ import annotations

import shutil

import pytest

from lora_rocm.recipe.comparison import fingerprint
from lora_rocm.recipe.fork_keys import why_fixed
from lora_rocm.recipe.load import dump_recipe, load_recipe
from lora_rocm.rundir.fork_origin import fork_origin
from lora_rocm.rundir.layout import RunDir
from lora_rocm.ui.launch import Launches
from tests.supervisor.fake_run import RECIPE, write_checkpoint
from tests.ui.browser.conftest import Tab


def test_a_run_is_forked_from_its_curve(tab: Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    for old in (tab.folder / "runs").glob("branch*"):
        shutil.rmtree(old)
    resumed: list[RunDir] = []
    monkeypatch.setattr(Launches, "resume", lambda self, run_dir, working: resumed.append(run_dir))
    run_dir = tab.run("branches")
    run_dir.recipe.write_text(RECIPE, encoding="utf-8")
    run_dir.recipe.write_text(dump_recipe(load_recipe(run_dir.recipe).recipe), encoding="utf-8")
    shutil.rmtree(run_dir.checkpoints, ignore_errors=True)
    for updates in (20, 30):
        write_checkpoint(run_dir, updates, recipe=fingerprint(load_recipe(run_dir.recipe).recipe))
    page = tab.page
    page.route("**/runs/curve?*", lambda route: None)  # no answer comes
    tab.open("/runs/view?dir=runs/branches")
    assert tab.axe() == []  # before the first curve has come, too
    page.unroute("**/runs/curve?*")
    page.reload()
    chart = page.locator("run-chart[data-field=loss]")
    chart.locator("canvas").wait_for()
    # a click on the mark of step 20
    left = page.evaluate("document.querySelector('run-chart[data-field=loss]').plot.valToPos(20, 'x')")
    chart.locator(".u-over").click(position={"x": left, "y": 100})
    step = page.get_by_label("Checkpoint of step")
    page.locator("#fork-step:focus").wait_for()
    assert step.input_value() == "20"
    assert tab.axe() == []
    # a refusal keeps what was written
    page.get_by_label("optim.learning_rate", exact=True).fill("5e-5")
    page.get_by_text("Keys that cannot change, and why").click()
    page.get_by_label("Set other keys").fill("lora.rank=7")
    page.get_by_role("button", name="Start the fork").click()
    page.locator("#fork-problem", has_text=why_fixed("lora.rank")).wait_for()
    assert page.get_by_label("optim.learning_rate", exact=True).input_value() == "5e-5"
    tab.expect(422)
    page.get_by_label("Set other keys").fill("")
    page.get_by_role("button", name="Start the fork").click()
    page.get_by_role("heading", name="branches-fork").wait_for()
    page.get_by_role("region", name="Changed values").get_by_text("5e-05").wait_for()
    origin = fork_origin(resumed[0])
    assert origin is not None and origin.step == 20 and tab.axe() == []
    for width in (360, 2560):
        page.set_viewport_size({"width": width, "height": 900})
        assert tab.widest() <= 0, width
    page.get_by_role("link", name="branches", exact=True).click()
    page.get_by_role("heading", name="Forks of this run").wait_for()
