"""Fuzz targets for user input: recipes, images, captions, weights, LoRAs, and cache entries."""

from __future__ import annotations

import contextlib
import io
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.mutations import changed, damaged, damaged_text, json_bytes
from lora_rocm.recipe.load import load_recipe, shipped_recipes

KINDS = (
    "PNG",
    "JPEG",
    "WEBP",
    "TIFF",
    "GIF",
    "BMP",
    "QOI",
    "TGA",
    "PPM",
    "ICO",
    "JPEG2000",
    "AVIF",
    "MPO",
    "PCX",
    "SGI",
)
MAX_DECODED_PIXELS = 4_000_000
STEERING = ("\x1b", "\x07", "\0", "\x9b", "\r")


class Refused(Exception):
    """The file is unusable; the message has the reason."""


@cache
def _recipes() -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8") for path in shipped_recipes().values())


def recipe_text(rng: random.Random) -> bytes:
    """Return a shipped recipe with damaged lines."""
    return damaged_text(rng, rng.choice(_recipes())).encode("utf-8", "surrogatepass")


def recipe_bytes(rng: random.Random) -> bytes:
    """Return a shipped recipe with damaged bytes."""
    return damaged(rng, rng.choice(_recipes()).encode("utf-8"))


def recipe_tree(rng: random.Random) -> bytes:
    """Return a recipe as JSON (which is YAML) with changed values."""
    tree = {
        "model": {"family": "sdxl", "name_or_path": "builtin:tiny-sdxl"},
        "data": {"sources": [{"path": "pics", "repeats": 2}, {"dataset": "a/b"}], "resolution": 64},
        "lora": {"rank": 4, "targets": [".*to_q"]},
        "optim": {"betas": [0.9, 0.99]},
        "train": {"max_train_steps": 3},
        "sample": {"prompts": ["a"]},
    }
    return json_bytes(rng, changed(rng, tree, 4))


def read_recipe(path: Path) -> None:
    """Read and validate a recipe."""
    load_recipe(path)


@cache
def _images() -> tuple[bytes, ...]:
    from PIL import Image

    found = []
    for kind in KINDS:
        for mode in ("RGB", "L", "P", "RGBA"):
            content = io.BytesIO()
            image = Image.effect_noise((20, 12), 60).convert("RGB").convert(mode)
            exif = Image.Exif()
            exif[0x0112] = 6
            more: dict[str, Any] = {"exif": exif} if kind in ("PNG", "JPEG", "WEBP", "TIFF", "AVIF") else {}
            if kind in ("GIF", "WEBP", "PNG", "TIFF", "MPO"):
                more |= {"save_all": True, "append_images": [image, image]}
            with contextlib.suppress(OSError, ValueError, KeyError):  # not every format supports every mode
                image.save(content, kind, **more)
                found.append(content.getvalue())
    return tuple(found)


def image(rng: random.Random) -> bytes:
    """Return a damaged image of a random format."""
    return damaged(rng, rng.choice(_images()), _images())


def read_image(path: Path) -> None:
    """Read the size from the header, and the pixels unless there are too many."""
    from lora_rocm.dataset.images.image_io import UnreadableImage, decode, read_header

    try:
        width, height = read_header(path).size
        if width * height <= MAX_DECODED_PIXELS:
            assert decode(path.read_bytes()).mode == "RGB"
    except UnreadableImage as error:
        raise Refused(str(error)) from None


def caption(rng: random.Random) -> bytes:
    """Return a damaged caption file."""
    return damaged(rng, rng.choice(("zibu, a red cat, b", "🐱, ü, \u200d", "a, " * 40)).encode("utf-8"))


def read_caption(path: Path) -> None:
    """Read a caption, and make its shuffled variants."""
    from lora_rocm.dataset.captions.captions import as_read, variants
    from lora_rocm.dataset.sources.folders import read_caption
    from lora_rocm.recipe.schema import SourceOptions

    try:
        text = as_read(read_caption(path), SourceOptions())
    except (UnicodeDecodeError, OSError) as error:
        raise Refused(str(error)) from None
    assert not any(letter in text for letter in (*STEERING, "\n"))
    for caption in variants(text, SourceOptions(shuffle_caption=True, trigger_word="zibu"), 4, 1):
        caption.encode("utf-8")


@cache
def _weights() -> bytes:
    import torch
    from safetensors.torch import save

    tensors = {
        "a": torch.arange(12.0).reshape(3, 4),
        "b": torch.zeros(5, dtype=torch.float16),
        "c": torch.zeros(()),
        "d": torch.zeros(0, 3),
        "lora_unet_x.lora_down.weight": torch.zeros(2, 3, dtype=torch.bfloat16),
    }
    return save(tensors, {"format": "pt", "ss_title": "x"})


def rewritten(rng: random.Random, content: bytes) -> bytes:
    """Return a safetensors file with damaged bytes, or with its header changed as JSON (mostly with correct length)."""
    if rng.random() < 0.3:
        return damaged(rng, content)
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    raw = json_bytes(rng, changed(rng, header))
    said = len(raw) if rng.random() < 0.9 else rng.choice((0, 7, 2**31, 2**63, 2**64 - 1, len(raw) + 1))
    return said.to_bytes(8, "little") + raw + content[8 + length :]


def weight_file(rng: random.Random) -> bytes:
    """Return a weight file with a wrong header."""
    return rewritten(rng, _weights())


def read_weights(path: Path) -> None:
    """Read header, tensors and digest."""
    from lora_rocm.base_models.safetensors_file import digest, read_tensors
    from lora_rocm.model_files.header import read_header

    header = read_header(path)
    for name, tensor in read_tensors(header).items():
        assert tuple(tensor.shape) == header.shape(name)
    digest([header])


@cache
def _entry() -> bytes:
    import numpy as np

    from lora_rocm.cache_store.entry_file import METADATA_KEY, fingerprint_of, metadata_text

    data = np.arange(24, dtype="<f4").tobytes()
    facts = metadata_text("image", "0" * 40, {"latent": fingerprint_of(data)})
    header = {
        "__metadata__": {METADATA_KEY: facts},
        "latent": {"dtype": "F32", "shape": [4, 6], "data_offsets": [0, 96]},
    }
    raw = json.dumps(header).encode("ascii")
    return len(raw).to_bytes(8, "little") + raw + data


def cache_entry(rng: random.Random) -> bytes:
    """Return a damaged cache entry; the damage may be inside its metadata."""
    if rng.random() < 0.4:
        content = _entry()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        inner = changed(rng, json.loads(header["__metadata__"]["lora_rocm"]))
        header["__metadata__"]["lora_rocm"] = json_bytes(rng, inner).decode("utf-8", "replace")
        raw = json.dumps(header).encode("ascii")
        return len(raw).to_bytes(8, "little") + raw + content[8 + length :]
    return rewritten(rng, _entry())


def read_entry(path: Path) -> None:
    """Read an entry as ``cache verify`` does."""
    from lora_rocm.cache_store.entry_file import CacheEntryBad, check_bytes, check_place, read_entry

    try:
        header, content = read_entry(path)
        check_place(header, "image", "0" * 40)
        check_bytes(header, content)
    except (CacheEntryBad, OSError) as error:
        raise Refused(str(error)) from None


@cache
def model() -> Any:
    """Return (family, components) of the tiny model, as skeletons: shapes without weights."""
    from lora_rocm.families.base import family_for

    family = family_for(load_recipe("demo.yaml").recipe)
    source = family.source
    return family, {name: source.skeleton(name) for name in ("unet", "text_encoder", "text_encoder_2")}


@cache
def _lora() -> dict[str, bytes]:
    import torch
    from safetensors.torch import save

    name = "mid_block.attentions.0.proj_in"
    weight = dict(model()[1]["unet"].named_modules())[name].weight
    down, up = torch.ones(2, *weight.shape[1:]), torch.ones(weight.shape[0], 2)
    kohya = {
        "lora_unet_mid_block_attentions_0_proj_in.lora_down.weight": down,
        "lora_unet_mid_block_attentions_0_proj_in.lora_up.weight": up,
        "lora_unet_mid_block_attentions_0_proj_in.alpha": torch.tensor(2.0),
    }
    peft = {f"unet.{name}.lora_A.weight": down, f"unet.{name}.lora_B.weight": up}
    facts = {"unet.r": 2, "unet.lora_alpha": 2, "unet.alpha_pattern": {name: 4}, "unet.use_rslora": False}
    old = {f"unet.{name}.lora.down.weight": down, f"unet.{name}.lora.up.weight": up}
    return {
        "kohya": save(kohya, {"ss_title": "<b>x"}),
        "diffusers": save(peft, {"lora_adapter_metadata": json.dumps(facts)}),
        "old": save(old),
    }


def lora_file(rng: random.Random) -> bytes:
    """Return a damaged LoRA in one of three formats."""
    content = rng.choice(tuple(_lora().values()))
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    facts = header.get("__metadata__", {}).get("lora_adapter_metadata")
    if facts and rng.random() < 0.6:
        header["__metadata__"]["lora_adapter_metadata"] = json_bytes(rng, changed(rng, json.loads(facts))).decode(
            "utf-8", "replace"
        )
        raw = json.dumps(header).encode("ascii")
        return len(raw).to_bytes(8, "little") + raw + content[8 + length :]
    if rng.random() < 0.4:  # other names, otherwise sound
        names = [name for name in header if name != "__metadata__"]
        name = rng.choice(names)
        parts = name.split(".")
        parts[rng.randrange(len(parts))] = rng.choice(
            ("lora_A", "weight", "", "lora_mid", "x\x1b[2J", "attn1.to_q_lora")
        )
        header[".".join(parts)] = header.pop(name)
        raw = json.dumps(header).encode("ascii")
        return len(raw).to_bytes(8, "little") + raw + content[8 + length :]
    return rewritten(rng, content)


def read_lora(path: Path) -> None:
    """Read a LoRA for the tiny model."""
    from lora_rocm.adapters.lora_files.lora_reader import components_of, read_lora

    family, components = model()
    components_of(family, path)
    for entry in read_lora(family, components, path).values():
        entry.update()


@cache
def _saved() -> dict[str, bytes]:
    """Return the files of a dataset written by ``save_to_disk``."""
    import tempfile

    import datasets

    datasets.disable_progress_bars()
    image_bytes = _images()[0]
    rows = {"image": [{"bytes": image_bytes, "path": None}, {"bytes": None, "path": "a.png"}], "text": ["a", "b"]}
    with tempfile.TemporaryDirectory() as folder:
        datasets.Dataset.from_dict(rows).save_to_disk(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def dataset(rng: random.Random) -> bytes:
    """Return one damaged file of a dataset, preceded by its name."""
    files = _saved()
    name = rng.choice(tuple(files))
    if name.endswith(".json"):
        return name.encode() + b"\n" + json_bytes(rng, changed(rng, json.loads(files[name])))
    return name.encode() + b"\n" + damaged(rng, files[name])


def read_dataset(path: Path) -> None:
    """Read every caption, and the location of every image."""
    from lora_rocm.dataset.rows import hf_datasets as rows
    from lora_rocm.recipe.schema import DataSection, DataSource

    rows.opened.cache_clear()
    rows._images.cache_clear()
    name, _, content = path.read_bytes().partition(b"\n")
    folder = path.parent / "saved"
    folder.mkdir(exist_ok=True)
    for file, sound in {**_saved(), name.decode(): content}.items():
        (folder / file).write_bytes(sound)
    (source,) = DataSection(sources=(DataSource(dataset=str(folder)),)).resolved_sources()
    for row, caption in rows.rows_of(source):
        assert caption is None or isinstance(caption, str | rows.UnreadableCell)
        try:
            place = rows.image_in(row)
        except rows.UnreadableCell as error:
            assert str(error)
            continue
        assert place is None or isinstance(place, memoryview) or place.name
