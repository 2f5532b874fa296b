"""New recipes without a browser: from a preset, filled in for images, and from another trainer's files."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.recipe.load import load_recipe
from lora_rocm.ui.pages import recipe_new
from tests.importing.test_import_command import LOSSY, WHOLE
from tests.ui.site import Site, code_of


def begin(site: Site, **fields: str) -> Any:
    return site.client.post("/recipe/new/start", data=fields, follow_redirects=False)


def ended(site: Site, address: str) -> str:
    for _ in range(1200):
        text = str(site.client.get(address, headers={"hx-request": "true"}).text)
        if "badge-running" not in text:
            return text
        time.sleep(0.05)
    raise AssertionError("it did not end")


def test_the_page_offers_every_shipped_recipe(site: Site) -> None:
    text = site.get("/recipe/new")
    assert all(f'value="{name}"' in text for name in ("sdxl", "llm-chat", "flux"))


def test_the_images_of_the_page_before_are_filled_in_and_folders_are_suggested(site: Site) -> None:
    from PIL import Image

    assert 'value="my cats ü"' in site.get("/recipe/new", images="my cats ü")
    (site.folder / "my cats ü").mkdir()
    assert "option" not in site.get("/images/names")
    Image.new("RGB", (64, 64)).save(site.folder / "my cats ü" / "1.png")
    assert '<option value="my cats ü">' in site.get("/images/names")


def test_only_what_suits_the_kind_of_samples_is_offered(site: Site) -> None:
    of_texts, of_images = site.get("/recipe/new", texts="chats.jsonl"), site.get("/recipe/new", images="cats")
    assert 'value="chats.jsonl"' in of_texts and 'value="llm-chat"' in of_texts and "trigger word" not in of_texts
    assert 'name="images"' not in of_texts and 'value="sdxl"' not in of_texts and "image-folders" not in of_texts
    assert 'name="texts"' not in of_images and 'value="llm-chat"' not in of_images and "trigger word" in of_images
    assert 'name="texts"' in site.get("/recipe/new", kind="texts")  # the links between both


def test_what_is_filled_in_is_told_in_the_words_of_the_page(site: Site) -> None:
    rows = '{"prompt": "a", "completion": "b"}\n' * 30
    (site.folder / "chats.jsonl").write_text(rows, encoding="utf-8")
    text = ended(site, begin(site, name="brine", source="llm-chat", texts="chats.jsonl").headers["location"])
    options = ("--model", "--texts", "--images", "--card", "--from")
    assert "output.save_every_n_steps" in text and not any(option in text for option in options)
    made = (site.folder / "brine.yaml").read_text(encoding="utf-8")
    assert "name: brine" in made and not any(option in made for option in options)


def test_a_preset_is_copied(site: Site) -> None:
    answer = begin(site, name="mine", source="sdxl")
    assert answer.status_code == 303
    text = ended(site, answer.headers["location"])
    assert "mine.yaml" in text and load_recipe(Path("mine.yaml")).recipe.lora.rank == 16
    assert "name_or_path" in text  # a line to be changed


def test_values_of_a_preset_are_filled_in(site: Site) -> None:
    text = ended(site, begin(site, name="fine", source="sdxl", preset="best-quality").headers["location"])
    assert "lora.rank" in text and load_recipe(Path("fine.yaml")).recipe.lora.rank == 32


@pytest.mark.slow
def test_images_are_read_and_each_value_has_its_reason(site: Site) -> None:
    from PIL import Image

    folder = site.folder / "my cats"
    folder.mkdir()
    for number in range(3):
        Image.new("RGB", (640, 640), (number, 0, 0)).save(folder / f"{number}.png")
    answer = begin(site, name="cats", source="demo", images="my cats", card="24GB")
    text = ended(site, answer.headers["location"])
    if "problem" in text:
        assert code_of(text) == ""
    assert "data.path" in text and "3 images" in text
    assert load_recipe(Path("cats.yaml")).recipe.data.path == str(folder)
    assert folder in [each.path for each in site.context.folders.named]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"source": "sdxl"}, "field-missing"),
        ({"name": "../mine", "source": "sdxl"}, "outside-folders"),
        ({"name": "there", "source": "sdxl"}, "file-exists"),
        ({"name": "mine", "source": "sdxl", "images": "nowhere"}, "no-folder"),
        ({"name": "mine", "images": "nowhere"}, "recipe-unnamed"),
    ],
)
def test_a_wrong_request_is_refused_at_once(fields: dict[str, str], code: str, site: Site) -> None:
    (site.folder / "there.yaml").write_text("x", encoding="utf-8")
    assert code_of(begin(site, **fields).text) == code
    assert sorted(path.name for path in site.folder.iterdir()) == ["there.yaml"]


def test_a_fault_of_the_work_is_shown(site: Site) -> None:
    text = ended(site, begin(site, name="mine", source="nothing like that").headers["location"])
    assert "--from" not in text and "Shipped" in text  # the page's words
    assert code_of(text) == "no-shipped-recipe" and not (site.folder / "mine.yaml").exists()
    assert code_of(site.client.get("/recipe/new/made?work=other").text) == "work-unknown"


def drop(site: Site, *files: tuple[str, bytes], name: str = "") -> Any:
    given = [("files", (each, content)) for each, content in files]
    return site.client.post("/recipe/import", files=given, data={"name": name}, headers={"hx-request": "true"})


def test_a_dropped_configuration_becomes_a_recipe_with_a_table(site: Site) -> None:
    answer = drop(site, ("../train me.toml", LOSSY.encode()))
    assert answer.status_code == 200 and "keep_tokens_separator" in answer.text and "badge-harms" in answer.text
    (path,) = site.folder.glob("*.yaml")
    assert "lora_rocm" not in answer.text and "/tmp" not in path.read_text(encoding="utf-8")
    assert load_recipe(path).recipe.lora.rank == 4
    assert code_of(drop(site, ("train me.toml", WHOLE.encode())).text) == "file-exists"


def test_a_complete_one_has_no_warning(site: Site) -> None:
    answer = drop(site, ("a.toml", WHOLE.encode()), name="b")
    assert "badge-harms" not in answer.text and (site.folder / "b.yaml").exists()


def test_files_that_are_no_configuration_are_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    assert code_of(drop(site, ("cat.png", b"\x89PNG\r\n")).text) in ("import-unknown", "import-unreadable", "not-text")
    assert code_of(drop(site).text) == "no-upload"
    monkeypatch.setattr(recipe_new, "MAX_FILE_BYTES", 10)
    assert code_of(drop(site, ("a.toml", WHOLE.encode())).text) == "upload-refused"
    assert not list(site.folder.glob("*.yaml"))


def test_a_name_is_proposed_from_the_data_and_is_free(site: Site) -> None:
    def proposed(**query: str) -> str:
        found = re.search(r'id="field-name"[^>]*value="([^"]*)"', site.get("/recipe/new", **query))
        assert found is not None
        return found[1]

    assert proposed() == "" and proposed(images="pics/blobby v1.5") == "blobby v1.5"
    assert proposed(texts="pip.jsonl") == "pip"
    (site.folder / "pip.yaml").write_text("model: {}", encoding="utf-8")
    assert proposed(texts="pip.jsonl") == "pip-2"
