"""Masks: paired by name, refused in words, cut as their image is, reduced by area."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lora_rocm.dataset.companions.masks import MASK, decode_mask, fits, mask_on_grid
from lora_rocm.dataset.images.buckets import Geometry, choose_bucket
from lora_rocm.dataset.images.image_io import decode, resized_crop
from lora_rocm.dataset.sample_table import Sample
from lora_rocm.dataset.sources.scan import Scan, scan
from lora_rocm.errors import DataError
from tests.wording import mentions, saying, says, worded


def mask(path: Path, size: tuple[int, int] = (96, 64), value: int = 255) -> Path:
    """A mask of one grey."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, value).save(path)
    return path


@pytest.fixture
def images(tmp_path: Path, make: SimpleNamespace) -> Path:
    """Three images of 96x64, one of them in a sub-folder."""
    for number, name in enumerate(("a", "b", "sub/c")):
        make.image(tmp_path / "data" / f"{name}.png", seed=number, caption=name)
    return tmp_path / "data"


def scanned(make: SimpleNamespace, images: Path, masks: Path | None = None, **keys: Any) -> Scan:
    return scan(make.data(path=str(images), mask_path=masks and str(masks), **keys))


def notices(found: Scan) -> str:
    return "\n".join(found.notices)


def place(sample: Sample) -> Path | object:
    mask = sample.companion(MASK)
    return None if mask is None else mask.place


def test_a_mask_belongs_to_the_image_with_its_path(images: Path, make: SimpleNamespace, tmp_path: Path) -> None:
    a, c = mask(tmp_path / "masks" / "a.webp"), mask(tmp_path / "masks" / "sub" / "c-masklabel.png")
    mask(tmp_path / "masks" / "c.png")  # not in the folder of the image
    found = scanned(make, images, tmp_path / "masks")
    assert [sample.key for sample in found.samples] == ["a.png", "b.png", "sub/c.png"] and not found.set_aside
    assert [place(sample) for sample in found.samples] == [a, None, c]
    assert says(notices(found), "dataset/images-with-a-mask-2-of-3")
    assert says(notices(found), "dataset/1-image-has-none-and-is-trained")
    assert says(notices(found), "dataset/1-mask-has-no-image-of-the")
    assert not found.lasting, "what is kept of a large dataset knows nothing of the files of masks"


def test_masks_in_linked_folders_are_found_and_circles_end(images: Path, make: SimpleNamespace, tmp_path: Path) -> None:
    mask(tmp_path / "elsewhere" / "c.png")
    (tmp_path / "masks").mkdir()
    (tmp_path / "masks" / "sub").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "elsewhere" / "round").symlink_to(tmp_path / "masks", target_is_directory=True)
    found = scanned(make, images, tmp_path / "masks")
    assert says(notices(found), "dataset/images-with-a-mask-1-of-3") and says(
        notices(found), "dataset/2-images-have-none"
    )


@pytest.mark.parametrize("key", ["mask_path", "control_path"])
def test_links_out_of_the_folder_are_named_and_followed_only_where_images_are(
    key: str, images: Path, make: SimpleNamespace, tmp_path: Path
) -> None:
    """As among the images. A link to a folder that the images do not have may lead to any number of other files."""
    folder, elsewhere = tmp_path / "masks", tmp_path / "elsewhere"
    for name in ("b", "own/d"):
        mask(folder / f"{name}.png")
    mask(elsewhere / "private.png")
    mask(elsewhere / "sub" / "c.png")
    mask(elsewhere / "sub" / "deep" / "zz.png")
    try:
        (folder / "a.png").symlink_to(elsewhere / "private.png")
        (folder / "inside.png").symlink_to(folder / "b.png")
        (folder / "sub").symlink_to(elsewhere / "sub", target_is_directory=True)
        (folder / "all").symlink_to(elsewhere, target_is_directory=True)
    except OSError:
        pytest.skip("no links may be made here")
    said = notices(scan(make.data(path=str(images), **{key: str(folder)})))
    noun, real = "mask" if key == "mask_path" else "control image", elsewhere.resolve()
    named = f"a.png -> {real / 'private.png'}, sub/c.png -> {real / 'sub' / 'c.png'}"
    assert says(said, "dataset/2-nouns-are-reached-through-links-that", noun=noun, named=named)
    assert says(said, "dataset/no-folder-at-the-same-place-all", real=real, path=real / "sub" / "deep")
    assert says(said, "dataset/2-nouns-have-no-image-of-the", noun=noun)
    assert "private.png" not in said.replace(named, "") and "zz.png" not in said


def test_without_links_none_are_named(images: Path, make: SimpleNamespace, tmp_path: Path) -> None:
    mask(tmp_path / "masks" / "a.png")
    mask(tmp_path / "masks" / "other" / "z.png")
    said = notices(scanned(make, images, tmp_path / "masks"))
    assert "through links" not in said and "not searched" not in said


def test_two_masks_of_one_image_are_reported(images: Path, make: SimpleNamespace, tmp_path: Path) -> None:
    first = mask(tmp_path / "masks" / "a.bmp")
    mask(tmp_path / "masks" / "a.png", value=9)
    found = scanned(make, images, tmp_path / "masks")
    assert place(found.samples[0]) == first
    assert says(notices(found), "dataset/1-mask-has-the-name-of-another")


def test_without_masks_no_word_is_said(images: Path, make: SimpleNamespace) -> None:
    found = scanned(make, images)
    assert "mask" not in notices(found) and found.lasting
    assert not found.samples[0].companions


@pytest.mark.parametrize("name", ["masks", "painted"])
def test_masks_in_the_image_folder_are_not_trained_on(name: str, images: Path, make: SimpleNamespace) -> None:
    for stem in ("a", "b", "sub/c", "lonely"):
        mask(images / name / f"{stem}.png")
    found = scanned(make, images, images / name)
    assert [sample.key for sample in found.samples] == ["a.png", "b.png", "sub/c.png"]
    assert says(notices(found), "dataset/images-with-a-mask-3-of-3") and "not used" not in notices(found)
    assert says(notices(found), "dataset/1-mask-has-no-image-of-the-2")
    assert says(notices(found), "dataset/no-image-of-the-same")
    assert not mentions(notices(found), "dataset/trained-on-as-usual")


def test_masks_that_are_not_asked_for_are_left_out_and_said(images: Path, make: SimpleNamespace) -> None:
    mask(images / "masks" / "a.png")
    found = scanned(make, images)
    assert len(found.samples) == 3
    assert says(notices(found), "dataset/1-mask-is-not-used-data-mask")


def test_a_mask_of_other_proportions_sets_its_image_aside(images: Path, make: SimpleNamespace, tmp_path: Path) -> None:
    mask(tmp_path / "masks" / "a.png", (48, 32))  # smaller, and fits
    mask(tmp_path / "masks" / "b.png", (64, 64))
    found = scanned(make, images, tmp_path / "masks")
    assert [sample.key for sample in found.samples] == ["a.png", "sub/c.png"]
    (problem,) = found.set_aside
    assert problem.where.endswith("b.png") and "masks" in problem.where
    assert problem.what == worded("dataset/the-mask-of-b-png-has-other")


def test_an_unreadable_mask_sets_its_image_aside(images: Path, make: SimpleNamespace, tmp_path: Path) -> None:
    mask(tmp_path / "masks" / "a.png")
    (tmp_path / "masks" / "b.png").write_bytes(b"no image")
    found = scanned(make, images, tmp_path / "masks")
    (problem,) = found.set_aside
    assert says(problem.what, "dataset/the-mask-of-b-png-cannot-be") and says(problem.fix, "dataset/take-it-away")


def test_a_folder_that_has_no_mask_of_any_image_is_refused(images: Path, make: SimpleNamespace, tmp_path: Path) -> None:
    mask(tmp_path / "masks" / "other.png")
    with pytest.raises(DataError) as caught:
        scanned(make, images, tmp_path / "masks")
    assert caught.value.code == "masks-missing"
    with pytest.raises(DataError, check=saying("dataset/cannot-be-read")):
        scanned(make, images, tmp_path / "nowhere")
    with pytest.raises(DataError, check=saying("dataset/the-folder-of-the-images-themselves")):
        scanned(make, images, images)
    with pytest.raises(DataError, check=saying("dataset/no-image-has-a-mask-found-3")):
        scanned(make, images, alpha_mask=True)


def test_the_alpha_channel_is_a_mask_where_the_recipe_says_so(images: Path, make: SimpleNamespace) -> None:
    Image.new("RGBA", (96, 64), (9, 9, 9, 128)).save(images / "a.png")
    assert "mask" not in notices(scanned(make, images)), "alpha is never used silently"
    found = scanned(make, images, alpha_mask=True)
    assert says(notices(found), "dataset/images-with-a-mask-1-of-3") and says(
        notices(found), "dataset/2-images-have-none"
    )


def test_what_a_mask_file_says(tmp_path: Path) -> None:
    size = (2, 1)
    for mode, values, wanted in (
        ("L", (255, 51), [255, 51]),
        ("1", (1, 0), [255, 0]),
        ("I;16", (65535, 0), [255, 0]),
        ("RGB", ((255, 255, 255), (0, 0, 0)), [255, 0]),
        ("RGBA", ((255, 255, 255, 255), (255, 255, 255, 0)), [255, 0]),  # painted on nothing
        ("LA", ((255, 255), (255, 51)), [255, 51]),
    ):
        image = Image.new(mode, size)
        for x, value in enumerate(values):
            image.putpixel((x, 0), value)  # type: ignore[arg-type]
        image.save(tmp_path / "mask.png")
        found = decode_mask((tmp_path / "mask.png").read_bytes(), alpha=False)
        assert (found.mode, list(found.tobytes())) == ("L", wanted), mode
    opaque = decode_mask((tmp_path / "mask.png").read_bytes(), alpha=True)
    assert list(opaque.tobytes()) == [255, 51]
    Image.new("RGB", size).save(tmp_path / "mask.png")
    assert list(decode_mask((tmp_path / "mask.png").read_bytes(), alpha=True).tobytes()) == [255, 255]


def test_camera_rotation_counts_for_masks_too(tmp_path: Path) -> None:
    image = Image.new("L", (2, 1))
    image.putpixel((0, 0), 255)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    image.save(tmp_path / "mask.png", exif=exif)
    found = decode_mask((tmp_path / "mask.png").read_bytes(), alpha=False)
    assert found.size == (1, 2) and list(found.tobytes()) == [255, 0]


def test_proportions() -> None:
    assert fits((96, 64), (96, 64)) and fits((33, 22), (1000, 667)) and fits((1001, 667), (3000, 2000))
    assert not fits((64, 96), (96, 64)) and not fits((100, 64), (96, 64)) and not fits((8, 8), (96, 64))


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("size", [(96, 64), (101, 67), (67, 131)])
def test_a_mask_is_cut_as_its_image_is(size: tuple[int, int], flip: bool) -> None:
    """A rectangle that is white in both covers the same cells."""
    geometry = choose_bucket(*size, 64, 16, 2.5, enable_bucket=True, upscale=False)
    pixels_HW = np.zeros((size[1], size[0]), dtype=np.uint8)
    pixels_HW[size[1] // 3 : size[1] // 2, size[0] // 5 : size[0] // 2] = 255
    image = Image.fromarray(pixels_HW)
    found_HW = mask_on_grid(pixels_HW, geometry, flip, (8, 8))
    cut_HW = np.asarray(resized_crop(image, geometry, flip)).astype(np.float64) / 255
    height, width = geometry.target_hw
    wanted_HW = cut_HW.reshape(height // 8, 8, width // 8, 8).mean(axis=(1, 3))
    assert found_HW.shape == (height // 8, width // 8) and found_HW.dtype == np.float32
    assert np.abs(found_HW - wanted_HW).max() < 0.03, "the image is scaled with another filter"
    other_HW = mask_on_grid(pixels_HW, geometry, not flip, (8, 8))
    assert np.abs(other_HW - wanted_HW).max() > 0.3


def test_the_reduction_is_by_area_and_exact() -> None:
    geometry = Geometry((48, 80), (24, 40), (4, 8), (16, 24))
    mask_HW = np.zeros((48, 80), dtype=np.uint8)
    mask_HW[8:14, 16:24] = 255  # the first 3 of 8 rows, the first 4 of 8 columns of the first cell
    found_HW = mask_on_grid(mask_HW, geometry, False, (8, 8))
    assert found_HW[0, 0] == np.float32(3 / 8 * 4 / 8)
    assert np.count_nonzero(found_HW) == 1, "nothing leaks into other cells"
    assert (mask_on_grid(np.full((48, 80), 255, np.uint8), geometry, True, (8, 8)) == 1.0).all()
    larger_HW = mask_HW.repeat(3, axis=0).repeat(3, axis=1)
    assert np.array_equal(mask_on_grid(larger_HW, geometry, False, (8, 8)), found_HW), "a mask of another size"
    smaller_HW = mask_HW[::2, ::2]
    assert np.array_equal(mask_on_grid(smaller_HW, geometry, False, (8, 8)), found_HW)


def test_alpha_does_not_change_what_is_seen(tmp_path: Path) -> None:
    Image.new("RGBA", (4, 4), (10, 20, 30, 0)).save(tmp_path / "clear.png")
    assert decode((tmp_path / "clear.png").read_bytes()).getpixel((0, 0)) == (255, 255, 255)


def test_masks_beside_the_images_are_used_where_the_recipe_says_so(images: Path, make: SimpleNamespace) -> None:
    """OneTrainer's NAME-masklabel.png, and folders of masks at each level as ai-toolkit's users have them."""
    made = [
        mask(images / name) for name in ("a-masklabel.png", "_masks/b_mask.png", "sub/Masks/c.png", "x-masklabel.png")
    ]
    found = scanned(make, images, "beside")
    assert [sample.key for sample in found.samples] == ["a.png", "b.png", "sub/c.png"] and found.lasting
    assert [place(sample) for sample in found.samples] == made[:3]
    assert says(notices(found), "dataset/images-with-a-mask-3-of-3") and "not used" not in notices(found)
    assert says(notices(found), "dataset/1-mask-has-no-image-of-the-3")
    for path in made:
        path.unlink()
    mask(images / "masks" / "venice.png")
    with pytest.raises(DataError, check=saying("dataset/no-image-has-a-mask-found-4")) as caught:
        scanned(make, images, "beside")
    assert "NAME-masklabel.png" in caught.value.fix
