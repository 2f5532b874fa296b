"""Mutated recipes, images and captions through check, scan and prepare: a result or an error of ours, no other."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from lora_rocm.commands.check import check, render
from lora_rocm.commands.output import Failure
from lora_rocm.dataset.sources.sample_image import load_image
from lora_rocm.dataset.sources.scan import geometries, scan
from lora_rocm.encoded_cache.cache import LatentCache
from lora_rocm.encoded_cache.encode_session import Encoding
from lora_rocm.encoded_cache.prepare import prepare
from lora_rocm.errors import DataError, LoraRocmError
from lora_rocm.recipe.kinds import kinds_of
from lora_rocm.recipe.load import load_recipe
from lora_rocm.recipe.schema import DataSection, Recipe
from lora_rocm.recipe.suggest import all_keys
from tests.fake_encoders import FakeFamily
from tests.program import RECIPE, images, run_for_json
from tests.tiny_models import SHALLOW, write_tiny_sdxl

SETTINGS = settings(max_examples=int(os.environ.get("LORA_ROCM_FUZZ", "60")), suppress_health_check=list(HealthCheck))
KINDS = ("PNG", "JPEG", "WEBP", "TIFF", "GIF", "BMP", "QOI", "TGA", "PPM", "ICO", "JPEG2000", "AVIF")
VALUES = (
    *("0", "1", "2", "7", "8", "16", "64", "100", "1000000000", "-1", "1e-30", "0.5", "1.0", "1e300", ".nan", ".inf"),
    *("true", "false", "null", "''", "[]", "{}", "[1]", "[a, b]", "'\\0'", '"\\0"', '"\\ud800"', "🐱", "x" * 5000),
    *(
        "model",
        "model/unet",
        "pics",
        "odd",
        "empty",
        "file",
        "file/below",
        "nowhere",
        "no/where",
        "a/b/c",
        "/",
        "..",
        "[(",
    ),
    *("builtin:tiny-sdxl", "builtin:demo", "builtin:", "..\\..", "C:\\x", "CON", "~", "~nobody/x"),
    *(".txt", "txt", ".png", "trigger", "error", "empty", "filename", "attention", "bf16", "cpu", "gpu", "sdxl", "*"),
    *("[{path: pics}]", "[{path: pics, resolution: 8}, {path: odd}]", "[{dataset: file}]", "[{dataset: pics}]"),
    *("[{path: pics, repeats: 10000, flip_aug: true}]", "[{}]", "[[]]", "{path: pics}", "[0.9, 0.9]", "9" * 30),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("fuzz")
    write_tiny_sdxl(root / "model", **SHALLOW)
    images(root / "pics", count=2)
    images(root / "odd", count=1)
    (root / "odd" / "x.png").write_bytes(b"no")
    (root / "empty").mkdir()
    (root / "file").write_text("x", encoding="utf-8")
    (root / "r.yaml").write_text(RECIPE, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr("lora_rocm.processes.tool.run_for_json", run_for_json)
        patch.setattr(
            "lora_rocm.encoded_cache.encode.empty_pools", lambda: None
        )  # garbage collection takes a third of a second
        yield root


@pytest.fixture(scope="module")
def demo() -> Recipe:
    return load_recipe("demo.yaml").recipe


def encoded(kind: str) -> bytes:
    content = io.BytesIO()
    Image.effect_noise((40, 24), 60).convert("RGB").save(content, kind)
    return content.getvalue()


SOUND = {kind: encoded(kind) for kind in KINDS}


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """An image file with up to five edits: bits, runs of bytes, cuts, insertions, another file's tail."""
    content = bytearray(SOUND[draw(st.sampled_from(KINDS))])
    for _ in range(draw(st.integers(0, 5))):
        at = draw(st.integers(0, len(content)) | st.integers(0, min(64, len(content))))
        match draw(st.sampled_from(["flip", "set", "cut", "drop", "insert", "graft"])):
            case "flip" if at < len(content):
                content[at] ^= 1 << draw(st.integers(0, 7))
            case "set":
                content[at : at + 4] = draw(st.sampled_from([b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff"]))
            case "cut":
                del content[at:]
            case "drop":
                del content[at : at + draw(st.integers(1, 40))]
            case "insert":
                content[at:at] = draw(st.binary(max_size=20))
            case "graft":
                content[at:] = SOUND[draw(st.sampled_from(KINDS))][at:]
    return bytes(content)


EXTENSIONS = st.sampled_from([".png", ".jpg", ".webp", ".tif", ".gif", ".bmp", ".ico", ".jp2", ".avif", ".PNG", ".psd"])
NAMES = st.sampled_from(
    ["a", "10_cat/b", "0_off/c", "99999999_x/d", "%s [x] ü 🐱", " d ", "e.f.g", "sub/sub/h", "i'&;"]
)
CAPTIONS = st.none() | st.binary(max_size=40) | st.text(max_size=40).map(lambda text: text.encode("utf-8", "replace"))


@SETTINGS
@given(
    st.dictionaries(st.tuples(NAMES, EXTENSIONS), st.tuples(damaged(), CAPTIONS), min_size=1, max_size=4),
    st.sampled_from(["filename", "empty", "trigger", "error"]),
    st.booleans(),
)
def test_images_are_used_or_set_aside(
    folder: Path, demo: Recipe, files: dict[tuple[str, str], tuple[bytes, bytes | None]], fallback: str, extra: bool
) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "pics"
        for (stem, extension), (content, caption) in files.items():
            path = root / f"{stem}{extension}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            if caption is not None:
                (path.parent / f"{path.stem}.txt").write_bytes(caption)
        keys = {
            "upscale": extra,
            "shuffle_caption": extra,
            "flip_aug": extra,
            "trigger_word": "zibu" if extra else None,
        }
        data = DataSection(path=str(root), resolution=32, bucket_step=8, caption_fallback=fallback, **keys)
        try:
            found = scan(data)
        except DataError as error:
            assert error.what and (error.where or error.fix)
            return
        cuts, *_ = geometries(found.samples, data)
        recipe = demo.model_copy(update={"data": data})
        sizes = [sample.width * sample.height for sample in found.samples]
        if max(sizes) > 10**6:  # a damaged header that claims a huge image: decoding that is Pillow's own work
            return
        try:
            prepared = prepare(
                recipe,
                FakeFamily(),  # type: ignore[arg-type]
                Encoding(LatentCache(Path(name) / "c"), torch.device("cpu")),
            )
        except DataError as error:
            assert error.code == "no-usable-images"
            return
        used = {sample.key for sample in prepared.samples}
        assert used <= set(cuts) and len(used) + len(prepared.set_aside) >= len(found.samples)
        for sample in prepared.samples:
            assert load_image(sample).mode == "RGB"


LEAVES = sorted(key for key in all_keys(kinds_of({}).recipe) if "." in key)


@SETTINGS
@given(st.lists(st.tuples(st.sampled_from(LEAVES), st.sampled_from(VALUES) | st.text(max_size=12)), max_size=3))
def test_recipes_are_checked_or_explained(folder: Path, changes: list[tuple[str, str]]) -> None:
    overrides = [f"{key}={value}" for key, value in changes]
    try:
        found = check("r.yaml", overrides)
        render(found).encode("utf-8")
        error: object = found.error
    except LoraRocmError as raised:
        error = raised
    if isinstance(error, Failure | LoraRocmError):
        assert error.exit_code in (2, 3) and str(error).strip()
        str(error).encode("utf-8")


def test_the_fuzz_reaches_the_end(folder: Path) -> None:
    """Control: unchanged, everything passes."""
    assert "together" in render(check("r.yaml"))
    data: Any = DataSection(path=str(folder / "pics"), resolution=32, bucket_step=8)
    assert len(scan(data).samples) == 2
