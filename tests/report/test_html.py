"""HTML building blocks."""

from pathlib import Path

from PIL import Image

from lora_rocm.report.html import header, image_table, image_tag, page, paragraph, preformatted, section, table


def test_everything_is_escaped() -> None:
    evil = "<script>&\"'"
    parts = [header(evil), paragraph(evil), preformatted(evil), section(evil, "x"), table([evil], [[evil]])]
    parts += [image_table([evil], [(evil, ["ok"])]), page(evil, [])]
    assert all("<script>" not in part for part in parts)


def test_empty_parts_vanish() -> None:
    assert section("title") == "" and section("title", "", "") == "" and table(["a"], []) == ""


def test_images_are_reduced_and_embedded(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    noise = Image.effect_noise((1200, 600), 90)
    noise.save(path)
    large = image_tag(path, 'label "x"')
    assert large.startswith('<img src="data:image/jpeg;base64,') and "&quot;x&quot;" in large
    assert len(large) < 400_000
    assert image_tag(path, "small", 128).startswith('<img src="data:image/png;base64,')


def test_an_image_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no image")
    for name in ("a.png", "missing.png"):
        assert "<img" not in image_tag(tmp_path / name, "x")
