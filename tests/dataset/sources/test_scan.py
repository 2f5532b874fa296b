import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from lora_rocm.dataset.images.same_sizes import alike_squares
from lora_rocm.dataset.sources import scan as samples
from lora_rocm.dataset.sources.given import Given
from lora_rocm.dataset.sources.sample_image import image_bytes, load_image
from lora_rocm.dataset.sources.scan import Scan, geometries, scan
from lora_rocm.errors import DataError
from lora_rocm.recipe.schema import DataSection
from tests.wording import saying, says, worded

PHOTOGRAPHS = Path(__file__).parents[2] / "photographs"


def captions(found: Scan) -> dict[str, str]:
    return {sample.key: sample.caption for sample in found.samples}


def test_a_folder(tmp_path: Path, make: SimpleNamespace) -> None:
    make.image(tmp_path / "b.png", 40, 30, caption="a house")
    make.image(tmp_path / "sub" / "a ü.png", 30, 40, seed=1, caption="a tree")
    found = scan(make.data(path=str(tmp_path), resolution=32))
    assert [(s.key, s.caption, s.width, s.height, s.repeats) for s in found.samples] == [
        ("b.png", "a house", 40, 30, 1),
        ("sub/a ü.png", "a tree", 30, 40, 1),
    ]
    assert found.set_aside == () and found.notices == ()
    assert {sample.folder for sample in found.samples} == {tmp_path.name}
    assert scan(make.data(path=str(tmp_path), resolution=32)) == found


def test_several_sources_keep_their_options(tmp_path: Path, make: SimpleNamespace) -> None:
    make.image(tmp_path / "one" / "a.png", caption="x")
    make.image(tmp_path / "two" / "a.png", seed=1, caption="y")
    sources = [{"path": str(tmp_path / "one"), "repeats": 3, "resolution": 128}, {"path": str(tmp_path / "two")}]
    found = scan(make.data(sources=sources))
    assert [(s.key, s.source, s.repeats, s.options.resolution) for s in found.samples] == [
        ("sources[0]/a.png", 0, 3, 128),
        ("sources[1]/a.png", 1, 1, 64),
    ]


def test_kohya_folders_multiply_repeats(tmp_path: Path, make: SimpleNamespace) -> None:
    make.image(tmp_path / "10_zibu cat" / "IMG_0001.png")
    make.image(tmp_path / "10_zibu cat" / "on_a_chair.png", seed=1)
    make.image(tmp_path / "10_zibu cat" / "c.png", seed=2, caption="a zibu")
    found = scan(make.data(path=str(tmp_path), repeats=2))
    assert {sample.repeats for sample in found.samples} == {20}
    assert {sample.folder for sample in found.samples} == {"10_zibu cat"}
    assert [sample.caption for sample in found.samples] == ["zibu cat", "a zibu", "on a chair"]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"caption_fallback": "filename"}, "red cat"),
        ({"caption_fallback": "trigger", "trigger_word": "zibu"}, "zibu"),
        ({"caption_fallback": "empty"}, ""),
    ],
)
def test_caption_fallbacks(tmp_path: Path, make: SimpleNamespace, keys: dict[str, Any], expected: str) -> None:
    make.image(tmp_path / "red_cat.png")
    found = scan(make.data(path=str(tmp_path), **keys))
    assert captions(found) == {"red_cat.png": expected}
    assert found.notices == (worded("dataset/1-image-has-no-caption-used-instead-2", expected=expected),)


def test_an_image_may_have_the_caption_of_its_folder(tmp_path: Path, make: SimpleNamespace) -> None:
    make.image(tmp_path / "10_zwx_woman" / "on_a_chair.png")
    make.image(tmp_path / "10_zwx_woman" / "close" / "b.png", seed=1)
    make.image(tmp_path / "red cats" / "c.png", seed=2)
    make.image(tmp_path / "red cats" / "d.png", seed=3, caption="d")
    found = captions(scan(make.data(path=str(tmp_path), caption_fallback="folder")))
    assert list(found.values()) == ["zwx_woman", "zwx_woman", "red cats", "d"]
    hints = [
        "caption_fallback: folder" in " ".join(scan(make.data(path=str(tmp_path / name))).notices)
        for name in ("", "red cats")
    ]
    assert hints == [True, False], "only where kohya would read the name"
    alone = captions(scan(make.data(path=str(tmp_path / "10_zwx_woman"), caption_fallback="folder", recursive=False)))
    assert list(alone.values()) == ["zwx_woman"]


@pytest.mark.parametrize(
    ("keys", "code"),
    [({"caption_fallback": "error"}, "caption-missing"), ({"caption_fallback": "trigger"}, "trigger-word-missing")],
)
def test_missing_captions_can_be_errors(tmp_path: Path, make: SimpleNamespace, keys: dict[str, Any], code: str) -> None:
    for index in range(5):
        make.image(tmp_path / f"{index}.png", seed=index, caption="x" if index == 0 else None)
    with pytest.raises(DataError) as caught:
        scan(make.data(path=str(tmp_path), **keys))
    assert caught.value.code == code and "4 images" in caught.value.what
    assert "1.png, 2.png, 3.png and 1 more" in caught.value.where
    for index in range(5):
        (tmp_path / f"{index}.txt").write_text("x", encoding="utf-8")
    scan(make.data(path=str(tmp_path), **keys))


def test_a_random_crop_is_the_same_in_each_run_and_another_for_each_source(
    tmp_path: Path, make: SimpleNamespace
) -> None:
    for index in range(4):
        make.image(tmp_path / f"{index}.png", 100, 64, seed=index, caption="x")
    plain = {"path": str(tmp_path), "resolution": 64}
    data = make.data(sources=[plain, plain | {"random_crop": True}, plain | {"random_crop": True}], enable_bucket=False)
    (found, _, _), (again, _, _) = (geometries(scan(data).samples, data) for _ in range(2))
    assert found == again and len(found) == 12
    places = {key: geometry.crop_top_left for key, geometry in found.items()}
    assert {places[f"sources[0]/{index}.png"] for index in range(4)} == {(0, 18)}
    drawn = [places[f"sources[{source}]/{index}.png"] for source in (1, 2) for index in range(4)]
    assert len(set(drawn)) > 4 and drawn[:4] != drawn[4:]
    assert all(top == 0 and 0 <= left <= 36 for top, left in drawn)


def test_a_wildcard_that_is_not_closed_is_named(tmp_path: Path, make: SimpleNamespace) -> None:
    make.image(tmp_path / "a.png", caption="a {red|blue} cat\na {red|blue dog")
    make.image(tmp_path / "b.png", seed=1, caption="a cat")
    with pytest.raises(DataError) as caught:
        scan(make.data(path=str(tmp_path), enable_wildcard=True))
    assert caught.value.code == "wildcard-open" and "a.png: {red|blue dog" in caught.value.where
    assert captions(scan(make.data(path=str(tmp_path))))["a.png"] == "a {red|blue} cat a {red|blue dog"
    (tmp_path / "a.txt").write_text("a {red|blue} cat\na dog", encoding="utf-8")
    assert captions(scan(make.data(path=str(tmp_path), enable_wildcard=True)))["a.png"] == "a {red|blue} cat\na dog"


def test_an_empty_caption_file_is_an_empty_caption(tmp_path: Path, make: SimpleNamespace) -> None:
    make.image(tmp_path / "a.png", caption=" \n")
    found = scan(make.data(path=str(tmp_path)))
    assert captions(found) == {"a.png": ""} and found.notices == (worded("dataset/1-image-has-an-empty-caption-a"),)


def test_what_cannot_be_used_is_set_aside_with_its_reason(tmp_path: Path, make: SimpleNamespace) -> None:
    make.image(tmp_path / "good.png", caption="x")
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.jpg").write_text("hello", encoding="utf-8")
    (tmp_path / "cut [1].png").write_bytes((tmp_path / "good.png").read_bytes()[:20])
    make.image(tmp_path / "latin.png", seed=1)
    (tmp_path / "latin.txt").write_bytes("für".encode("latin-1"))
    (tmp_path / "broken link.png").symlink_to(tmp_path / "nothing.png")
    found = scan(make.data(path=str(tmp_path)))
    assert list(captions(found)) == ["good.png"]
    reasons = {Path(problem.where).name: problem.what for problem in found.set_aside}
    assert set(reasons) == {"empty.png", "text.jpg", "cut [1].png", "latin.png", "broken link.png"}
    assert "empty" in reasons["empty.png"] and "format" in reasons["text.jpg"] and "UTF-8" in reasons["latin.png"]
    assert all(problem.fix and str(tmp_path) in problem.where for problem in found.set_aside)


@pytest.mark.parametrize("kind", ["folder", "dataset"])
def test_of_very_many_images_is_told_while_they_are_looked_for(
    tmp_path: Path, make: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for index in range(3):
        make.image(tmp_path / "data" / f"{index}.png", seed=index, caption="x")
    (tmp_path / "list.jsonl").write_text("".join(f'{{"image": "data/{n}.png"}}\n' for n in range(3)), encoding="utf-8")
    keys = {"path": str(tmp_path / "data")}
    if kind == "dataset":
        keys = {"sources": ({"dataset": str(tmp_path / "list.jsonl"), "caption_column": None},)}  # type: ignore[dict-item]
    said: list[tuple[Any, ...]] = []
    scan(make.data(**keys), lambda *facts: said.append(facts))
    assert said == [], "it was done in a moment"
    monkeypatch.setattr(samples, "QUIET_S", 0.0)
    scan(make.data(**keys), lambda *facts: said.append(facts))
    assert said[-1][:3] == ("sizes", 3, 3)


def test_nothing_left_is_an_error(tmp_path: Path, make: SimpleNamespace) -> None:
    (tmp_path / "empty.png").touch()
    with pytest.raises(DataError) as caught:
        scan(make.data(path=str(tmp_path)))
    assert caught.value.code == "no-usable-images" and "empty.png" in caught.value.where


def test_copies_and_small_images_are_said(tmp_path: Path, make: SimpleNamespace) -> None:
    make.image(tmp_path / "a.png", caption="x")
    shutil.copy(tmp_path / "a.png", tmp_path / "b.png")
    shutil.copy(tmp_path / "a.txt", tmp_path / "b.txt")
    make.image(tmp_path / "c.png", seed=1, caption="x")
    make.image(tmp_path / "tiny.png", 15, 15, caption="x")
    make.image(tmp_path / "one.png", 1, 1, caption="x")
    found = scan(make.data(path=str(tmp_path)))
    assert found.notices == (
        worded("dataset/2-images-have-less-than-1-4"),
        worded("dataset/images-with-exactly-the-same-content-a"),
    )


def test_the_same_file_in_two_sources_is_no_copy(tmp_path: Path, make: SimpleNamespace) -> None:
    make.image(tmp_path / "a.png", caption="x")
    found = scan(make.data(sources=[{"path": str(tmp_path)}, {"path": str(tmp_path), "resolution": 32}]))
    assert len(found.samples) == 2 and found.notices == ()


def test_a_dataset(tmp_path: Path, make: SimpleNamespace) -> None:
    first = make.image(tmp_path / "a.png", 40, 30).read_bytes()
    images = [{"bytes": first, "path": None}, {"bytes": None, "path": "a.png"}, None, {"bytes": b"x", "path": None}]
    file = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table({"image": images, "text": ["one", None, "three", "four"]}), file)
    found = scan(make.data(sources=[{"dataset": str(file)}], resolution=32))
    assert captions(found) == {"train/0": "one", "train/1": "a"}
    assert [problem.where for problem in found.set_aside] == [f"{file} [train] row 2", f"{file} [train] row 3"]
    assert says(found.notices, "dataset/images-with-exactly-the-same-content-train")
    for sample in found.samples:
        assert image_bytes(sample) == first and load_image(sample).size == (sample.width, sample.height)


def test_loading_names_the_file_that_went_bad(tmp_path: Path, make: SimpleNamespace) -> None:
    path = make.image(tmp_path / "a.png", caption="x")
    (sample,) = scan(make.data(path=str(tmp_path))).samples
    assert load_image(sample).size == (96, 64)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", make.image(tmp_path / "b.png", 50, 50).read_bytes()):
        path.write_bytes(content)
        with pytest.raises(DataError) as caught:
            load_image(sample)
        assert caught.value.code == "image-unreadable" and str(path) in caught.value.where
    path.unlink()
    with pytest.raises(DataError, check=saying("dataset/cannot-be-read")):
        image_bytes(sample)


def test_images_too_small_for_a_bucket_are_named(tmp_path: Path, make: SimpleNamespace) -> None:
    make.image(tmp_path / "a.png", caption="x")
    make.image(tmp_path / "thin.png", 90, 12, caption="x")
    data = make.data(path=str(tmp_path))
    found, too_small, _ = geometries(scan(data).samples, data)
    assert list(found) == ["a.png"] and [Path(problem.where).name for problem in too_small] == ["thin.png"]
    enlarged, none, _ = geometries(scan(data).samples, make.data(path=str(tmp_path), upscale=True))
    assert len(enlarged) == 2 and none == []


def test_photographs_of_many_shapes(tmp_path: Path) -> None:
    """Real images and the other files of such a folder: a text, a file of several pages, and one that is tiny."""
    folder = tmp_path / "photographs"
    shutil.copytree(PHOTOGRAPHS, folder)
    pages = [Image.new(mode, (40, 30)) for mode in ("RGB", "I;16")]
    pages[0].save(folder / "pages.tif", save_all=True, append_images=pages[1:])
    (folder / "cut.tif").write_bytes((folder / "pages.tif").read_bytes()[:20])
    Image.new("P", (25, 14)).save(folder / "tiny.gif")
    data = DataSection(path=str(folder), resolution=256, bucket_step=32, caption_fallback="filename")
    found = scan(data)
    assert [Path(problem.where).name for problem in found.set_aside] == ["cut.tif"]
    fitted, too_small, _ = geometries(found.samples, data)
    assert {Path(problem.where).name for problem in too_small} == {"pages.tif", "tiny.gif"}
    buckets = {key: geometry.target_hw for key, geometry in fitted.items()}
    assert buckets["astronaut.jpg"] == (256, 256) and buckets["chelsea.jpg"] == (192, 320)
    assert buckets["rocket.jpg"] == (192, 320) and buckets["portrait_gray.jpg"] == (288, 224)
    assert buckets["hubble_wide.jpg"] == (160, 384) and buckets["small_palette.png"] == (96, 96)
    assert len(set(buckets.values())) >= 5
    by_key = {sample.key: sample for sample in found.samples}
    for key, geometry in fitted.items():
        assert geometry.original_hw == (by_key[key].height, by_key[key].width)
        assert load_image(by_key[key]).mode == "RGB"
    assert by_key["astronaut.jpg"].caption == "astronaut"


def test_a_scan_decodes_nothing(tmp_path: Path, make: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    for index, suffix in enumerate((".png", ".jpg", ".webp", ".tif", ".bmp")):
        make.image(tmp_path / f"{index}{suffix}", seed=index, caption="x")

    def load(image: Image.Image) -> None:
        raise AssertionError(f"{image.format} was decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    found = scan(make.data(path=str(tmp_path)))
    assert len(found.samples) == 5
    with pytest.raises(AssertionError):
        load_image(found.samples[0])


def test_a_folder_whose_own_name_has_a_number_is_told_what_that_means(tmp_path: Path, make: SimpleNamespace) -> None:
    make.image(tmp_path / "10_zwx woman" / "a.png", caption="x")
    found = scan(make.data(path=str(tmp_path / "10_zwx woman")))
    assert [sample.repeats for sample in found.samples] == [1]
    (notice,) = found.notices
    assert says(notice, "dataset/the-number-in-10-zwx-woman-is") and "repeats: 10" in notice
    (above,) = scan(make.data(path=str(tmp_path))).notices
    assert above == worded("dataset/folder-10-zwx-woman-each-image-is")
    make.image(tmp_path / "10_zwx woman" / "b.png", caption=None)
    said = " ".join(scan(make.data(path=str(tmp_path / "10_zwx woman"), caption_fallback="folder")).notices)
    assert says(said, "dataset/is-not-applied") and '"zwx woman"' in said


def test_frames_that_are_not_used_are_said(tmp_path: Path, make: SimpleNamespace) -> None:
    frames = [Image.effect_noise((64, 64), 50 + number).convert("RGB") for number in range(3)]
    for name in ("a.gif", "b.png", "c.webp", "d.tif"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:])
        frames[0].save(tmp_path / f"one {name}")
        for stem in (name[0], f"one {name[0]}"):
            (tmp_path / f"{stem}.txt").write_text("x", encoding="utf-8")
    notices = scan(make.data(path=str(tmp_path))).notices
    assert notices[0] == worded("dataset/4-images-have-several-frames-or-pages")


def grey16(path: Path, peak: int) -> None:
    values_HW = np.linspace(0, peak, 64 * 64).reshape(64, 64).astype(np.uint16)
    Image.fromarray(values_HW).save(path)
    path.with_suffix(".txt").write_text("x", encoding="utf-8")


def test_twelve_bits_in_sixteen_are_said(tmp_path: Path, make: SimpleNamespace) -> None:
    grey16(tmp_path / "dark.png", 4095)
    grey16(tmp_path / "dark.tif", 4000)
    grey16(tmp_path / "full.png", 65535)
    grey16(tmp_path / "dim.png", 5000)
    (notice,) = scan(make.data(path=str(tmp_path))).notices
    assert says(notice, "dataset/2-of-4-images-with-16-bit")
    assert "dark.png, dark.tif" in notice
    for path in tmp_path.glob("dark*"):
        path.unlink()
    assert scan(make.data(path=str(tmp_path))).notices == ()


def test_of_very_many_deep_images_a_few_are_decoded(
    tmp_path: Path, make: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(samples.MAX_DEEP_GREY_READ + 5):
        grey16(tmp_path / f"{number}.png", 100 + number)
    asked: list[bytes] = []
    look = samples.is_dark
    monkeypatch.setattr(samples, "is_dark", lambda content: asked.append(content) or look(content))
    assert says(scan(make.data(path=str(tmp_path))).notices[0], "dataset/8-of-8-images") and len(asked) == 8


def test_crops_that_cut_off_much_are_said(tmp_path: Path, make: SimpleNamespace) -> None:
    for name, width, height in (("wide", 320, 64), ("tall", 64, 330), ("usual", 96, 64)):
        make.image(tmp_path / f"{name}.png", width, height, caption="x")

    def said(**keys: Any) -> list[str]:
        data = make.data(path=str(tmp_path), **keys)
        return geometries(scan(data).samples, data)[2]

    (notice,) = said()
    assert says(notice, "dataset/2-images-lose-more-than-25-of")
    assert "wide.png (320x64: " in notice and says(notice, "dataset/raise-data-bucket-max-aspect-it-is")
    assert said(bucket_max_aspect=8) == []
    several = said(resolution=[64, 96])
    assert several[-1].startswith("2 images lose more than 25%") and several[-1].count("tall.png") == 1
    assert said(enable_bucket=False)[0].startswith("3 images") and "enable_bucket" in said(enable_bucket=False)[0]
    for name in ("wide", "tall"):
        (tmp_path / f"{name}.png").unlink()
    make.image(tmp_path / "small.png", 31, 17, caption="x")
    assert says(said()[0], "dataset/lower-data-bucket-step-it-is-16") and said(bucket_step=8) == []


def test_each_image_is_there_at_each_resolution(tmp_path: Path, make: SimpleNamespace) -> None:
    for name in ("a.png", "10_b/c.png"):
        make.image(tmp_path / name, 200, 100, seed=len(name))
    one = scan(make.data(path=str(tmp_path), resolution=64))
    found = scan(make.data(path=str(tmp_path), resolution=[64, 96]))
    assert [sample.key for sample in one.samples] == ["10_b/c.png", "a.png"]
    assert [sample.key for sample in found.samples] == [
        f"{side} px/{sample.key}" for sample in one.samples for side in (64, 96)
    ]
    assert [sample.options.resolution for sample in found.samples] == [64, 96] * 2
    assert [sample.repeats for sample in found.samples] == [10, 10, 1, 1]
    fitted, problems, _ = geometries(found.samples, make.data(path=str(tmp_path), resolution=[64, 96]))
    assert not problems and fitted["96 px/a.png"].shape.cost > 2 * fitted["64 px/a.png"].shape.cost
    assert found.notices == one.notices, "each is said once, and the same file is no copy of itself"
    larger = make.data(path=str(tmp_path), resolution=[64, 256, 300])
    (notice,) = geometries(scan(larger).samples, larger)[2]
    assert says(notice, "dataset/2-images-are-too-small-for-a")


def test_resolutions_that_are_too_close_are_named(tmp_path: Path, make: SimpleNamespace) -> None:
    """Resolutions a step apart, and an image with other buckets at each of them, are the controls."""
    sizes = [(200, 200), (190, 210), (300, 100), (70, 70)]
    for number, size in enumerate(sizes):
        make.image(tmp_path / f"{number}.png", *size, seed=number)
    near = make.data(path=str(tmp_path), resolution=[96, 100], bucket_step=32)
    close, small = geometries(scan(near).samples, near)[2][:2]
    assert says(close, "dataset/the-resolutions-96-and-100-give-3")
    assert "bucket_step (32) apart" in close and says(small, "dataset/1-image-is-too-small-for-a")
    same = "The resolutions 96 and 100 give a square image the same size (96x96)."
    assert alike_squares(near) == [same + close[close.index(" An epoch") :]]
    far = make.data(path=str(tmp_path), resolution=[64, 96, 128], bucket_step=32)
    assert not [each for each in geometries(scan(far).samples, far)[2] if "resolutions" in each]
    one = make.data(
        path=None, sources=[{"path": "a", "resolution": 96}, {"path": "b", "resolution": 100}], bucket_step=32
    )
    assert alike_squares(far) == alike_squares(one) == []


def test_a_source_has_resolutions_of_its_own(tmp_path: Path, make: SimpleNamespace) -> None:
    for name in ("a", "b"):
        make.image(tmp_path / name / "0.png", 100, 100, seed=ord(name))
    sources = [{"path": str(tmp_path / "a"), "resolution": [64, 96]}, {"path": str(tmp_path / "b")}]
    samples = scan(make.data(path=None, sources=sources, resolution=64)).samples
    assert [sample.key for sample in samples] == [
        "sources[0]/64 px/0.png",
        "sources[0]/96 px/0.png",
        "sources[1]/0.png",
    ]
    assert [(sample.source, sample.options.index) for sample in samples] == [(0, 0), (1, 0), (2, 1)]
    assert [sample.location.parent.name for sample in samples] == ["a", "a", "b"]


def rows(folder: Path, *lines: object) -> None:
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")


def test_tables_give_weights_and_crops(tmp_path: Path, make: SimpleNamespace) -> None:
    for number in range(6):
        make.image(tmp_path / f"{number}.png", 100, 80, seed=number)
    rows(
        tmp_path,
        {"file_name": "0.png", "text": "a", "w": 2.5, "c": [10, 20, 64, 48]},
        {"file_name": "1.png", "w": 0.5, "c": None},
        {"file_name": "2.png", "w": "x"},
        {"file_name": "3.png", "c": [40, 0, 64, 64]},
        {"file_name": "4.png", "c": [0, 0, 64]},
    )
    source = {"path": str(tmp_path), "loss_weight_column": "w", "crop_column": "c"}
    found = scan(make.data(path=None, sources=[source], loss_weight=3.0))
    assert {sample.key: sample.given for sample in found.samples} == {
        "0.png": Given(2.5, (10, 20, 64, 48)),
        "1.png": Given(0.5),
        "5.png": Given(),
    }
    assert [(problem.where[-5:], problem.what[:20]) for problem in found.set_aside] == [
        ("2.png", worded("dataset/its-weight-is-no-num")),
        ("3.png", worded("dataset/its-crop-40-0-64")),
        ("4.png", worded("dataset/its-crop-is-no-x-y")),
    ]
    said = " ".join(found.notices)
    assert says(said, "dataset/2-images-have-a-weight-of-the")
    assert says(said, "dataset/1-image-has-a-crop-of-the")
    plain = scan(make.data(path=str(tmp_path)))
    assert [sample.given for sample in plain.samples] == [Given()] * 6, "only what the recipe names is read"


@pytest.mark.parametrize("key", ["loss_weight_column", "crop_column"])
def test_a_column_that_gives_nothing_is_an_error(tmp_path: Path, make: SimpleNamespace, key: str) -> None:
    make.image(tmp_path / "0.png")
    rows(tmp_path, {"file_name": "0.png", "text": "a"})
    with pytest.raises(DataError) as caught:
        scan(make.data(path=None, sources=[{"path": str(tmp_path), key: "wheight"}]))
    assert caught.value.code == "column-unused" and f"sources[0].{key}: wheight" in str(caught.value.where)


def test_an_image_may_have_several_captions(tmp_path: Path, make: SimpleNamespace) -> None:
    captions = {"0": ["a  cat", "", "a {red} cat"], "1": {"captions": ["x", "y"]}, "2": {"caption": "one"}, "3": "text"}
    for name, value in {**captions, "4": {"other": 1}, "5": [1]}.items():
        make.image(tmp_path / f"{name}.png", seed=int(name))
        (tmp_path / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    make.image(tmp_path / "6.png", seed=6)
    (tmp_path / "6.json").write_text("{", encoding="utf-8")
    found = scan(make.data(path=str(tmp_path), caption_extension=".json"))
    assert [sample.captions for sample in found.samples] == [("a cat", "a {red} cat"), ("x", "y"), ("one",), ("text",)]
    assert [problem.what for problem in found.set_aside] == [
        *[worded("dataset/its-caption-file-holds-no-text")] * 2,
        worded("dataset/its-caption-file-is-no-json"),
    ]
    rows(tmp_path, {"file_name": "0.png", "many": ["p", "q"]}, {"file_name": "1.png", "many": "r"})
    source = {"path": str(tmp_path), "caption_column": "many"}
    listed = scan(make.data(path=None, sources=[source], exclude=["[2-9].png"]))
    assert [sample.captions for sample in listed.samples] == [("p", "q"), ("r",)]


def test_keys_of_caption_files_that_nothing_reads_are_named(tmp_path: Path, make: SimpleNamespace) -> None:
    for name, value in {
        "0": {"captions": ["a"], "caption": "b", "note": ""},
        "1": {"caption": "c", "model": "m"},
    }.items():
        make.image(tmp_path / f"{name}.png", seed=int(name))
        (tmp_path / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    (notice,) = scan(make.data(path=str(tmp_path), caption_extension=".json")).notices
    assert notice.endswith(": caption (1 file), model (1 file).")


def test_each_caption_file_of_a_list_is_a_caption(tmp_path: Path, make: SimpleNamespace) -> None:
    for index in range(3):
        make.image(tmp_path / f"{index}.png", seed=index, caption=f"text  {index}")
    (tmp_path / "0.tags.txt").write_text("red, house", encoding="utf-8")
    (tmp_path / "0.json").write_text(json.dumps({"captions": ["p", "q"]}), encoding="utf-8")
    (tmp_path / "1.tags.txt").write_text(" ", encoding="utf-8")
    (tmp_path / "2.txt").rename(tmp_path / "2.tags.txt")
    found = scan(make.data(path=str(tmp_path), caption_extension=[".tags.txt", ".txt", ".json"]))
    assert [sample.captions for sample in found.samples] == [
        ("red, house", "text 0", "p", "q"),
        ("text 1",),
        ("text 2",),
    ]
    assert found.notices == () and found.set_aside == ()
    one = make.data(path=str(tmp_path), caption_extension=[".txt"], exclude=["*.tags.txt"])
    assert [sample.captions for sample in scan(one).samples] == [("text 0",), ("text 1",), ("2",)]


def test_a_caption_file_of_a_list_that_cannot_be_used_is_named(tmp_path: Path, make: SimpleNamespace) -> None:
    for index in range(4):
        make.image(tmp_path / f"{index}.png", seed=index, caption="x")
    (tmp_path / "0.tags.txt").write_bytes("für".encode("latin-1"))
    (tmp_path / "1.json").write_text("{", encoding="utf-8")
    (tmp_path / "2.tags.txt").mkdir()
    found = scan(make.data(path=str(tmp_path), caption_extension=[".txt", ".tags.txt", ".json"]))
    assert [problem.what for problem in found.set_aside] == [
        worded("dataset/its-caption-file-0-tags-txt-is"),
        worded("dataset/its-caption-file-1-json-is-no"),
    ]
    assert list(captions(found)) == ["2.png", "3.png"]


def test_the_remedy_of_missing_captions_names_each_ending(tmp_path: Path, make: SimpleNamespace) -> None:
    make.image(tmp_path / "a.png")
    endings = [".txt", ".tags.txt"]
    with pytest.raises(DataError) as caught:
        scan(make.data(path=str(tmp_path), caption_extension=endings, caption_fallback="error"))
    assert says(caught.value.fix, "dataset/write-a-txt-or-tags-txt-file")
    (tmp_path / "a.tags.txt").write_text("x", encoding="utf-8")
    assert captions(scan(make.data(path=str(tmp_path), caption_extension=endings, caption_fallback="error")))


def test_a_kohya_project_counts_the_same_from_above(tmp_path: Path, make: SimpleNamespace) -> None:
    """Whether the project's folder is given, or the one in it with the number_name folders."""
    for number in range(3):
        make.image(tmp_path / "proj" / "img" / "10_zwx woman" / f"IMG_{number}.png", seed=number)
    make.image(tmp_path / "proj" / "img" / "20_zwx" / "5_close" / "a.png", seed=4)
    make.image(tmp_path / "proj" / "plain" / "b.png", seed=5)
    above = scan(make.data(path=str(tmp_path / "proj")))
    below = scan(make.data(path=str(tmp_path / "proj" / "img")))
    repeats = {sample.key: sample.repeats for sample in above.samples}
    assert repeats == {**{f"img/{each.key}": each.repeats for each in below.samples}, "plain/b.png": 1}
    assert sorted(repeats.values()) == [1, 10, 10, 10, 20], "the first folder with a number counts"
    assert {sample.caption for sample in above.samples} >= {"zwx woman"}
    assert says(above.notices, "dataset/folder-img-10-zwx-woman-each-image")


def test_a_kohya_project_s_regularisation_images_are_named(tmp_path: Path, make: SimpleNamespace) -> None:
    make.image(tmp_path / "img" / "10_zwx" / "a.png")
    assert not [notice for notice in scan(make.data(path=str(tmp_path))).notices if "is_reg" in notice], "the control"
    make.image(tmp_path / "reg" / "1_woman" / "b.png", seed=1)
    assert any("reg/1_woman" in notice and "is_reg" in notice for notice in scan(make.data(path=str(tmp_path))).notices)
