"""Recipe in a browser: the fields and the YAML are one text, saved, undone, and in conflict with another program."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lora_rocm.commands import check
from lora_rocm.commands.check import CheckResult
from lora_rocm.planning.data_plan import DataPlan, run_plan
from lora_rocm.recipe.load import LoadedRecipe
from lora_rocm.ui import launch
from tests.importing.test_import_command import LOSSY
from tests.ui.browser.conftest import Tab, uncounted_recipe
from tests.ui.browser.test_real_run import WAIT_MS
from tests.ui.test_recipe_part import RECIPE


@pytest.fixture
def recipe(tab: Tab, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    return uncounted_recipe(tab, request.node.name, RECIPE, monkeypatch)


@pytest.mark.slow
def test_a_recipe_is_accessible_and_fits(tab: Tab, recipe: Path) -> None:
    page = tab.open(f"/recipe/edit?file={recipe.name}")
    for view in ("Usual keys", "All keys"):
        page.get_by_role("button", name=view).click()
        for section in page.locator(".view-full details > summary").all() if view == "All keys" else ():
            section.click()
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)
            assert tab.axe() == [], f"{view} {theme}"
        for width in (360, 1280, 2560):
            page.set_viewport_size({"width": width, "height": 900})
            assert tab.widest() <= 0, f"{view} at {width} px"


def test_intervals_are_fitted_by_one_click(tab: Tab, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(loaded: LoadedRecipe, command: str) -> CheckResult:
        plan = run_plan(loaded.recipe, DataPlan({}, 10, loaded.recipe.train.max_train_steps or 0, 1, 1))
        return CheckResult(loaded.path, "sdxl", "base", plan=plan)

    monkeypatch.setattr(check, "checked", checked)
    page = tab.open(f"/recipe/edit?file={recipe.name}")
    page.get_by_label("Steps").first.fill("20")
    page.get_by_text("output.save_every_n_steps: 5").wait_for()
    assert tab.axe() == []
    page.get_by_role("button", name="Fit the intervals").click()
    page.get_by_role("button", name="Fit the intervals").wait_for(state="detached")
    text = page.locator("#recipe-text").input_value()
    assert "save_every_n_steps: 5" in text and recipe.read_text(encoding="utf-8") == RECIPE, "nothing is saved"


def test_the_fields_and_the_text_are_one(tab: Tab, recipe: Path) -> None:
    page = tab.open(f"/recipe/edit?file={recipe.name}")
    text, rank = page.locator("#recipe-text"), page.get_by_label("Rank", exact=True)
    rank.fill("8")
    rank.blur()
    page.get_by_text("Not saved yet").wait_for()
    page.wait_for_timeout(50)
    page.locator("#verdict .good").wait_for()
    assert recipe.read_text(encoding="utf-8") == RECIPE
    # The other way, with a fault that is named at its field
    text.fill(text.input_value().replace("max_train_steps: 40", "max_train_steps: none at all"))
    page.locator(".view-simple .field-wrong").get_by_label("Steps").wait_for()
    text.fill(text.input_value().replace("none at all", "60"))
    page.locator("#verdict .good").wait_for()
    assert page.get_by_label("Steps").first.input_value() == "60"
    # A key that excludes another one empties it, and a key that is set comes into sight
    steps, epochs = page.locator("[id='simple-train.max_train_steps']"), page.locator("[id='simple-train.epochs']")
    epochs.fill("3")
    tab.wait_for_value(steps, "")
    steps.fill("60")
    tab.wait_for_value(epochs, "")
    assert "epochs" not in text.input_value()
    every = page.locator("[id='simple-sample.every_n_epochs']")
    assert not every.is_visible()
    text.fill(text.input_value() + "sample: {prompts: [a], every_n_epochs: 2}\n")
    every.wait_for()
    text.fill(text.input_value().partition("sample:")[0])
    tab.wait_for_value(every, "")
    # Saved and undone
    page.get_by_role("button", name="Save", exact=True).click()
    page.get_by_text("Saved", exact=True).wait_for()
    wanted = RECIPE.replace("rank: 16 ", "rank: 8  ").replace("steps: 40", "steps: 60")
    assert recipe.read_text(encoding="utf-8") == wanted
    page.get_by_role("button", name="Undo the last save").click()
    page.get_by_role("button", name="Undo the last save").wait_for(state="hidden")
    assert recipe.read_text(encoding="utf-8") == RECIPE == text.input_value()


def test_a_preset_is_shown_and_then_applied(tab: Tab, recipe: Path) -> None:
    page = tab.open(f"/recipe/edit?file={recipe.name}")
    page.get_by_role("button", name="Best quality").click()
    page.get_by_role("cell", name="32").first.wait_for()
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        assert tab.axe() == [], theme
    page.set_viewport_size({"width": 360, "height": 900})
    assert tab.widest() <= 0
    page.get_by_role("button", name="Apply to this recipe").click()
    page.get_by_text("has these values already").wait_for()
    page.get_by_text("Not saved yet").wait_for()
    assert page.get_by_label("Rank", exact=True).input_value() == "32"
    assert "# 8 for a simple subject" in page.locator("#recipe-text").input_value()
    assert recipe.read_text(encoding="utf-8") == RECIPE


def test_a_hand_edit_appears_and_a_conflict_is_shown(tab: Tab, recipe: Path) -> None:
    page = tab.open(f"/recipe/edit?file={recipe.name}")
    text = page.locator("#recipe-text")
    recipe.write_text(RECIPE.replace("rank: 16", "rank: 4"), encoding="utf-8")
    page.evaluate("window.dispatchEvent(new Event('focus'))")
    tab.wait_for_value(page.get_by_label("Rank", exact=True), "4")
    assert "rank: 4" in text.input_value()
    # Both change it
    text.fill(RECIPE + "# mine\n")
    recipe.write_text(RECIPE + "# theirs\n", encoding="utf-8")
    page.get_by_role("button", name="Save", exact=True).click()
    page.locator(".problem .code", has_text="edit-conflict").wait_for()
    assert recipe.read_text(encoding="utf-8").endswith("# theirs\n") and text.input_value().endswith("# mine\n")
    page.get_by_role("button", name="Save my version").click()
    page.get_by_text("Saved", exact=True).wait_for()
    assert recipe.read_text(encoding="utf-8").endswith("# mine\n")
    tab.expect(409)


@pytest.mark.slow
def test_a_preset_and_a_dropped_configuration_become_recipes(tab: Tab) -> None:
    page = tab.open("/recipe/new")
    assert tab.axe() == []
    page.get_by_label("Name of the recipe").first.fill("browser-new")
    page.get_by_label("Shipped recipe").select_option("sdxl")
    page.get_by_role("button", name="Make the recipe").click()
    page.get_by_role("heading", name="browser-new.yaml is written").wait_for()
    assert tab.axe() == [] and tab.widest() <= 0
    page.get_by_role("link", name="Open the recipe").click()
    page.locator("#recipe-text").wait_for()
    # A refused request keeps what was written
    page = tab.open("/recipe/new")
    page.get_by_label("Name of the recipe").first.fill("browser-new")
    page.get_by_role("button", name="Make the recipe").click()
    page.locator(".problem .code", has_text="file-exists").wait_for()
    assert page.get_by_label("Name of the recipe").first.input_value() == "browser-new"
    # Another trainer's file
    file = {"name": "kohya.toml", "mimeType": "text/plain", "buffer": LOSSY.encode()}
    page.get_by_label("Configuration files").set_input_files(file)
    page.get_by_role("button", name="Import").click()
    page.locator("#imported .badge-harms").wait_for()
    assert tab.axe() == []
    for width in (360, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        assert tab.widest() <= 0
    tab.expect(422)


def test_the_estimate_follows_and_training_starts(tab: Tab, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exists = recipe.with_suffix(".started")  # the command trains until the run exists
    code = f"import pathlib, time\nwhile not pathlib.Path({str(exists)!r}).exists(): time.sleep(0.05)"
    monkeypatch.setattr(launch, "python_command", lambda *words: [sys.executable, "-c", code])
    page = tab.open(f"/recipe/edit?file={recipe.name}")
    page.locator("#plan .chips").wait_for()
    page.get_by_label("Slider of lora.rank").fill("64")
    page.get_by_text("Not saved yet").wait_for()
    page.locator("#plan .chips").wait_for()
    page.get_by_text("How each card trains it").click()
    assert tab.axe() == [] and page.get_by_label("Rank", exact=True).input_value() == "64"
    page.set_viewport_size({"width": 360, "height": 800})
    assert tab.widest() <= 0 and tab.axe() == []
    page.get_by_role("button", name="Save and start training").click()
    page.get_by_role("heading", name="The run is starting").wait_for()
    assert tab.axe() == [] and "rank: 64" in recipe.read_text(encoding="utf-8")
    (made,) = [each for each in tab.server.context.launches.all() if recipe.stem in each.run_dir.name]
    views = list[str]()  # the page is led on once: a second time would abort the first
    page.on(
        "request", lambda it: views.append(it.url) if it.is_navigation_request() and "/runs/view" in it.url else None
    )
    tab.run(made.run_dir.name)
    asks = "document.body.dispatchEvent(new CustomEvent('live:runs'))"
    page.evaluate(f"for (let n = 0; n < 5; n++) setTimeout(() => {asks}, 15 * n)")
    page.wait_for_url("**/runs/view?*")
    assert len(views) == 1
    exists.touch()
    assert made.process.wait(20) == 0
    page.go_back()  # not to the page that waited
    page.wait_for_url("**/recipe/edit?*")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_from_a_preset_to_a_finished_run(tab: Tab) -> None:
    page = tab.open("/")
    page.get_by_role("link", name="New training").click()
    page.get_by_role("link", name="New recipe").click()
    page.get_by_label("Name of the recipe").first.fill("first-training")
    page.get_by_label("Shipped recipe").select_option("demo")
    page.get_by_role("button", name="Make the recipe").click()
    page.get_by_role("link", name="Open the recipe").click(timeout=WAIT_MS)
    steps = page.get_by_label("Steps").first
    steps.fill("4")
    steps.blur()
    page.get_by_text("Not saved yet").wait_for()
    page.get_by_role("button", name="Save and start training").click()
    page.wait_for_url("**/runs/view?*", timeout=WAIT_MS)
    page.locator("#state .badge-finished").wait_for(timeout=WAIT_MS)
