"""Files that are paired with images by name are found in either spelling of Unicode, and never chosen silently."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from lora_rocm.dataset.companions.companion_inputs import COMPANION_INPUTS
from lora_rocm.dataset.companions.controls import Controls
from lora_rocm.dataset.companions.masks import Masks
from lora_rocm.dataset.sources.folders import walk
from lora_rocm.dataset.sources.scan import Scan, scan
from lora_rocm.errors import DataError
from lora_rocm.foundation.names import NameIndex, name_key, spelled
from lora_rocm.recipe.load import load_recipe

ROOT = Path(__file__).parents[2]
FORMS = [("NFD", "NFC"), ("NFC", "NFD"), ("NFC", "NFC"), ("NFD", "NFD")]
NAME, FOLDER = "café", "Größen"


@pytest.fixture(autouse=True)
def _spells_as_asked(tmp_path: Path) -> None:
    """Of macOS' file systems one name has both spellings, so that there is nothing to pair."""
    (tmp_path / unicodedata.normalize("NFD", "é")).touch()
    if (tmp_path / "é").exists():
        pytest.skip("this file system does not distinguish the spellings")


def grey(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (96, 64), 128).save(path)


def text(path: Path, content: str = "as written") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")


def row(root: Path, path: str) -> str:
    return json.dumps({"file_name": path, "text": "as written"}, ensure_ascii=False)


Put = Callable[[Path, str], dict[str, object]]
"""Writes the file that belongs to an image; gets the folder of the test and the image's path without extension, in a
spelling.
"""


def in_rows(name: str, content: Callable[[str], str]) -> Put:
    def put(root: Path, stem: str) -> dict[str, object]:
        text(root / "data" / name, content(f"{stem}.png"))
        return {}

    return put


def beside(ending: str, **keys: object) -> Put:
    def put(root: Path, stem: str) -> dict[str, object]:
        folder = next((root / "data").iterdir())  # as it is spelled there
        text(folder / (stem.rpartition("/")[2] + ending))
        return keys

    return put


def masks_beside(root: Path, stem: str) -> dict[str, object]:
    folder = next(path for path in (root / "data").iterdir() if path.is_dir())
    grey(folder / f"{stem.rpartition('/')[2]}-masklabel.png")
    return {"mask_path": "beside"}


def elsewhere(key: str, name: str) -> Put:
    def put(root: Path, stem: str) -> dict[str, object]:
        grey(root / key / name.format(stem))
        return {key: str(root / key)}

    return put


def kohya_json(root: Path, stem: str) -> dict[str, object]:
    text(root / "meta.json", json.dumps({stem: {"caption": "as written"}}, ensure_ascii=False))
    return {"metadata_file": str(root / "meta.json")}


def kohya_json_of_whole_paths(root: Path, stem: str) -> dict[str, object]:
    text(root / "meta.json", json.dumps({f"{root}/data/{stem}.png": {"caption": "as written"}}, ensure_ascii=False))
    return {"metadata_file": str(root / "meta.json")}


CAPTIONS: dict[str, Put] = {
    "caption file": beside(".txt"),
    "caption file in capitals": beside(".TXT"),
    "caption file of a whole name": beside(".png.txt"),
    "second ending": beside("_2.txt", caption_extension=(".txt", "_2.txt")),
    "metadata.jsonl": in_rows("metadata.jsonl", lambda path: json.dumps({"file_name": path, "text": "as written"})),
    "metadata.csv": in_rows("metadata.csv", lambda path: f"file_name,text\n{path},as written\n"),
    "kohya's JSON": kohya_json,
    "kohya's JSON of whole paths": kohya_json_of_whole_paths,
}
COMPANIONS: dict[str, Put] = {
    "masks": elsewhere("mask_path", "{}.png"),
    "masks with an ending": elsewhere("mask_path", "{}_mask.png"),
    "masks beside": masks_beside,
    "control images": elsewhere("control_path", "{}.png"),
}


def scanned(make: SimpleNamespace, root: Path, put: Put, forms: tuple[str, str]) -> Scan:
    """One image in a sub-folder, named in the first spelling, and its companion, named in the second."""
    ours, theirs = (unicodedata.normalize(form, f"{FOLDER}/{NAME}") for form in forms)
    make.image(root / "data" / f"{ours}.png")
    return scan(make.data(path=str(root / "data"), **put(root, theirs)))


def test_every_kind_of_companion_is_tried() -> None:
    assert {Masks, Controls} == set(COMPANION_INPUTS)


@pytest.mark.parametrize("kind", CAPTIONS)
@pytest.mark.parametrize("forms", FORMS)
def test_captions_in_either_spelling(tmp_path: Path, make: SimpleNamespace, kind: str, forms: tuple[str, str]) -> None:
    found = scanned(make, tmp_path, CAPTIONS[kind], forms)
    assert [sample.caption for sample in found.samples] == ["as written"], found.notices


@pytest.mark.parametrize("kind", COMPANIONS)
@pytest.mark.parametrize("forms", FORMS)
def test_companions_in_either_spelling(
    tmp_path: Path, make: SimpleNamespace, kind: str, forms: tuple[str, str]
) -> None:
    found = scanned(make, tmp_path, COMPANIONS[kind], forms)
    assert [len(sample.companions) for sample in found.samples] == [1], found.notices


@pytest.mark.parametrize("forms", FORMS)
def test_patterns_and_folders_of_the_recipe(tmp_path: Path, make: SimpleNamespace, forms: tuple[str, str]) -> None:
    ours, theirs = (unicodedata.normalize(form, NAME) for form in forms)
    make.image(tmp_path / ours / f"{ours}.png")
    make.image(tmp_path / ours / "other.png")
    assert [real for _, real in walk(tmp_path / ours, ".txt", exclude=[f"{theirs}.png"]).relatives] == ["other.png"]
    text(tmp_path / "r.yaml", "model: {name_or_path: 'builtin:tiny-sdxl'}\ntrain: {max_train_steps: 1}\n")
    loaded = load_recipe(tmp_path / "r.yaml", [f"data.path={tmp_path / theirs}"])
    loaded.require_files()
    assert loaded.recipe.data.path == str(tmp_path / ours)


def test_each_of_two_spellings_has_its_own(tmp_path: Path, make: SimpleNamespace) -> None:
    for form in ("NFC", "NFD"):
        make.image(tmp_path / f"{unicodedata.normalize(form, NAME)}.png", caption=form, seed=len(form))
    found = scan(make.data(path=str(tmp_path)))
    assert {sample.caption for sample in found.samples} == {"NFC", "NFD"}
    assert all(unicodedata.is_normalized(sample.caption, str(sample.location)) for sample in found.samples)


def test_a_caption_of_a_whole_name(tmp_path: Path, make: SimpleNamespace) -> None:
    for name in ("cat.png", "cat.jpg", "dog.png", "owl.png.jpg", "owl.png", "out.png"):
        make.image(tmp_path / name)
    for name in ("cat.png.txt", "cat.jpg.txt", "dog.txt", "dog.png.txt", "owl.png.txt", "out.png.txt", "alone.png.txt"):
        text(tmp_path / name, name)
    found = scan(make.data(path=str(tmp_path), exclude=("out.png",)))
    captions = {sample.key: sample.caption for sample in found.samples}
    assert captions["cat.png"] == "cat.png.txt" and captions["cat.jpg"] == "cat.jpg.txt"
    assert captions["dog.png"] == "dog.txt", "the file with its name alone counts"
    assert captions["owl.png.jpg"] == "owl.png.txt" and captions["owl.png"] == "owl", "it is that of the other image"
    notices = "\n".join(found.notices)
    assert "dog.txt, not dog.png.txt" in notices and "alone.png.txt" in notices and "out.png.txt" not in notices
    assert "cat" not in re.sub(r".*\bowl\b.*", "", notices), "the control"


def test_two_captions_that_differ_in_capitals_are_said(tmp_path: Path, make: SimpleNamespace) -> None:
    make.image(tmp_path / "a.png", caption="small")
    text(tmp_path / "a.TXT", "capital")
    if len(list(tmp_path.glob("a.*"))) == 2:
        pytest.skip("this file system does not distinguish them")
    found = scan(make.data(path=str(tmp_path)))
    assert [sample.caption for sample in found.samples] == ["small"]
    assert any("a.TXT and a.txt" in notice for notice in found.notices)


def test_a_companion_in_a_third_spelling_is_not_guessed() -> None:
    both = NameIndex([(unicodedata.normalize(form, "éé"), form) for form in ("NFC", "NFD")])
    assert both.find("éé") == ("éé", "NFC") and both.find("e\u0301é") is None
    only = NameIndex([("éé", 1)])
    assert only.find("e\u0301é") == ("éé", 1) and only.find("ee") is None and "éé" in only
    del only["éé"]
    assert only.find("e\u0301é") is None and not len(only)


def test_a_path_that_is_not_there_stays(tmp_path: Path) -> None:
    assert spelled(tmp_path / "ö" / "é.png") == tmp_path / "ö" / "é.png"
    assert name_key("e\u0301") == "é"


def test_names_are_normalised_in_one_module() -> None:
    """Pairing by another rule would give other pairs: ``name_key`` is the only normalisation of names."""
    of_texts = {"errors.py", "foundation/redact.py", "foundation/terminal_text.py", "recipe/adapter_sections.py"}
    of_texts.add("recipe/excerpt.py")  # the width of letters below which a caret stands
    found = {
        path.relative_to(ROOT / "lora_rocm").as_posix()
        for path in (ROOT / "lora_rocm").rglob("*.py")
        if "unicodedata" in path.read_text(encoding="utf-8")
    }
    assert found == {"foundation/names.py"} | of_texts


def test_no_control_image_of_that_name_is_an_error(tmp_path: Path, make: SimpleNamespace) -> None:
    """The control: other names are not the same."""
    make.image(tmp_path / "data" / "cafe.png")
    grey(tmp_path / "control" / "café.png")
    with pytest.raises(DataError) as caught:
        scan(make.data(path=str(tmp_path / "data"), control_path=str(tmp_path / "control")))
    assert caught.value.code == "control-missing"
