import io
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageFile, PngImagePlugin

from lora_rocm.dataset.images.buckets import Geometry, choose_bucket
from lora_rocm.dataset.images.image_io import (
    UnreadableImage,
    decode,
    is_dark,
    read_header,
    readable_extensions,
    resized_crop,
)
from tests.wording import saying

RED, GREEN = (255, 0, 0), (0, 255, 0)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def left_red(width: int = 24, height: int = 16) -> Image.Image:
    """The left half red, the rest green: every orientation looks different by size or by colour."""
    image = Image.new("RGB", (width, height), GREEN)
    image.paste(RED, (0, 0, width // 2, height))
    return image


def near(pixel: object, wanted: tuple[int, int, int], tolerance: int = 8) -> bool:
    return all(abs(a - b) <= tolerance for a, b in zip(pixel, wanted, strict=True))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "GIF", "BMP", "AVIF", "TGA", "PPM", "JPEG2000", "QOI"])
def test_every_common_format(kind: str) -> None:
    content = encoded(left_red(), kind)
    assert read_header(io.BytesIO(content)).size == (24, 16)
    image = decode(content)
    assert (image.mode, image.size) == ("RGB", (24, 16))
    assert near(image.getpixel((2, 8)), RED, 24) and near(image.getpixel((21, 8)), GREEN, 24)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[274] = orientation
    content = encoded(left_red(), kind, exif=exif)
    image = decode(content)
    assert read_header(io.BytesIO(content)).size == image.size == ((16, 24) if orientation >= 5 else (24, 16))
    red_end = {1: (2, 8), 2: (21, 8), 3: (21, 8), 4: (2, 8), 5: (8, 2), 6: (8, 2), 7: (8, 21), 8: (8, 21)}[orientation]
    assert near(image.getpixel(red_end), RED, 24)


def test_orientation_behind_the_pixels_of_a_png() -> None:
    exif = Image.Exif()
    exif[274] = 6
    plain, chunk = encoded(left_red()), io.BytesIO()
    PngImagePlugin.putchunk(chunk, b"eXIf", exif.tobytes()[6:])
    content = plain[:-12] + chunk.getvalue() + plain[-12:]  # before IEND
    assert read_header(io.BytesIO(content)).size == decode(content).size == (16, 24)


ENOUGH = ("PNG", "JPEG", "MPO", "GIF", "BMP", "TIFF", "WEBP")


def test_the_header_is_enough_for_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    contents = [encoded(Image.effect_noise((400, 300), 80), kind) for kind in ENOUGH]
    monkeypatch.delattr(ImageFile.ImageFile, "load")
    for content in contents:
        assert read_header(io.BytesIO(content)).size == (400, 300)


def with_preview() -> bytes:
    """A JPEG with a small preview in its EXIF data; the preview has its own end mark."""
    exif = Image.Exif()
    exif[0x9C9B] = encoded(left_red(), "JPEG")
    return encoded(left_red(), "JPEG", exif=exif)


SHORT_OF = {
    "baseline": lambda: encoded(left_red(), "JPEG"),
    "progressive": lambda: encoded(left_red(), "JPEG", progressive=True),
    "restarts": lambda: encoded(left_red(), "JPEG", restart_marker_rows=1),
    "preview": with_preview,
    "two pictures": lambda: encoded(left_red(), "MPO", save_all=True, append_images=[left_red(16, 24)]),
    "png": lambda: encoded(left_red(), "PNG"),
    "webp": lambda: encoded(left_red(), "WEBP"),
    "gif": lambda: encoded(left_red(), "GIF"),
    "two frames": lambda: encoded(left_red(), "GIF", save_all=True, append_images=[left_red().transpose(ROTATE)]),
    "bmp": lambda: encoded(left_red(), "BMP"),
    "bmp of two colours": lambda: encoded(left_red().convert("1"), "BMP"),
    "tiff": lambda: encoded(left_red(), "TIFF"),
    "tiff of strips": lambda: encoded(left_red(), "TIFF", tiffinfo={278: 4}, compression="raw"),
    "tiff of lzw": lambda: encoded(left_red(), "TIFF", compression="tiff_lzw"),
    "tiff of two pages": lambda: encoded(left_red(), "TIFF", save_all=True, append_images=[left_red()]),
}
ROTATE = Image.Transpose.ROTATE_180


@pytest.mark.parametrize("kind", SHORT_OF)
def test_what_the_header_says_of_a_truncated_file_is_what_decoding_says(kind: str) -> None:
    whole = SHORT_OF[kind]()
    for length in (*range(len(whole) // 2, len(whole) - 40, 37), *range(len(whole) - 40, len(whole) + 1)):
        says = []
        for read in (lambda part: read_header(io.BytesIO(part)), decode):
            try:
                read(whole[:length])
                says.append("")
            except UnreadableImage as error:
                says.append(str(error))
        assert says[0] == says[1], f"{length} of {len(whole)} bytes"
    assert says == ["", ""]


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("after", [b"\n", b"\0" * 100_000, b"ftypmp42" * 10_000], ids=["line", "zeros", "film"])
def test_bytes_after_the_end_of_an_image_do_no_harm(kind: str, after: bytes) -> None:
    whole = encoded(left_red(), kind)
    assert read_header(io.BytesIO(whole + after)).size == decode(whole + after).size == (24, 16)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_becomes_white(mode: str) -> None:
    rgba = Image.new("RGBA", (4, 4), (0, 0, 0, 255))
    rgba.putpixel((0, 0), (0, 0, 0, 0))
    rgba.putpixel((1, 0), (0, 0, 0, 128))
    image = decode(encoded(rgba.quantize() if mode == "P" else rgba.convert(mode)))
    assert image.getpixel((0, 0)) == (255, 255, 255) and image.getpixel((3, 3)) == (0, 0, 0)
    assert near(image.getpixel((1, 0)), (127, 127, 127), 2)


def test_a_transparent_colour_becomes_white() -> None:
    image = decode(encoded(left_red(), transparency=RED))
    assert image.getpixel((2, 8)) == (255, 255, 255) and image.getpixel((21, 8)) == GREEN


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        (np.array([[0, 32768, 65535]], np.uint16), "PNG", [0, 128, 255]),
        (np.array([[0, 32768, 65535]], np.uint16), "TIFF", [0, 128, 255]),
        (np.array([[0, 100, 200]], np.uint16), "PNG", [0, 0, 1]),  # a dark image stays dark
        (np.array([[0, 2**30, 2**31 - 1]], np.int32), "TIFF", [0, 128, 255]),
        (np.array([[0.0, 0.5, 1.0]], np.float32), "TIFF", [0, 128, 255]),
        (np.array([[-1.0, np.nan, 127.5, 255.0]], np.float32), "TIFF", [0, 0, 128, 255]),
    ],
)
def test_deep_grey_is_scaled(values: np.ndarray, kind: str, expected: list[int]) -> None:
    image = decode(encoded(Image.fromarray(values), kind))
    assert [pixel[0] for pixel in np.asarray(image)[0]] == expected


def test_cmyk_grey_and_bilevel() -> None:
    assert near(decode(encoded(left_red().convert("CMYK"), "JPEG", quality=95)).getpixel((2, 8)), RED, 24)
    assert decode(encoded(Image.new("L", (4, 4), 77))).getpixel((1, 1)) == (77, 77, 77)
    assert decode(encoded(Image.new("1", (4, 4), 1))).getpixel((1, 1)) == (255, 255, 255)


def test_the_first_frame_of_an_animation() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, GREEN)]
    for kind in ("GIF", "PNG", "WEBP"):
        content = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
        assert near(decode(content).getpixel((4, 4)), RED, 24)


def test_a_colour_profile_is_converted() -> None:
    """sRGB with the primaries red and green exchanged turns the image over."""
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    exchanged = srgb.replace(b"rXYZ", b"tmp ", 1).replace(b"gXYZ", b"rXYZ", 1).replace(b"tmp ", b"gXYZ", 1)
    image = decode(encoded(left_red(), icc_profile=exchanged))
    assert near(image.getpixel((2, 8)), GREEN) and near(image.getpixel((21, 8)), RED)
    half_clear = left_red().convert("RGBA")
    half_clear.putalpha(128)
    assert near(decode(encoded(half_clear, icc_profile=exchanged)).getpixel((2, 8)), (127, 255, 127))


def test_lab_images() -> None:
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    pixels = Image.new("LAB", (4, 4), (136, 209, 195))  # L 53, a 81, b 67: sRGB's red
    assert near(decode(encoded(pixels, "TIFF", icc_profile=lab)).getpixel((1, 1)), RED, 12)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "1"])
def test_an_srgb_profile_changes_nothing(mode: str) -> None:
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    plain = left_red().convert(mode)
    with_profile, without = decode(encoded(plain, icc_profile=srgb)), decode(encoded(plain))
    assert np.abs(np.asarray(with_profile).astype(int) - np.asarray(without)).max() <= 1


@pytest.mark.parametrize("profile", [b"not a profile", b"\0" * 200])
def test_a_broken_profile_is_taken_for_srgb(profile: bytes) -> None:
    assert decode(encoded(left_red(), icc_profile=profile)).getpixel((2, 8)) == RED


def test_a_profile_of_another_colour_space_is_taken_for_srgb() -> None:
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    assert decode(encoded(left_red(), icc_profile=lab)).getpixel((2, 8)) == RED


def test_a_decompression_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(Image.new("L", (100, 100)))
    assert decode(content).size == (100, 100)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4000)
    for read in (lambda: decode(content), lambda: read_header(io.BytesIO(content))):
        with pytest.raises(UnreadableImage, check=saying("dataset/too-many-pixels")):
            read()


def test_reasons(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.jpg").write_text("hello", encoding="utf-8")
    (tmp_path / "eps.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n")
    for name, reason in (
        ("empty.png", "empty"),
        ("text.jpg", "format"),
        ("eps.png", "format"),
        ("none.png", "No such"),
    ):
        with pytest.raises(UnreadableImage, match=reason):
            read_header(tmp_path / name)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "GIF", "BMP", "AVIF", "TGA", "JPEG2000", "ICO", "DDS"])
def test_damaged_files_are_refused_or_read_never_worse(kind: str) -> None:
    whole, chance = encoded(left_red(40, 30), kind), random.Random(kind)
    refused = 0
    for _ in range(60):
        content = bytearray(whole)
        if chance.random() < 0.4:
            del content[chance.randrange(len(content)) :]
        for _ in range(chance.randrange(1, 6) if content else 0):
            content[chance.randrange(len(content))] = chance.randrange(256)
        for read in (lambda: read_header(io.BytesIO(bytes(content))), lambda: decode(bytes(content))):  # noqa: B023
            try:
                read()
            except UnreadableImage as error:
                assert str(error)
                refused += 1
    assert refused > 10


def test_extensions() -> None:
    assert {".png", ".jpg", ".jpeg", ".webp", ".tif", ".avif", ".bmp", ".gif"} <= readable_extensions()
    assert not {".txt", ".json", ".pdf", ".h5", ".eps", ".mpg"} & readable_extensions()


def test_cut_scales_and_crops_and_mirrors() -> None:
    image = left_red(300, 100)
    geometry = choose_bucket(300, 100, 64, 16, 2.0, True, False)
    plain, mirrored = resized_crop(image, geometry, False), resized_crop(image, geometry, True)
    assert plain.size == mirrored.size == geometry.target_hw[::-1]
    assert near(plain.getpixel((1, 5)), RED) and near(mirrored.getpixel((1, 5)), GREEN)


def test_the_crop_lies_where_the_geometry_says_in_both_variants() -> None:
    image = Image.new("RGB", (5, 4), GREEN)
    image.putpixel((1, 0), RED)  # in the mirrored image at 3
    geometry = Geometry((4, 5), (4, 5), (0, 1), (4, 3))
    assert resized_crop(image, geometry, False).getpixel((0, 0)) == RED
    assert resized_crop(image, geometry, True).getpixel((2, 0)) == RED


def test_twelve_bits_that_a_tiff_declares_are_taken_for_what_they_are() -> None:
    """II, 12 bits per sample, one row of 4 pixels: 0, 1365, 2730, 4095, packed most significant bits first."""
    packed = int("".join(f"{value:012b}" for value in (0, 1365, 2730, 4095)), 2).to_bytes(6, "big")
    fields = [(256, 3, 4), (257, 3, 1), (258, 3, 12), (259, 3, 1), (262, 3, 1), (273, 4, 8), (277, 3, 1), (278, 3, 1)]
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in [*fields, (279, 4, 6)])
    content = b"II*\0" + struct.pack("<I", 14) + packed + struct.pack("<H", len(fields) + 1) + entries + bytes(4)
    image = decode(content)
    assert [image.getpixel((x, 0))[0] for x in range(4)] == [0, 85, 170, 255] and not is_dark(content)
