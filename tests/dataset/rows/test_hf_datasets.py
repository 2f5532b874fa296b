import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from lora_rocm.dataset.images.image_io import read_header
from lora_rocm.dataset.rows import hf_datasets as rows
from lora_rocm.dataset.rows import parquet_guard
from lora_rocm.dataset.rows.hf_datasets import UnreadableCell, as_file, givens_of, image_in, notices, rows_of
from lora_rocm.dataset.sources.given import Given
from lora_rocm.dataset.sources.scan import scan
from lora_rocm.errors import DataError
from lora_rocm.recipe.schema import DataSection, ResolvedSource
from lora_rocm.recipe.source_sections import DataSource
from tests.wording import worded

# datasets reads the CSV of an imagefolder by pandas, and leaves closing the file to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:.*metadata.csv:pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def quiet_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def content(tmp_path: Path, make: SimpleNamespace) -> bytes:
    return make.image(tmp_path / "files" / "a.png").read_bytes()


def source(dataset: Path | str, **keys: Any) -> ResolvedSource:
    return DataSection(sources=(DataSource(dataset=str(dataset), **keys),)).resolved_sources()[0]


def write(path: Path, **columns: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path)
    return path


def test_a_parquet_file_of_bytes_paths_and_gaps(tmp_path: Path, content: bytes) -> None:
    images = [{"bytes": content, "path": None}, {"bytes": None, "path": "a.png"}, None, {"bytes": None, "path": None}]
    file = write(tmp_path / "files" / "x.parquet", image=images, text=["one", None, "three", "four"])
    found = [(image_in(row), caption) for row, caption in rows_of(source(file))]
    assert bytes(found[0][0]) == content
    assert found[1:] == [(tmp_path / "files" / "a.png", None), (None, "three"), (None, "four")]


def test_a_folder_of_parquet_files_with_splits(tmp_path: Path, content: bytes) -> None:
    write(tmp_path / "ds" / "train-00000-of-00001.parquet", photo=[content, content], text=["a", "b"])
    write(tmp_path / "ds" / "test-00000-of-00001.parquet", photo=[content], text=["c"])
    rows = list(rows_of(source(tmp_path / "ds", image_column="photo", split="test")))
    assert [caption for _, caption in rows] == ["c"] and bytes(image_in(rows[0][0])) == content


def test_a_saved_dataset(tmp_path: Path, content: bytes) -> None:
    table = datasets.Dataset.from_dict({"image": [str(tmp_path / "files" / "a.png")] * 3, "text": ["a", "b", "c"]})
    table = table.cast_column("image", datasets.Image()).select([2, 0])
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": table, "more": table}).save_to_disk(str(tmp_path / "dict"))
    for path in ("saved", "dict"):
        rows = list(rows_of(source(tmp_path / path)))
        assert [caption for _, caption in rows] == ["c", "a"] and bytes(image_in(rows[1][0])) == content
    with pytest.raises(DataError) as caught:
        list(rows_of(source(tmp_path / "dict", split="val")))
    assert caught.value.fix == "Splits: more, train."


def test_a_jsonl_file_of_paths(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "files" / "x.jsonl").write_text('{"image": "a.png", "text": "hi"}\n', encoding="utf-8")
    ((row, caption),) = rows_of(source(tmp_path / "files" / "x.jsonl"))
    assert caption == "hi" and image_in(row) == tmp_path / "files" / "a.png"


def test_no_caption_column(tmp_path: Path, content: bytes) -> None:
    file = write(tmp_path / "x.parquet", image=[content])
    assert [caption for _, caption in rows_of(source(file, caption_column=None))] == [None]


@pytest.mark.parametrize(
    ("keys", "code", "said"),
    [
        ({"image_column": "foto"}, "dataset-column", "image, number, text"),
        ({"caption_column": "label"}, "dataset-column", "image, number, text"),
        ({"caption_column": "number"}, "caption-not-text", "int"),
        ({"image_column": "number"}, "image-column", "int64"),
        ({"split": "val"}, "dataset-unreadable", "val"),
    ],
)
def test_what_does_not_fit_is_said(tmp_path: Path, content: bytes, keys: dict[str, Any], code: str, said: str) -> None:
    file = write(tmp_path / "x.parquet", image=[content], number=[1], text=["a"])
    with pytest.raises(DataError) as caught:
        for row, _ in rows_of(source(file, **keys)):
            image_in(row)
    assert caught.value.code == code and said in str(caught.value) and str(file) in caught.value.where


def test_what_is_no_dataset(tmp_path: Path) -> None:
    (tmp_path / "a.csv").touch()
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really")
    write(tmp_path / "empty.parquet", image=[], text=[])
    for name, code in (
        ("a.csv", "dataset-kind"),
        ("bad.parquet", "dataset-unreadable"),
        ("empty.parquet", "dataset-empty"),
        ("nowhere", "dataset-missing"),
        ("nowhere.parquet", "dataset-missing"),
    ):
        with pytest.raises(DataError) as caught:
            list(rows_of(source(tmp_path / name)))
        assert caught.value.code == code and caught.value.fix


@pytest.mark.parametrize("as_folder", [False, True])
@pytest.mark.parametrize(("copies", "refused"), [(1500, True), (500, False)])
def test_one_value_in_very_many_rows_is_refused_before_it_is_written_out(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch, copies: int, refused: bool, as_folder: bool
) -> None:
    monkeypatch.setattr(rows, "MAX_UNPACKED_BYTES", 20 << 20)
    image = {"bytes": content + bytes(20_000), "path": None}
    file = write(tmp_path / "ds" / "train.parquet", image=[image] * copies, text=["a photo"] * copies)
    assert rows.MAX_UNPACKING * file.stat().st_size < rows.MAX_UNPACKED_BYTES  # which is then the limit
    loads: list[object] = []
    load = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **how: loads.append(args) or load(*args, **how))
    if not refused:
        assert len(list(rows_of(source(file.parent if as_folder else file)))) == copies and loads
        return
    with pytest.raises(DataError) as caught:
        list(rows_of(source(file.parent if as_folder else file)))
    assert caught.value.code == "dataset-swells" and str(file) in caught.value.where and not loads


def test_captions_that_many_rows_share_are_read_after_they_were_counted(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MAX_UNPACKED_BYTES", 1 << 20)
    monkeypatch.setattr(rows, "MAX_UNPACKING", 2)
    texts = ["a photo of a cat", "a drawing"] * 500
    images = [content + str(number).encode() for number in range(len(texts))]
    file = write(tmp_path / "x.parquet", image=images, text=texts)
    counted: list[int] = []
    count = parquet_guard._values_bytes
    monkeypatch.setattr(parquet_guard, "_values_bytes", lambda array: counted.append(count(array)) or counted[-1])
    assert [caption for _, caption in rows_of(source(file))] == texts and counted


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "WEBP", "GIF", "AVIF"])
def test_bytes_read_as_a_file(kind: str) -> None:
    buffer = io.BytesIO()
    Image.effect_noise((300, 200), 50).convert("RGB").save(buffer, kind)
    content = memoryview(pyarrow.py_buffer(buffer.getvalue())).cast("B")
    assert read_header(as_file(content)).size == (300, 200)
    file = as_file(content)
    assert file.read() == content and file.seek(-4, 2) == len(content) - 4 and file.read() == content[-4:]


def imagefolder(root: Path, make: SimpleNamespace, kind: str = "jsonl") -> Path:
    """Images in two folders, one of them without a row, and the captions next to them."""
    table = {"file_name": ["0.png", "sub/1 ü.png", "gone.png"], "text": ["zero", "one", "two"], "n": [1, 2, 3]}
    for number, name in enumerate(("0.png", "sub/1 ü.png", "no row.png")):
        make.image(root / name, seed=number)
    records = [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]
    if kind == "jsonl":
        (root / "metadata.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    elif kind == "csv":
        lines = [",".join(table), *(",".join(map(str, record.values())) for record in records)]
        (root / "metadata.csv").write_text("\n".join(lines), encoding="utf-8")
    else:
        write(root / "metadata.parquet", **table)
    return root


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_an_imagefolder(tmp_path: Path, make: SimpleNamespace, kind: str) -> None:
    folder = imagefolder(tmp_path / "Bilder [1]", make, kind)
    found = [(image_in(row), caption) for row, caption in rows_of(source(folder))]
    names = ("0.png", "sub/1 ü.png", "gone.png")
    assert found == [(folder / name, text) for name, text in zip(names, ("zero", "one", "two"), strict=True)]
    scanned = scan(DataSection(sources=(DataSource(dataset=str(folder)),), resolution=64, bucket_step=16))
    assert [sample.caption for sample in scanned.samples] == ["zero", "one"]
    assert [problem.where for problem in scanned.set_aside] == [f"{folder} [train] row 2"]
    assert sum("no row.png" in notice for notice in scanned.notices) == 1, scanned.notices


def test_masks_and_control_images_need_no_row_of_their_own(tmp_path: Path, make: SimpleNamespace) -> None:
    """The other file is the control."""
    rows = [{"file_name": "0.png", "text": "zero", "before": "edges.png"}]
    for number, name in enumerate(("0.png", "edges.png", "0-masklabel.png", "other.png")):
        make.image(tmp_path / "ds" / name, seed=number)
    (tmp_path / "ds" / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = DataSource(dataset=str(tmp_path / "ds"), control_column="before")
    (resolved,) = DataSection(sources=(options,), resolution=64, bucket_step=16).resolved_sources()
    (notice,) = notices(resolved)
    assert "other.png" in notice and "edges.png" not in notice and "masklabel" not in notice


def test_an_imagefolder_with_splits(tmp_path: Path, make: SimpleNamespace) -> None:
    for split in ("train", "test"):
        imagefolder(tmp_path / "ds" / split, make)
    table = list(rows_of(source(tmp_path / "ds", split="test")))
    assert image_in(table[0][0]) == tmp_path / "ds" / "test" / "0.png" and len(table) == 3


@pytest.mark.parametrize("name", ["../secret.png", "/etc/passwd", "file:///etc/passwd", "zip://x::y"])
def test_no_row_of_an_imagefolder_leads_out_of_it(tmp_path: Path, make: SimpleNamespace, name: str) -> None:
    make.image(tmp_path / "secret.png")
    folder = imagefolder(tmp_path / "ds", make)
    (folder / "metadata.jsonl").write_text(json.dumps({"file_name": name, "text": "x"}), encoding="utf-8")
    with pytest.raises(DataError) as caught:
        list(rows_of(source(folder)))
    assert caught.value.code == "dataset-unreadable"


def test_a_list_called_metadata_is_still_a_list(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "files" / "metadata.jsonl"
    file.write_text('{"image": "a.png", "text": "hi"}\n', encoding="utf-8")
    ((row, caption),) = rows_of(source(file.parent))
    assert caption == "hi" and image_in(row) == file.parent / "a.png"


def test_the_library_draws_no_bars(tmp_path: Path, content: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    datasets.enable_progress_bars()
    file = write(tmp_path / "x.parquet", image=[content] * 3, text=["a"] * 3)
    assert len(list(rows_of(source(file)))) == 3
    assert capfd.readouterr().err == ""


def test_a_place_that_may_not_be_read_is_outside(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link in an image's path, as /proc/1/cwd for anybody but root."""
    link = tmp_path / "files" / "link"
    link.symlink_to(tmp_path)
    readlink = os.readlink

    def refused(path: Any, *more: Any, **how: Any) -> Any:
        if os.fspath(path) == str(link):
            raise PermissionError(13, "Permission denied", str(path))
        return readlink(path, *more, **how)

    monkeypatch.setattr(os, "readlink", refused)
    file = write(tmp_path / "files" / "x.parquet", image=[{"bytes": None, "path": "link/a.png"}], text=["a"])
    ((row, _),) = rows_of(source(file))
    with pytest.raises(UnreadableCell, match="outside"):
        image_in(row)


def test_columns_that_nothing_reads_are_named(tmp_path: Path, content: bytes) -> None:
    file = write(tmp_path / "x.parquet", image=[content], text=["a"], w=[2.0], artist=["b"], __key__=["c"])
    (said,) = rows.notices(source(file, loss_weight_column="w"))
    assert str(file) in said and said.endswith(": artist.")
    notices = scan(DataSection(sources=(DataSource(dataset=str(file)),))).notices
    assert [notice for notice in notices if notice.endswith(": w, artist.")]
    assert not rows.notices(source(write(tmp_path / "y.parquet", image=[content], text=["a"]))), "the control"


def test_columns_of_captions_weights_and_crops(tmp_path: Path, content: bytes) -> None:
    captions, weights = [["a", None, "b"], [], None, ["c"]], [0.5, None, 2.0, -1.0]
    crops = [[0, 0, 4, 4], None, [1, 2, 3], None]
    file = write(tmp_path / "x.parquet", image=[content] * 4, text=captions, w=weights, c=crops)
    assert [caption for _, caption in rows_of(source(file))] == [("a", "b"), (), None, ("c",)]
    named = source(file, loss_weight_column="w", crop_column="c")
    found = list(givens_of(named))
    assert found[:2] == [Given(0.5, (0, 0, 4, 4)), Given()]
    assert [str(each)[:18] for each in found[2:]] == [
        worded("dataset/its-crop-is-no-x"),
        worded("dataset/its-weight-is-no-n"),
    ]
    assert list(givens_of(source(file))) == [Given()] * 4
    with pytest.raises(DataError, match="no column 'weights'"):
        list(givens_of(source(file, loss_weight_column="weights")))
