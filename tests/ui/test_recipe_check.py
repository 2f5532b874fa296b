"""The findings of ``check`` in the data, on the page of a recipe. The child that reads the base model is faked."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lora_rocm.commands import check as command
from lora_rocm.commands.check import CheckResult
from lora_rocm.commands.recipe_filling import RecipeDraft, fit_to_length
from lora_rocm.families.registry import FAMILIES
from lora_rocm.processes.jobs import Weighed
from lora_rocm.recipe.recipe_text import RecipeText
from tests.ui.site import Site, code_of
from tests.ui.test_recipe_plan import until

FILE = "cats.yaml"
RECIPE = """\
model: {name_or_path: "builtin:tiny-sdxl"}
data:
  resolution: 128
  caption_fallback: empty
  sources: [{path: my cats, crop_column: crop, mask_path: beside}]
train: {epochs: 5, batch_size: 2}
"""


@pytest.fixture(autouse=True)
def weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Weighing:
        def __init__(self, recipe: Any) -> None:
            pass

        def result(self) -> Weighed:
            return Weighed({"unet": 2**20}, [], [], [])

    monkeypatch.setattr(command, "Weighing", Weighing)


@pytest.fixture
def cats(site: Site) -> Path:
    folder = site.folder / "my cats"
    folder.mkdir()
    for number in range(4):
        Image.new("RGB", (256, 256), (number, 0, 0)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("a cat", encoding="utf-8")
    Image.new("L", (256, 256), 255).save(folder / "1-masklabel.png")
    (folder / "metadata.jsonl").write_text('{"file_name": "0.png", "crop": [0, 0, 128, 128]}\n', encoding="utf-8")
    (site.folder / FILE).write_text(RECIPE, encoding="utf-8")
    return folder


def checked(site: Site, text: str = RECIPE) -> str:
    """The box, when the check has ended."""

    def ask() -> str:
        answer = site.client.post("/recipe/check", params={"file": FILE}, data={"text": text}).text
        address = answer.partition('hx-get="')[2].partition('"')[0].replace("&amp;", "&")
        if not address:
            return answer
        return until(lambda: site.client.get(address).text, "<")

    return until(ask, "<d")


def numbers(html: str) -> list[str]:
    return re.findall(r"<dd>([^<]*)", html)


def test_images_captions_masks_crops_and_steps_are_counted(site: Site, cats: Path) -> None:
    assert numbers(checked(site)) == ["4", "0", "1", "1", "2", "10"]


def test_an_unusable_image_and_a_missing_caption_show_without_a_good_mark(site: Site, cats: Path) -> None:
    assert 'class="good"' in checked(site)
    (cats / "2.txt").unlink()
    assert 'class="good"' not in checked(site) and numbers(checked(site))[1] == "1"
    (cats / "3.png").write_bytes(b"not an image")
    text = checked(site)
    assert numbers(text)[0] == "3 " and "3.png" in text


def test_a_folder_without_images_and_a_wrong_recipe_are_errors(site: Site, cats: Path) -> None:
    for path in cats.iterdir():
        path.unlink()
    answer = site.client.post("/recipe/check", params={"file": FILE}, data={"text": RECIPE}).text
    address = answer.partition('hx-get="')[2].partition('"')[0]
    text = until(lambda: site.client.get(address).text, "problem") if address else answer
    assert code_of(text) == "data-folder-empty"
    assert site.client.post("/recipe/check", params={"file": FILE}, data={"text": "model: ["}).status_code == 422
    assert code_of(site.client.get("/recipe/check/state", params={"work": "other"}).text) == "work-unknown"


def test_only_the_newest_of_many_texts_is_checked(site: Site, cats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, go = [], threading.Event()

    def slow(loaded: Any, next_command: str) -> CheckResult:
        ranks.append(loaded.recipe.lora.rank)
        go.wait(10)
        return CheckResult(loaded.path, "sdxl", "base")

    monkeypatch.setattr(command, "checked", slow)
    texts = [f"{RECIPE}lora: {{rank: {rank}}}\n" for rank in (1, 2, 3)]
    for number, text in enumerate(texts):
        site.client.post("/recipe/check", params={"file": FILE}, data={"text": text})
        if number == 0:
            until(lambda: str(ranks), "1")
    go.set()
    until(lambda: str(ranks), "3")
    assert ranks == [1, 3]


def test_a_recipe_leads_to_its_images(site: Site, cats: Path) -> None:
    page = site.get("/recipe/edit", file=FILE)
    (address,) = re.findall(r'href="(/images/view[^"]*)"', page)
    assert site.client.get(address.replace("&amp;", "&")).status_code == 200


def fitting(html: str) -> list[str]:
    return re.findall(r"<li><code>(\w+\.\w+: \d+)</code>", html.replace("<wbr>", ""))


def fit(site: Site, text: str) -> Any:
    return site.client.post("/recipe/check/fit", params={"file": FILE}, data={"text": text})


INTERVALS = """\
optim:
  lr_warmup_steps: 100
sample:
  prompts: [a cat]
  every_n_epochs: 4  # a comment
output:
  save_every_n_epochs: 5
"""


def test_intervals_that_do_not_fit_the_run_are_fitted_as_new_fits_them(site: Site, cats: Path) -> None:
    text = RECIPE + INTERVALS
    assert code_of(fit(site, text).text) == "work-unknown", "its length is not known yet"
    shown = checked(site, text)
    draft = RecipeDraft(RecipeText(text), FAMILIES)
    fit_to_length(draft, 10, 2)
    wanted = ["optim.lr_warmup_steps: 1", "output.save_every_n_steps: 2", "sample.every_n_steps: 2"]
    assert fitting(shown) == wanted == [f"{'.'.join(each.place)}: {each.value}" for each in draft.values]
    fitted = fit(site, text).json()["text"]
    assert "every_n_epochs" not in fitted and fitted.startswith(RECIPE)
    again = checked(site, fitted)
    assert fitting(again) == [] and "data-fit" not in again
    # Another text has another length
    longer = fitted.replace("epochs: 5", "epochs: 6")
    assert code_of(fit(site, longer).text) == "work-unknown"
    assert fitting(checked(site, longer)) == [], "shorter intervals than needed stay"
