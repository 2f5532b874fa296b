"""Images that claim more than they hold: refused from the header, at a bounded cost; sound ones are read."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_rocm.dataset.images import image_io
from lora_rocm.dataset.images.image_io import MAX_IMAGE_BYTES, UnreadableImage, decode, read_header, readable_extensions
from lora_rocm.dataset.sources.folders import walk
from lora_rocm.dataset.sources.sample_image import image_bytes, load_image
from lora_rocm.dataset.sources.scan import scan
from lora_rocm.errors import DataError
from lora_rocm.recipe.schema import DataSection
from tests.hostile import attacks
from tests.wording import saying, says

KINDS = ("PNG", "JPEG", "WEBP", "TIFF", "GIF", "BMP", "MPO", "TGA", "PPM", "QOI", "ICO")
QUICK_S = 5.0  # measured: under 0.9 s; without the guard minutes


def refused(path: Path) -> str:
    with pytest.raises(UnreadableImage) as caught:
        read_header(path)
    return str(caught.value)


@pytest.mark.parametrize("make", [attacks.png_of, attacks.bmp_of, attacks.gif_of, attacks.tiff_of, attacks.jpeg_of])
def test_giant_dimensions(tmp_path: Path, make: attacks.Any) -> None:
    (tmp_path / "bomb").write_bytes(make(65_535, 65_535))
    assert says(refused(tmp_path / "bomb"), "hostile/too-many-pixels")
    (tmp_path / "wide").write_bytes(make(60_000, 1))
    assert read_header(tmp_path / "wide").size == (
        60_000,
        1,
    )  # control: as odd, but small


@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt", b"iCCP"])
def test_chunks_that_unpack_to_gigabytes(tmp_path: Path, kind: bytes) -> None:
    """Alone no text of 64 MiB is built from it; a short one is read over."""
    heads = {b"zTXt": b"k\0\0", b"iTXt": b"k\0\1\0\0\0", b"iCCP": b"p\0\0"}
    (tmp_path / "a.png").write_bytes(attacks.png_of(8, 8, attacks.chunk(kind, heads[kind] + attacks.zeros(64))))
    (tmp_path / "b.png").write_bytes(attacks.png_of(8, 8, attacks.chunk(kind, heads[kind] + attacks.zeros(0))))
    assert "too large" in refused(tmp_path / "a.png")
    assert read_header(tmp_path / "b.png").size == (8, 8)


@pytest.mark.parametrize(
    ("make", "hostile", "sound"),
    [
        (attacks.jpeg_with_exif, 1000, 3),
        (attacks.png_of_chunks, 400_000, 100),
        (attacks.ppm_with_comment, 2_000_000, 100),
    ],
    ids=["jpeg of EXIF", "png of chunks", "ppm of comment"],
)
def test_headers_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[int], bytes], hostile: int, sound: int
) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(make(hostile))
    began = time.process_time()
    assert says(refused(path), "hostile/its-header-has-no-end")
    assert time.process_time() - began < QUICK_S
    path.write_bytes(make(sound))
    assert read_header(path).size == (8, 8)
    monkeypatch.setattr(image_io, "MAX_HEADER_COST", 1000)
    assert says(refused(path), "hostile/its-header-has-no-end")  # it is the limit that refuses


def test_a_hundred_thousand_frames(tmp_path: Path) -> None:
    frame = b"\x21\xf9\x04\0\0\0\0\0\x2c\0\0\0\0\x08\0\x08\0\0\x02\x02\x4c\x01\0"
    head = attacks.image("GIF")
    (tmp_path / "x.gif").write_bytes(head[:-1] + frame * 100_000 + b"\x3b")
    began = time.process_time()
    assert read_header(tmp_path / "x.gif").size == (8, 8)
    assert decode((tmp_path / "x.gif").read_bytes()).size == (8, 8)  # the first one, and no other is checked
    assert time.process_time() - began < QUICK_S


@pytest.mark.parametrize("kind", KINDS)
def test_cut_short_at_every_byte(tmp_path: Path, kind: str) -> None:
    whole = attacks.image(kind)
    for size in range(len(whole)):
        try:
            assert decode(whole[:size]).size == (8, 8)
        except UnreadableImage as error:
            assert str(error)
    assert decode(whole).size == (8, 8)


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".eps"])
def test_formats_for_which_programs_would_run_are_not_read(tmp_path: Path, suffix: str) -> None:
    """By their content, regardless of their names."""
    path = tmp_path / f"x{suffix}"
    for content in (attacks.eps(tmp_path), b"\xd7\xcd\xc6\x9a" + bytes(100), b"SIMPLE  =" + bytes(3000)):
        path.write_bytes(content)
        assert says(refused(path), "hostile/not-an-image")
    assert not (tmp_path / attacks.MARK).exists()
    assert not {".eps", ".wmf", ".emf", ".fits", ".mpg"} & readable_extensions()


def test_one_file_that_is_two_things(tmp_path: Path) -> None:
    """An image with a web page or an archive behind it is the image, and nothing is done with the rest."""
    for tail in (attacks.HTML.encode(), b"PK\x03\x04" + bytes(40), attacks.pickled(tmp_path)):
        assert decode(attacks.image("JPEG") + tail).size == (8, 8)
    assert not (tmp_path / attacks.MARK).exists()


def test_files_of_gigabytes_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(attacks.image())
    sample = scan(DataSection(path=str(tmp_path), resolution=8, bucket_step=8)).samples[0]
    assert load_image(sample).size == (8, 8)
    os.truncate(path, MAX_IMAGE_BYTES + 1)  # a hole: it takes no space
    assert says(refused(path), "hostile/larger-than-512-mib")
    with pytest.raises(DataError, check=saying("hostile/larger-than-512-mib")):
        image_bytes(sample)


PIPES = """
import os, sys
from pathlib import Path
from lora_rocm.dataset.sources.scan import scan
from lora_rocm.recipe.schema import DataSection
found = scan(DataSection(path=sys.argv[1], resolution=8, bucket_step=8))
print([sample.key for sample in found.samples])
for problem in found.set_aside:
    print(problem.where, problem.what)
"""


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
def test_pipes_and_devices_are_not_waited_for(tmp_path: Path) -> None:
    """In a separate process: one that waits has to be ended."""
    folder = tmp_path / "pics"
    folder.mkdir()
    for name in ("good.png", "talk.png"):
        (folder / name).write_bytes(attacks.image())
    os.mkfifo(folder / "pipe.png")
    os.mkfifo(folder / "talk.txt")
    (folder / "zero.png").symlink_to("/dev/zero")
    (folder / "folder.png").mkdir()
    (folder / "loop.png").symlink_to("loop.png")
    done = subprocess.run(
        [sys.executable, "-c", PIPES, str(folder)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("['good.png']\n")
    said = {line.split()[0].rpartition("/")[2]: line for line in done.stdout.splitlines()[1:]}
    assert set(said) == {"pipe.png", "talk.png", "zero.png", "loop.png"}
    assert all(says(said[name], "hostile/no-plain-file") for name in ("pipe.png", "talk.png", "zero.png"))


def test_links_that_lead_out_are_said(tmp_path: Path) -> None:
    private, folder = tmp_path / "private", tmp_path / "pics"
    for place in (private, folder / "sub"):
        place.mkdir(parents=True)
    (private / "a.png").write_bytes(attacks.image())
    (private / "secret.json").write_text("key", encoding="utf-8")
    (folder / "own.png").write_bytes(attacks.image())
    (folder / "sub" / "inside.png").symlink_to(folder / "own.png")
    assert walk(folder, ".txt").notices == []  # control: a link that stays inside
    (folder / "out.png").symlink_to(private / "a.png")
    (folder / "own.txt").symlink_to(private / "secret.json")
    (folder / "all").symlink_to(private, target_is_directory=True)
    (notice,) = walk(folder, ".txt").notices
    assert says(notice, "hostile/4-files-are-reached-through-links-that")
    assert f"out.png -> {private / 'a.png'}" in notice and f"own.txt -> {private / 'secret'}" in notice


def test_a_tree_deeper_than_the_stack(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(attacks.image())
    place = os.getcwd()
    try:
        os.chdir(tmp_path)
        for _ in range(1020):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(place)
    assert [name for _, name in walk(tmp_path, ".txt").images] == ["a.png"]
    subprocess.run(["rm", "-rf", str(tmp_path / "d")], check=False)  # deeper than shutil goes
