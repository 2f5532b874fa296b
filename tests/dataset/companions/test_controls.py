"""Control images: paired by name, one for each image, refused in words with the file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from lora_rocm.dataset.companions.controls import CONTROL
from lora_rocm.dataset.images.preview_images import require_preview_images
from lora_rocm.dataset.sample_table import Companion
from lora_rocm.dataset.sources.scan import Scan, scan
from lora_rocm.errors import DataError, RecipeError
from lora_rocm.recipe.load import load_recipe
from tests.wording import Worded, holds, saying, says, worded


@pytest.fixture
def images(tmp_path: Path, make: SimpleNamespace) -> Path:
    """Two images, one of them in a sub-folder, each with a control image of another format and size."""
    for number, name in enumerate(("a", "sub/b")):
        make.image(tmp_path / "data" / f"{name}.png", seed=number, caption=name)
        make.image(tmp_path / "controls" / f"{name}.webp", 40, 80, seed=9 + number)
    return tmp_path / "data"


def scanned(make: SimpleNamespace, images: Path, **keys: Any) -> Scan:
    return scan(make.data(path=str(images), **{"control_path": str(images.parent / "controls"), **keys}))


def test_a_control_image_belongs_to_the_image_with_its_path(images: Path, make: SimpleNamespace) -> None:
    found = scanned(make, images)
    wanted = [images.parent / "controls" / "a.webp", images.parent / "controls" / "sub" / "b.webp"]
    assert [sample.companions for sample in found.samples] == [(Companion(CONTROL, path, 40, 80),) for path in wanted]
    assert not found.set_aside and not found.notices and not found.lasting
    assert scanned(make, images, control_path=None).lasting, "the control"


def test_control_images_in_the_image_folder_are_not_trained_on(images: Path, make: SimpleNamespace) -> None:
    (images.parent / "controls").rename(images / "before")
    found = scanned(make, images, control_path=str(images / "before"))
    assert [sample.key for sample in found.samples] == ["a.png", "sub/b.png"]


def test_an_image_without_a_control_image_is_an_error(images: Path, make: SimpleNamespace) -> None:
    (images.parent / "controls" / "sub" / "b.webp").unlink()
    with pytest.raises(DataError, check=saying("dataset/1-image-has-no-control-image-sub")) as caught:
        scanned(make, images)
    assert caught.value.code == "control-missing" and caught.value.where.endswith("controls") and caught.value.fix


def test_two_control_images_of_one_name_are_an_error(images: Path, make: SimpleNamespace) -> None:
    make.image(images.parent / "controls" / "a.png")
    with pytest.raises(DataError, check=saying("dataset/a-png-and-a-webp-which-of")) as caught:
        scanned(make, images)
    assert caught.value.code == "control-ambiguous" and caught.value.where.endswith("a.webp")


def test_a_control_image_without_an_image_is_said(images: Path, make: SimpleNamespace) -> None:
    make.image(images.parent / "controls" / "c.png")
    assert scanned(make, images).notices == (worded("dataset/1-control-image-has-no-image-of"),)


def test_an_unreadable_control_image_sets_its_image_aside(images: Path, make: SimpleNamespace) -> None:
    (images.parent / "controls" / "a.webp").write_bytes(b"no image")
    found = scanned(make, images)
    assert [sample.key for sample in found.samples] == ["sub/b.png"]
    (problem,) = found.set_aside
    assert problem.where.endswith("a.webp") and says(problem.what, "dataset/the-control-image-of-a-png-cannot")
    assert says(problem.fix, "dataset/take-it-away-together-with-its-image")


def test_the_folder_of_the_images_is_refused(images: Path, make: SimpleNamespace) -> None:
    with pytest.raises(DataError, check=saying("dataset/control-path-is-the-folder-of-the")) as caught:
        scanned(make, images, control_path=str(images))
    assert caught.value.code == "control-folder-same"
    with pytest.raises(DataError, check=saying("dataset/a-folder-of-control-images-cannot-be")):
        scanned(make, images, control_path=str(images / "nowhere"))


KONTEXT = "model: {family: flux, name_or_path: x, variant: kontext}\ntrain: {epochs: 1}\n"


@pytest.mark.parametrize(
    ("text", "place", "what", "fix"),
    [
        ("data: {path: a, control_path: c}", "", "", ""),
        ("data: {path: a}\nsample: {prompts: [a], control_images: [c]}", "", "", ""),
        ("data: {dataset: a, control_path: c}", "data.dataset", worded("dataset/there-is-no-such-key"), ""),
        (
            "data: {control_path: c, sources: [{dataset: b}]}",
            "data.control_path",
            worded("dataset/b-cannot-have-both"),
            "row",
        ),
        ("data: {sources: [{path: a, control_path: c}, {path: b}]}", "data.sources", "b has no control images", "Add"),
    ],
)
def test_what_a_recipe_may_say(tmp_path: Path, text: str, place: str, what: str | Worded, fix: str) -> None:
    (tmp_path / "r.yaml").write_text(KONTEXT + text, encoding="utf-8")
    if not place:
        assert load_recipe(tmp_path / "r.yaml").recipe.model.takes_control
        return
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "r.yaml")
    problem = caught.value.problems[0]
    assert problem.where.endswith(f"r.yaml:3 {place}") and holds(problem.what, what) and fix in problem.fix


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("data:\n  path: a\n  control_path: c", "r.yaml:5 data.control_path"),
        ("data:\n  sources:\n  - {path: a, control_path: c}", "r.yaml:5 data.sources[0].control_path"),
        ("data: {path: a}\nsample:\n  control_images: [c]\n  prompts: [a]", "r.yaml:5 sample.control_images"),
    ],
)
def test_other_variants_and_families_take_none(tmp_path: Path, text: str, place: str) -> None:
    for model, fix in (("flux, variant: dev", "or set model.variant: kontext"), ("z-image", "Remove it.")):
        recipe = KONTEXT.replace("flux", model).replace(", variant: kontext", "") + text
        (tmp_path / "r.yaml").write_text(recipe, encoding="utf-8")
        with pytest.raises(RecipeError) as caught:
            load_recipe(tmp_path / "r.yaml")
        (problem,) = caught.value.problems
        assert (
            problem.where.endswith(place)
            and says(problem.what, "dataset/takes-no-control-images")
            and fix in problem.fix
        )


INPAINT = "model: {family: sdxl, name_or_path: x}\ntrain: {epochs: 1}\ndata: {path: a}\nsample:\n"


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        (
            "  prompts: [a]\n  control_images: [i]",
            "r.yaml:6 sample.control_images[0]",
            worded("dataset/it-needs-a-mask"),
        ),
        (
            "  prompts: [{prompt: a, control_image: i, control_image_2: i, mask: m}]",
            "r.yaml:5 sample.prompts[0].control_image_2",
            worded("dataset/it-needs-a-mask"),
        ),
        ("  prompts: [a]\n  masks: [m]", "r.yaml:6 sample.masks[0]", worded("dataset/has-no-image")),
        (
            "  prompts:\n  - a\n  - {prompt: b, mask: m}",
            "r.yaml:7 sample.prompts[1].mask",
            worded("dataset/has-no-image"),
        ),
        (
            "  prompts:\n  - {prompt: b, mask: m, control_image: i}\n  control_prompts: [c]\n  control_images: [i]",
            "r.yaml:8 sample.control_images[0]",
            worded("dataset/it-needs-a-mask"),
        ),
    ],
)
def test_previews_of_inpainting_bases_need_image_and_mask(tmp_path: Path, text: str, place: str, words: Worded) -> None:
    (tmp_path / "r.yaml").write_text(INPAINT + text, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "r.yaml")
    (problem,) = caught.value.problems
    assert problem.where.endswith(place) and says(problem.what, words)
    with pytest.raises(RecipeError, check=saying("dataset/takes-no-masks-in-previews")):
        load_recipe(tmp_path / "r.yaml", ["model.family=flux", "model.variant=kontext", "sample.masks=[m]"])


def test_images_of_previews_are_looked_at_before_anything_is_encoded(tmp_path: Path) -> None:
    """Each prompt has the images at its place, the last ones are for all others, and its own come first."""
    names = [tmp_path / f"{name}.png" for name in ("i", "j", "m", "n")]
    for name, size in zip(names, [(30, 20), (40, 40), (15, 10), (20, 20)], strict=True):
        Image.new("L", size).save(name)
    i, j, m, n = map(str, names)
    text = f"  prompts:\n  - a\n  - {{prompt: b, control_image: {j}, mask: {n}}}\n  - c\n"
    (tmp_path / "r.yaml").write_text(f"{INPAINT}{text}  control_images: [{i}]\n  masks: [{m}]\n", encoding="utf-8")
    loaded = load_recipe(tmp_path / "r.yaml")
    require_preview_images(loaded)
    assert [(each.control_image, each.mask) for _, _, each in loaded.recipe.sample.numbered()] == [
        (i, m),
        (j, n),
        (i, m),
    ]
    Image.new("L", (15, 11)).save(names[2])  # within a pixel of rounding of the proportions
    require_preview_images(loaded)
    Image.new("L", (10, 15)).save(names[2])
    Path(j).write_bytes(b"no image")
    with pytest.raises(RecipeError) as caught:
        require_preview_images(loaded)
    wide, broken = caught.value.problems
    assert wide.where.endswith("r.yaml:10 sample.masks[0]") and says(wide.what, "dataset/10x15-and-the-image-is-30x20")
    assert broken.where.endswith("r.yaml:7 sample.prompts[1].control_image") and says(
        broken.what, "dataset/cannot-be-read"
    )
    names[3].unlink()
    with pytest.raises(RecipeError, check=saying("dataset/r-yaml-7-sample-prompts-1-mask")):
        loaded.require_files()


def test_control_images_beside_the_images(images: Path, make: SimpleNamespace) -> None:
    (images.parent / "controls" / "a.webp").rename(images / "a-condlabel.webp")
    (images / "sub" / "_controls").mkdir()
    (images.parent / "controls" / "sub" / "b.webp").rename(images / "sub" / "_controls" / "b.webp")
    found = scanned(make, images, control_path="beside")
    assert [sample.companions[0].place.name for sample in found.samples] == ["a-condlabel.webp", "b.webp"]
    assert not found.notices and found.lasting
    (images / "a-condlabel.webp").unlink()
    with pytest.raises(DataError, check=saying("dataset/1-image-has-no-control-image-a")) as caught:
        scanned(make, images, control_path="beside")
    assert str(caught.value.where).endswith("data")


@pytest.mark.parametrize("keys", [{"random_crop": True}, {"random_crop": 3}, {"color_aug": 1}])
def test_an_image_is_not_changed_without_its_control_image(keys: Any, images: Path, make: SimpleNamespace) -> None:
    with pytest.raises(
        ValueError, check=saying("dataset/cannot-have-both-value-and-control-path", value=next(iter(keys)))
    ):
        make.recipe(make.data(path=str(images), control_path=str(images.parent / "controls"), **keys))


def numbered(make: SimpleNamespace, images: Path, *names: str) -> None:
    """Replace the control image of a.png with control images of these names."""
    (images.parent / "controls" / "a.webp").unlink()
    for seed, name in enumerate(names):
        make.image(images.parent / "controls" / f"{name}.png", 40, 80, seed=20 + seed)


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (("a_0", "a_1"), ["a_0.png", "a_1.png"]),
        (("a_0000", "a_0001"), ["a_0000.png", "a_0001.png"]),
        (("a", "a_1"), ["a.png", "a_1.png"]),
        (("a",), ["a.png", "a.png"]),
        (("a", "a_0"), ["a.png", "a.png"]),
    ],
)
def test_a_folder_named_twice_has_numbered_control_images(
    images: Path, make: SimpleNamespace, names: tuple[str, ...], wanted: list[str]
) -> None:
    numbered(make, images, *names)
    folder = str(images.parent / "controls")
    found = scanned(make, images, control_path=[folder, folder])
    assert [Path(str(each.place)).name for each in found.samples[0].companions] == wanted
    left = {f"{name}.png" for name in names} - set(wanted)
    assert len(found.notices) == len(left) and all(any(name in said for said in found.notices) for name in left)


def test_one_folder_gives_the_first_of_numbered_control_images_and_names_the_others(
    images: Path, make: SimpleNamespace
) -> None:
    numbered(make, images, "a_0", "a_1")
    found = scanned(make, images)
    assert [Path(str(each.place)).name for each in found.samples[0].companions] == ["a_0.png"]
    (notice,) = found.notices
    assert "a_1.png" in notice and "a_0.png" not in notice and "control_path" in notice


def test_a_numbered_control_image_of_another_image_is_not_taken(images: Path, make: SimpleNamespace) -> None:
    """The name of the image decides: a_0.png is the control image of a_0.jpg, and a.png has none."""
    numbered(make, images, "a_0")
    make.image(images / "a_0.jpg", caption="another")
    with pytest.raises(DataError) as caught:
        scanned(make, images)
    assert caught.value.code == "control-missing" and caught.value.what.endswith(": a.png.")
    numbered_masks = images.parent / "masks"
    make.image(numbered_masks / "a_0.png")
    (images / "a_0.jpg").unlink()
    with pytest.raises(DataError) as caught:  # the control: an image has one mask, without a number in its name
        scanned(make, images, control_path=None, mask_path=str(numbered_masks))
    assert caught.value.code == "masks-missing"


def test_numbered_control_images_beside_the_images(images: Path, make: SimpleNamespace) -> None:
    for name in ("a_0-condlabel", "_controls/a_1", "sub/b_0-condlabel", "sub/_controls/b_1"):
        make.image(images / f"{name}.png")
    found = scanned(make, images, control_path=["beside", "beside"])
    names = [[Path(str(each.place)).name for each in sample.companions] for sample in found.samples]
    assert names == [["a_0-condlabel.png", "a_1.png"], ["b_0-condlabel.png", "b_1.png"]] and not found.notices


def test_numbered_images_beside_the_images_are_named(images: Path, make: SimpleNamespace) -> None:
    """They could be control images or images: unless their names state it, they are images without one."""
    for name in ("a-condlabel", "sub/b-condlabel", "a_0"):
        make.image(images / f"{name}.png")
    with pytest.raises(DataError) as caught:
        scanned(make, images, control_path="beside")
    assert caught.value.code == "control-missing" and caught.value.what.endswith(" a_0.png.") and caught.value.fix
