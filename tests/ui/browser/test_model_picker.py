"""The chooser of a base model in a browser, the way a user goes: find, search, use, and download."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_rocm.commands import check, hub_download, plan_cards
from lora_rocm.commands.check import CheckResult
from lora_rocm.processes.hub_jobs import HubOffer
from lora_rocm.ui.pages import recipe_models
from tests.commands.test_base_candidates import vae, weights
from tests.ui.browser.conftest import Tab
from tests.ui.test_recipe_models import offer_of
from tests.ui.test_recipe_part import RECIPE
from tests.ui.test_recipe_plan import rows


@pytest.fixture
def recipe(tab: Tab, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    models = tmp_path / "home" / "ComfyUI" / "models"
    weights(models / "checkpoints" / "a painterly base with a rather long name v12 final.safetensors", "sdxl")
    weights(models / "checkpoints" / "old.safetensors", "sd15")
    (models / "checkpoints" / "pickled.ckpt").write_bytes(b"x")
    vae(models / "vae" / "a vae.safetensors")
    monkeypatch.setattr(plan_cards, "plan_cards", rows)
    monkeypatch.setattr(check, "checked", lambda loaded, command: CheckResult(loaded.path, "sdxl", "base"))
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("LORA_ROCM_HOME", str(tmp_path / "own"))
    recipe_models._seen.cache_clear()
    recipe_models._listing.clear()
    path = tab.folder / f"{request.node.name}.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return path


def test_a_model_is_found_searched_and_used(tab: Tab, recipe: Path) -> None:
    page = tab.open(f"/recipe/edit?file={recipe.name}")
    field = page.locator('.view-simple [data-field="model.name_or_path"]')
    field.get_by_role("button", name="Choose on this machine").click()
    field.get_by_text("Not for").wait_for()
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        assert tab.axe() == [], theme
    for width in (360, 1280, 2560):
        page.set_viewport_size({"width": width, "height": 900})
        assert tab.widest() <= 0, f"{width} px"
    # Search by keyboard; Enter does not save the recipe
    field.get_by_label("Search").fill("painterly")
    field.get_by_text("old.safetensors").first.wait_for(state="detached")
    field.get_by_label("Search").press("Enter")
    field.get_by_role("button", name="Use a painterly").press("Enter")
    page.get_by_text("Not saved yet").wait_for()
    assert "painterly" in field.get_by_label("Base model").input_value()
    assert recipe.read_text(encoding="utf-8") == RECIPE
    page.locator("#verdict .good").wait_for()
    assert "painterly base" in page.locator("#recipe-text").input_value()


@pytest.mark.slow
def test_a_model_is_downloaded_for_a_new_recipe(tab: Tab, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go: list[bool] = []

    def download(offer: HubOffer, advance: Callable[[int, int], None]) -> Path:
        while not go:
            advance(1 << 30, offer.num_bytes)
            time.sleep(0.02)
        return Path("x")

    monkeypatch.setattr(hub_download, "offered", offer_of)
    monkeypatch.setattr(hub_download, "download_base", download)
    page = tab.open("/recipe/new")
    page.get_by_role("button", name="Choose on this machine").click()
    page.get_by_text("Download from the hub").click()
    page.get_by_label("Name on huggingface.co").fill("someone/browser")
    page.get_by_label("Name on huggingface.co").press("Enter")
    page.get_by_role("button", name="Download", exact=True).click()
    page.get_by_text("1.0 GiB of 3.0 GiB").wait_for()
    assert tab.axe() == []
    page.set_viewport_size({"width": 360, "height": 900})
    assert tab.widest() <= 0
    go.append(True)
    page.locator(".hub-download").get_by_role("button", name="Use").click()
    assert page.get_by_label("Base model", exact=True).input_value() == "someone/browser"
