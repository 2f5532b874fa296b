"""Control images in columns of a dataset: the same cache entries as from folders, and faults with their place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest
import torch
from pyarrow import parquet

from lora_rocm.dataset.companions.controls import CONTROL
from lora_rocm.dataset.rows.hf_datasets import DatasetRow
from lora_rocm.dataset.sources.scan import Scan, scan
from lora_rocm.encoded_cache.cache import LatentCache
from lora_rocm.encoded_cache.encode_session import Encoding
from lora_rocm.encoded_cache.prepare import prepare
from lora_rocm.errors import DataError, RecipeError
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.load import load_recipe
from tests.fake_encoders import FakeFamily
from tests.families.contract import Its
from tests.families.toy_families import TOYS
from tests.train.runs import start

MODEL = {"family": "flux", "name_or_path": "x", "variant": "kontext"}
Cell = Callable[[Path], Any]


def content(path: Path) -> bytes:
    return path.read_bytes()


def both(path: Path) -> dict[str, Any]:
    return {"bytes": path.read_bytes(), "path": None}


def named(path: Path) -> str:
    return str(path.relative_to(path.parents[1]))


@pytest.fixture
def root(tmp_path: Path, make: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three images with control images of other sizes, in folders."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    for number in range(3):
        make.image(tmp_path / "data" / f"{number}.png", seed=number, caption=f"{number}")
        make.image(tmp_path / "controls" / f"{number}.png", 128, 64, seed=9 + number)
    return tmp_path


def table(root: Path, image: Cell = content, control: Cell = content, **cells: list[Any]) -> Path:
    files = [[root / folder / f"{number}.png" for number in range(3)] for folder in ("data", "controls")]
    columns = {"image": list(map(image, files[0])), "before": list(map(control, files[1])), "text": ["0", "1", "2"]}
    parquet.write_table(pyarrow.table({**columns, **cells}), root / "x.parquet")
    return root / "x.parquet"


def scanned(make: SimpleNamespace, dataset: Path, **keys: Any) -> Scan:
    return scan(make.data(path=None, sources=[{"dataset": str(dataset), "control_column": "before", **keys}]))


@pytest.mark.parametrize("image", [content, named])
@pytest.mark.parametrize("control", [content, both, named])
def test_a_column_gives_the_same_entries_as_a_folder(
    root: Path, make: SimpleNamespace, image: Cell, control: Cell
) -> None:
    """Also if the image is a file and its control image a cell, or the other way round; no entry is made twice."""
    family = FakeFamily()
    encoding = Encoding(LatentCache(root / "cache"), torch.device("cpu"))
    data = make.data(path=str(root / "data"), control_path=str(root / "controls"))
    wanted = prepare(make.recipe(data, model=MODEL), family, encoding)  # type: ignore[arg-type]
    loads = family.image_encoder.loads
    data = make.data(path=None, sources=[{"dataset": str(table(root, image, control)), "control_column": "before"}])
    found = prepare(make.recipe(data, model=MODEL), family, encoding)  # type: ignore[arg-type]
    assert [item.keys for item in found.items] == [item.keys for item in wanted.items]
    assert CONTROL in found.items[0].keys and family.image_encoder.loads == loads
    assert not [notice for notice in found.notices if "before" in notice], "it is read"


def test_an_imagefolder_names_control_images_in_its_metadata(root: Path, make: SimpleNamespace) -> None:
    rows = [{"file_name": f"data/{n}.png", "before": f"controls/{n}.png", "text": f"{n}"} for n in range(3)]
    (root / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    found = scanned(make, root)
    places = [sample.companions[0].place for sample in found.samples]
    assert places == [root / "controls" / f"{number}.png" for number in range(3)] and not found.set_aside


@pytest.mark.parametrize(
    ("cells", "missing"),
    [([None, "controls/1.png", ""], 2), ([None, b"", b"x"], 2), ([{"bytes": None, "path": None}] * 3, 3)],
)
def test_empty_cells_are_refused_by_their_rows(
    root: Path, make: SimpleNamespace, cells: list[Any], missing: int
) -> None:
    with pytest.raises(DataError) as caught:
        scanned(make, table(root, before=cells))
    assert caught.value.code == "control-missing" and caught.value.fix
    assert caught.value.where == "data.sources[0].control_column: before"
    assert caught.value.what.startswith(f"{missing} image") and "train/0" in caught.value.what


@pytest.mark.parametrize("cell", ["controls/none.png", "controls", "data/0.txt", b"no image", "//host/share/a.png"])
def test_a_row_whose_control_image_cannot_be_read_is_set_aside(root: Path, make: SimpleNamespace, cell: Any) -> None:
    whole = (root / "controls" / "0.png").read_bytes() if isinstance(cell, bytes) else "controls/0.png"
    found = scanned(make, table(root, before=[whole, cell, whole]))
    assert [sample.key for sample in found.samples] == ["train/0", "train/2"]
    (problem,) = found.set_aside
    assert "row 1" in problem.where and problem.where.endswith("column before") and problem.fix


@pytest.mark.parametrize(
    ("keys", "code", "where"),
    [
        ({"control_column": "none"}, "dataset-column", "control_column: none"),
        ({"control_column": ["before", "none"]}, "dataset-column", "control_column: none"),
        ({"control_column": "image"}, "control-column-same", "data.sources[0].control_column: image"),
        ({"control_column": "number"}, "image-column", "row 0"),
    ],
)
def test_a_column_that_holds_no_control_images_is_refused(
    root: Path, make: SimpleNamespace, keys: dict[str, Any], code: str, where: str
) -> None:
    with pytest.raises(DataError) as caught:
        scanned(make, table(root, number=[1, 2, 3]), **keys)
    assert caught.value.code == code and caught.value.where.endswith(where) and caught.value.fix


def test_control_images_outside_of_the_folder_are_named(
    root: Path, make: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = make.image(tmp_path_factory.mktemp("other") / "a.png")
    inside = "controls/0.png"
    found = scanned(make, table(root, before=[inside, str(other), inside]))
    assert len(found.samples) == 3 and len(found.notices) == 1 and f"train/1 -> {other}" in found.notices[0]


def test_a_manifest_knows_the_files_of_control_images(root: Path, make: SimpleNamespace) -> None:
    found = scanned(make, table(root, control=named))
    assert list(found.samples.files_of_datasets()) == [str(root / "controls" / f"{n}.png") for n in range(3)]
    assert found.samples[1].location == DatasetRow(str(root / "x.parquet"), "train", "image", 1) and found.lasting
    assert not found.notices, "all lie in the folder"


@pytest.mark.parametrize(
    ("family", "data", "places"),
    [
        ("flux, variant: kontext", "{sources: [{dataset: a, control_column: c}]}", []),
        ("flux, variant: kontext", "{control_column: c, sources: [{dataset: a}]}", []),
        ("flux, variant: kontext", "{sources: [{dataset: a, control_column: c}, {path: b, control_path: d}]}", []),
        ("flux, variant: kontext", "{path: a, control_column: c}", ["data.control_column"]),
        ("flux, variant: kontext", "{sources: [{path: a, control_column: c}]}", ["data.sources[0].control_column"]),
        ("flux, variant: kontext", "{control_column: c, sources: [{path: a}]}", ["data.control_column"]),
        (
            "flux, variant: kontext",
            "{sources: [{dataset: a, control_column: c, control_path: d}]}",
            ["data.sources[0].control_path", "data.sources[0].control_column"],
        ),
        ("flux, variant: kontext", "{sources: [{dataset: a, control_column: c}, {dataset: b}]}", ["data.sources"]),
        ("flux, variant: kontext", "{sources: [{dataset: a, control_column: [c, c]}]}", ["control_column"]),
        (
            "flux, variant: kontext",
            "{sources: [{dataset: a, control_column: [c, d]}]}",
            ["data.sources[0].control_column"],
        ),
        ("flux, variant: dev", "{sources: [{dataset: a, control_column: c}]}", ["data.sources[0].control_column"]),
        ("z-image", "{control_column: c, sources: [{dataset: a}]}", ["data.control_column"]),
        ("causal-lm", "{control_column: c, sources: [{dataset: a}]}", ["data.control_column"]),
    ],
)
def test_what_a_recipe_may_say(tmp_path: Path, family: str, data: str, places: list[str]) -> None:
    text = f"model: {{family: {family}, name_or_path: x}}\ntrain: {{epochs: 1}}\ndata: {data}\n"
    (tmp_path / "r.yaml").write_text(text, encoding="utf-8")
    if not places:
        assert load_recipe(tmp_path / "r.yaml").recipe.data.num_controls == 1
        return
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "r.yaml")
    found = [problem.where for problem in caught.value.problems if problem.fix]
    assert len(found) == len(places) and all(any(where.endswith(place) for where in found) for place in places), found


def test_a_table_trains_as_folders_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two control images of each image, which keep their sizes: from two columns, to the end of a run."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    its = Its.write("toy-edit", tmp_path)
    rows = sorted((tmp_path / "data").glob("*.png"))
    cells = {
        "image": list(map(content, rows)),
        "text": [path.with_suffix(".txt").read_text(encoding="utf-8") for path in rows],
        "one": [content(tmp_path / "controls" / path.name) for path in rows],
        "two": [f"controls 2/{path.name}" for path in rows],
    }
    parquet.write_table(pyarrow.table(cells), tmp_path / "x.parquet")
    made = its.recipe.model_dump(mode="json", exclude_unset=True)
    made["data"].pop("path")
    made["data"].pop("control_path")
    made["data"]["sources"] = [{"dataset": str(tmp_path / "x.parquet"), "control_column": ["one", "two"]}]
    recipe = recipe_from(made, TOYS)
    found = prepare(recipe, its.family, Encoding(its.cache, torch.device("cpu")))
    assert [item.keys for item in found.items] == [item.keys for item in its.prepared.items]
    assert [item.shape for item in found.items] == [item.shape for item in its.prepared.items]
    assert start(recipe, tmp_path / "run", device=torch.device("cpu"))
