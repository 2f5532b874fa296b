"""Folders of small images with captions, for tests of the part Images."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

TAGS = ("woman, red dress", "woman, smile, outdoors", "", "car")


def write_image(path: Path, size: tuple[int, int] = (96, 64), colour: int = 0) -> Path:
    """Write a small image of stripes, which differ by colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", (4, 1))
    image.putdata([(40 * place + colour, 255 - colour, (colour * 7 * place) % 256) for place in range(4)])
    image.resize(size).save(path)
    return path


def write_folder(folder: Path) -> Path:
    """Write four images: three with captions, and the third without."""
    for number, text in enumerate(TAGS):
        write_image(folder / f"image {number}.png", colour=20 * number)
        if text:
            (folder / f"image {number}.txt").write_text(text, encoding="utf-8")
    return folder
