"""``datasets`` sources that name files they have no business with, lie about their shape, or bring programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from lora_rocm.dataset.rows import hf_datasets
from lora_rocm.dataset.sources.folders import MAX_CAPTION_BYTES
from lora_rocm.dataset.sources.scan import Scan, scan
from lora_rocm.errors import DataError
from lora_rocm.recipe.schema import DataSection
from lora_rocm.recipe.source_sections import DataSource
from tests.hostile import attacks

KEYS: dict[str, Any] = {"resolution": 8, "bucket_step": 8}


@pytest.fixture(autouse=True)
def quiet_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """An image that is nobody's business."""
    path = tmp_path / "private" / "a.png"
    path.parent.mkdir()
    path.write_bytes(attacks.image())
    return path


def scanned(dataset: Path, **keys: Any) -> Scan:
    return scan(DataSection(sources=(DataSource(dataset=str(dataset), **keys),), **KEYS))


def write(path: Path, **columns: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path)
    return path


def test_a_stored_path_that_leads_out_is_not_followed(tmp_path: Path, private: Path) -> None:
    paths = [
        str(private),
        "../private/a.png",
        "in.png",
        "//host/share/a.png",
        "\\\\host\\share\\a.png",
        "a\0b",
        "/dev/zero",
    ]
    images = [{"bytes": attacks.image(), "path": "/etc/passwd"}, *({"bytes": None, "path": path} for path in paths)]
    file = write(tmp_path / "ds" / "x.parquet", image=images, text=["x"] * len(images))
    (tmp_path / "ds" / "in.png").write_bytes(attacks.image())
    found = scanned(file)
    assert [sample.key for sample in found.samples] == ["train/0", "train/3"]  # bytes, and the file inside
    assert found.samples[1].location == tmp_path / "ds" / "in.png"
    assert all("names a" in problem.what for problem in found.set_aside) and len(found.set_aside) == 6


def test_a_link_inside_that_leads_out_is_not_followed(tmp_path: Path, private: Path) -> None:
    images = [{"bytes": None, "path": "link.png"}, {"bytes": attacks.image(), "path": None}]
    file = write(tmp_path / "ds" / "x.parquet", image=images, text=["x", "y"])
    (tmp_path / "ds" / "link.png").symlink_to(private)
    assert [sample.key for sample in scanned(file).samples] == ["train/1"]


def test_a_list_of_files_is_the_user_s_own_and_what_lies_outside_is_said(tmp_path: Path, private: Path) -> None:
    folder = tmp_path / "ds"
    folder.mkdir()
    lines = [
        json.dumps({"image": name, "text": "x"}) for name in (str(private), "b.png", "//host/a.png", "/etc/passwd")
    ]
    (folder / "x.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "b.png").write_bytes(attacks.image())
    found = scanned(folder / "x.jsonl")
    assert [sample.key for sample in found.samples] == ["train/0", "train/1"]
    assert [notice for notice in found.notices if "outside" in notice] == [
        f"1 image lies outside the dataset's folder: train/0 -> {private}."
    ]
    assert {problem.where.rpartition(" ")[2] for problem in found.set_aside} == {"2", "3"}


def test_a_dataset_of_the_hub_names_no_files_of_this_machine(
    tmp_path: Path, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "hf" / "b.png"
    cached.parent.mkdir()
    cached.write_bytes(attacks.image())
    table = datasets.Dataset.from_dict({"image": [str(private), str(cached)], "text": ["a", "b"]})
    monkeypatch.setattr(hf_datasets, "_refuse_silent_hub", lambda *_: None)
    monkeypatch.setattr(hf_datasets, "_from_hub", lambda *_: table)
    found = scanned(Path("some/hub"))
    assert [sample.key for sample in found.samples] == ["train/1"]  # the library keeps what it downloads there
    assert "outside the dataset" in found.set_aside[0].what


@pytest.mark.parametrize("as_folder", [False, True])
@pytest.mark.parametrize(("codec", "refused"), [("zstd", True), ("none", False)])
def test_parquet_that_swells_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str, refused: bool, as_folder: bool
) -> None:
    monkeypatch.setattr(hf_datasets, "MAX_UNPACKED_BYTES", 1 << 20)
    file = tmp_path / "ds" / "train.parquet"
    file.parent.mkdir()
    columns = {"image": [attacks.image() + bytes(1 << 20), attacks.image() + bytes(1 << 20)], "text": ["x", "y"]}
    parquet.write_table(pyarrow.table(columns), file, compression=codec, use_dictionary=False)
    loads: list[object] = []
    load = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **how: loads.append(args) or load(*args, **how))
    if not refused:
        assert len(scanned(file.parent if as_folder else file).samples) == 2 and loads
        return
    with pytest.raises(DataError) as caught:
        scanned(file.parent if as_folder else file)
    assert caught.value.code == "dataset-swells" and str(file) in caught.value.where and not loads


def test_captions_that_are_none(tmp_path: Path) -> None:
    texts = [f"a{attacks.STEERING}\nb", "x" * (MAX_CAPTION_BYTES + 1), "y" * MAX_CAPTION_BYTES, None]
    found = scanned(write(tmp_path / "x.parquet", image=[attacks.image(side=n + 8) for n in range(4)], text=texts))
    assert [sample.key for sample in found.samples] == ["train/0", "train/2", "train/3"]
    assert found.samples[0].caption.isprintable() and found.samples[0].caption.endswith(" b")
    assert "larger than 64 KiB" in found.set_aside[0].what


def test_categories_are_captions(tmp_path: Path) -> None:
    table = pyarrow.table({"image": [attacks.image()] * 2, "text": pyarrow.array(["a", "b"]).dictionary_encode()})
    parquet.write_table(table, tmp_path / "x.parquet")
    assert [sample.caption for sample in scanned(tmp_path / "x.parquet").samples] == ["a", "b"]


def saved(folder: Path) -> Path:
    datasets.Dataset.from_dict({"image": [attacks.image()] * 50, "text": ["some words"] * 50}).save_to_disk(str(folder))
    return folder


def test_arrow_whose_offsets_lie(tmp_path: Path) -> None:
    """Without being asked, Arrow would read wherever they point to."""
    folder = saved(tmp_path / "ds")
    assert len(scanned(folder).samples) == 50
    file = next(folder.glob("*.arrow"))
    content, words = file.read_bytes(), (10).to_bytes(4, "little") + (20).to_bytes(4, "little")
    assert content.count(words) >= 1  # offsets of the captions
    for lie in (2**31 - 1, -1 % 2**32, 10_000_000):
        file.write_bytes(content.replace(words, words[:4] + lie.to_bytes(4, "little")))
        hf_datasets.opened.cache_clear()
        hf_datasets._images.cache_clear()
        with pytest.raises(DataError) as caught:
            scanned(folder)
        assert caught.value.code == "dataset-damaged"


def test_a_saved_dataset_that_names_other_files(tmp_path: Path) -> None:
    folder = saved(tmp_path / "ds")
    state = json.loads((folder / "state.json").read_bytes())
    for name in ("../../etc/passwd", "/etc/passwd", "nothing.arrow", 3, None):
        (folder / "state.json").write_text(json.dumps({**state, "_data_files": [{"filename": name}]}), encoding="utf-8")
        hf_datasets.opened.cache_clear()
        with pytest.raises(DataError):
            scanned(folder)


@pytest.mark.parametrize("readme", ["http://127.0.0.1:9/x.parquet", "../private/*.parquet", "/etc/*"])
def test_a_readme_in_a_folder_names_nothing(tmp_path: Path, readme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "private" / "x.parquet", image=[attacks.image()], text=["private"])
    folder = tmp_path / "ds [x]"
    write(folder / "train-00000-of-00001.parquet", image=[attacks.image()], text=["own"])
    config = f"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: {readme}\n---\n"
    (folder / "README.md").write_text(config, encoding="utf-8")
    (folder / "ds.py").write_text(attacks.payload(tmp_path), encoding="utf-8")
    assert [sample.caption for sample in scanned(folder).samples] == ["own"]
    assert [sample.caption for sample in scanned(folder / "train-00000-of-00001.parquet").samples] == ["own"]
    assert not (tmp_path / attacks.MARK).exists()


def test_kinds_of_datasets_that_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "ds"
    folder.mkdir()
    (folder / "train.pkl").write_bytes(attacks.pickled(tmp_path))
    (folder / "train.csv").write_text("image,text\na,b\n", encoding="utf-8")
    with pytest.raises(DataError, match="no dataset in this folder"):
        scanned(folder)
    monkeypatch.setattr(hf_datasets, "_refuse_silent_hub", lambda *_: None)
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda name: type("Builder", (), {"name": "pandas\x1b"}))
    with pytest.raises(DataError, match="is not read"):
        scanned(Path("some/hub"))
    assert not (tmp_path / attacks.MARK).exists()
