"""HEIC and JPEG XL: read where the plugin is installed, counted and named where it is not."""

from __future__ import annotations

import io
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from lora_rocm.dataset.images import image_io, image_plugins
from lora_rocm.dataset.images.image_io import UnreadableImage, decode, read_header
from lora_rocm.dataset.images.image_plugins import jxl_size
from lora_rocm.dataset.sources.sample_image import load_image
from lora_rocm.dataset.sources.scan import scan
from lora_rocm.errors import DataError
from tests.wording import saying, says, worded

KINDS = {"HEIF": ".heic", "JXL": ".jxl"}


def encoded(kind: str, size: tuple[int, int] = (40, 24), **how: Any) -> bytes:
    image_io.readable_formats()
    buffer = io.BytesIO()
    Image.new("RGB", size, (250, 10, 10)).save(buffer, kind, **how)
    return buffer.getvalue()


@pytest.fixture
def without_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """A function that lets the import of every plugin fail with a sentence; empty: as if they were not installed."""
    caches = (image_plugins.plugin_faults, image_io.readable_formats, image_io.readable_extensions)
    identifiers = list(Image.ID)

    def block(reason: str) -> None:
        def fail(name: str) -> Any:
            raise ImportError(reason) if reason else ModuleNotFoundError(f"No module named {name!r}", name=name)

        monkeypatch.setattr(image_plugins, "import_module", fail)
        monkeypatch.setattr(Image, "ID", [name for name in identifiers if name not in KINDS])
        for cached in caches:
            cached.cache_clear()

    yield block
    monkeypatch.undo()
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_read_like_any_other(tmp_path: Path, make: SimpleNamespace, kind: str) -> None:
    (tmp_path / f"a{KINDS[kind]}").write_bytes(encoded(kind))
    (tmp_path / "a.txt").write_text("red", encoding="utf-8")
    (tmp_path / f"B{KINDS[kind].upper()}").write_bytes(encoded(kind, (64, 48)))
    (tmp_path / "B.txt").write_text("red too", encoding="utf-8")
    found = scan(make.data(path=str(tmp_path), resolution=32))
    sizes = {sample.key: (sample.width, sample.height, sample.caption) for sample in found.samples}
    assert sizes == {f"B{KINDS[kind].upper()}": (64, 48, "red too"), f"a{KINDS[kind]}": (40, 24, "red")}
    assert found.notices == () and found.set_aside == ()
    image = load_image(found.samples[0])
    assert image.mode == "RGB" and all(
        abs(a - b) < 30 for a, b in zip(image.getpixel((3, 3)), (250, 10, 10), strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_set_aside(tmp_path: Path, kind: str) -> None:
    content, rng = bytearray(encoded(kind)), random.Random(0)
    for length in range(0, len(content), max(1, len(content) // 40)):
        for read in (lambda: read_header(io.BytesIO(bytes(content[:length]))), lambda: decode(bytes(content[:length]))):  # noqa: B023
            try:
                read()
            except UnreadableImage:
                pass
    for _ in range(40):
        broken = bytearray(content)
        broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
        try:
            decode(bytes(broken))
        except UnreadableImage:
            pass


def test_without_the_plugin_they_are_counted_and_named(
    tmp_path: Path, make: SimpleNamespace, without_plugins: Callable[[str], None]
) -> None:
    heic, jxl = encoded("HEIF"), encoded("JXL")
    for name in ("a.heic", "b.HEIC"):
        (tmp_path / name).write_bytes(heic)
    (tmp_path / "a.txt").write_text("belongs to a.heic", encoding="utf-8")
    (tmp_path / "c.jxl").write_bytes(jxl)
    make.image(tmp_path / "d.png", caption="x")
    without_plugins("")
    found = scan(make.data(path=str(tmp_path)))
    assert [sample.key for sample in found.samples] == ["d.png"]
    assert found.notices == (
        worded("dataset/2-files-are-left-out-heic-images"),
        worded("dataset/1-file-is-left-out-jpeg-xl"),
    )
    (tmp_path / "d.png").unlink()
    with pytest.raises(DataError) as caught:
        scan(make.data(path=str(tmp_path)))
    assert "2 .heic" in caught.value.what and "pip install pillow-heif" in caught.value.what


def test_a_plugin_that_is_broken_is_said(
    tmp_path: Path, make: SimpleNamespace, without_plugins: Callable[[str], None]
) -> None:
    (tmp_path / "a.heic").write_bytes(encoded("HEIF"))
    make.image(tmp_path / "d.png", caption="x")
    without_plugins("libheif.so.1: cannot open shared object file")
    (notice,) = scan(make.data(path=str(tmp_path))).notices
    assert says(notice, "dataset/pillow-heif-is-installed-but-cannot-be")


def test_a_process_without_them_still_reads_the_rest() -> None:
    """The import itself, in a new process."""
    code = "; ".join(
        (
            "import sys",
            "sys.modules['pillow_heif'] = sys.modules['pillow_jxl'] = None",
            "from lora_rocm.dataset.images.image_plugins import plugin_faults",
            "from lora_rocm.dataset.images.image_io import readable_extensions",
            "assert '.png' in readable_extensions() and not {'.heic', '.jxl'} & readable_extensions()",
            "print(plugin_faults(), 'torch' in sys.modules)",
        )
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    assert done.stdout.strip() == "{'pillow-heif': '', 'pillow-jxl-plugin': ''} False", done.stderr


def sizes() -> Iterator[tuple[int, int]]:
    rng = random.Random(1)
    yield from ((1, 1), (8, 8), (256, 256), (257, 8), (600, 1))
    for _ in range(30):
        height = rng.choice([rng.randint(1, 700), 8 * rng.randint(1, 32)])
        yield (
            rng.choice([rng.randint(1, 700), int(height * rng.choice([1, 6 / 5, 4 / 3, 3 / 2, 16 / 9, 2])) or 1]),
            height,
        )


@pytest.mark.parametrize("how", [{}, {"use_container": True}, {"exif": b"MM\0*\0\0\0\x08\0\0\0\0\0\0"}], ids=str)
def test_the_size_of_jpeg_xl_is_in_its_header(how: dict[str, Any]) -> None:
    for size in sizes():
        file = io.BytesIO(encoded("JXL", size, effort=1, **how))
        assert jxl_size(file) == size and file.tell() == 0
    assert jxl_size(io.BytesIO(b"\x89PNG\r\n\x1a\n")) is None


def test_a_huge_jpeg_xl_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    import pillow_jxl

    bits, count = 0, 0
    for value, width in ((0, 1), (2, 2), (39_999, 18), (1, 3)):  # 40,000 x 40,000: large, and as wide as high
        bits, count = bits | value << count, count + width
    bomb = b"\xff\x0a" + bits.to_bytes(32, "little")
    assert jxl_size(io.BytesIO(bomb)) == (40_000, 40_000)

    def never(*of: Any, **how: Any) -> Any:
        raise AssertionError("it was decoded")

    monkeypatch.setattr(pillow_jxl.JpegXLImagePlugin, "Decoder", never)
    for read in (lambda: read_header(io.BytesIO(bomb)), lambda: decode(bomb)):
        with pytest.raises(UnreadableImage, check=saying("dataset/too-many-pixels")):
            read()
    with pytest.raises(AssertionError):  # control
        decode(encoded("JXL"))
