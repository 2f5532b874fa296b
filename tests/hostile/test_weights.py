"""Weight files with false headers: every reader refuses them in one sentence, before it takes any memory."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.utils.other import get_pattern_key
from safetensors.torch import save_file

from lora_rocm.adapters.lora_files.lora_reader import components_of, read_lora
from lora_rocm.base_models.loading import builtin_folder, resolve
from lora_rocm.base_models.safetensors_file import digest, read_tensors
from lora_rocm.cache_store.entry_file import CacheEntryBad, check_bytes, read_entry
from lora_rocm.errors import AdapterError, LoraRocmError, ModelError
from lora_rocm.families.base import family_for
from lora_rocm.families.common.unet import detect
from lora_rocm.families.registry import FAMILIES
from lora_rocm.families.sdxl.family import EXPECTED, Sdxl
from lora_rocm.families.sdxl.spec import SdxlSection
from lora_rocm.model_files import adapter_contents
from lora_rocm.model_files.component_folder import indexed
from lora_rocm.model_files.header import read_header
from lora_rocm.recipe.load import load_recipe
from tests.hostile import attacks
from tests.tiny_models import without_base
from tests.wording import Worded, saying, says, worded

MAX_BYTES = 64 << 20
NAME = "mid_block.attentions.0.proj_in"


@pytest.fixture(scope="module")
def model() -> tuple[Any, dict[str, Any]]:
    family = family_for(load_recipe("demo.yaml").recipe)
    return family, {"unet": family.source.skeleton("unet")}


def as_base(path: Path) -> None:
    read_tensors(read_header(path))


def as_cache_entry(path: Path) -> None:
    try:
        check_bytes(*read_entry(path))
    except CacheEntryBad as error:
        raise ModelError("cache", str(error)) from error


def bounded(read: Callable[[Path], None], path: Path) -> str:
    """The text of the refusal; it takes little memory and time."""
    began = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(LoraRocmError) as caught:
            read(path)
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < 5
    return str(caught.value)


SDXL = without_base(Sdxl)


def as_adapter(path: Path) -> None:
    components_of(SDXL, path)


@pytest.mark.parametrize("name", attacks.LYING_WEIGHTS)
@pytest.mark.parametrize("read", [as_base, as_adapter, as_cache_entry])
def test_headers_that_lie(tmp_path: Path, read: Callable[[Path], None], name: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(attacks.LYING_WEIGHTS[name])
    said = bounded(read, path)
    assert any(words in said for words in ("damaged", "bytes, not", "metadata")) or says(
        said, "hostile/format-that-is-not-read"
    )


def test_a_sound_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    metadata = {"__metadata__": {"a": "b"}}
    path.write_bytes(
        attacks.safetensors({**metadata, "a": attacks.tensor(0, 8, [2, 1]), "b": attacks.tensor(8, 8, [0])}, bytes(8))
    )
    assert {name: tuple(tensor.shape) for name, tensor in read_tensors(read_header(path)).items()} == {
        "a": (2, 1),
        "b": (0,),
    }
    assert digest([read_header(path)])


def test_headers_of_millions_of_tensors(tmp_path: Path) -> None:
    """17 MiB of header; the largest that is read takes its time, but no gigabytes."""
    path = tmp_path / "x.safetensors"
    one = '"%07d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    path.write_bytes(attacks.safetensors(("{" + ",".join(one % n for n in range(320_000)) + "}").encode()))
    assert says(bounded(as_base, path), "hostile/ends-inside-its-header")
    path.write_bytes(attacks.safetensors(("{" + ",".join(one % n for n in range(1000)) + "}").encode()))
    assert len(read_header(path).tensors) == 1000


def test_a_pipe_is_no_weight_file(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, check=saying("hostile/no-plain-file")):
        read_header(Path("/dev/zero") if Path("/dev/zero").exists() else tmp_path, AdapterError)


def with_metadata(folder: Path, config: str, width: int = 32) -> Path:
    """A LoRA of one layer of the model, with rank and alpha in its metadata."""
    weights = {f"unet.{NAME}.lora_A.weight": torch.ones(2, width), f"unet.{NAME}.lora_B.weight": torch.ones(width, 2)}
    save_file(weights, folder / "x.safetensors", {"lora_adapter_metadata": config})
    return folder / "x.safetensors"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("[" * 100_000, worded("hostile/not-a-json-object")),
        (json.dumps({"unet.lora_alpha": 10**400}), worded("hostile/cannot-be-understood")),
        ('{"unet.lora_alpha": 1e999}', worded("hostile/strength")),
        (json.dumps({"unet.lora_alpha": {"a": 1}}), worded("hostile/strength")),
        (json.dumps({"unet.alpha_pattern": {"(([a-z_.0-9]+)+)+X": 1}}), worded("hostile/no-name-of-a-module")),
        (json.dumps({"unet.alpha_pattern": {".*.*.*.*.*X": 1}}), worded("hostile/no-name-of-a-module")),
        (json.dumps({"unet.alpha_pattern": {"(": 1}}), worded("hostile/no-name-of-a-module")),
        (json.dumps({"unet.alpha_pattern": {attacks.STEERING: 1}}), worded("hostile/no-name-of-a-module")),
    ],
)
def test_metadata_of_a_lora(model: tuple[Any, Any], tmp_path: Path, config: str, words: Worded) -> None:
    family, components = model
    path = with_metadata(tmp_path, config)
    said = bounded(lambda path: read_lora(family, components, path), path)
    assert says(said, words) and "\x1b" not in said


@pytest.mark.parametrize(
    "pattern", [NAME, r"mid_block\.attentions\.0\.proj_in", "^mid_block.*proj_in$", "proj_in", "x"]
)
def test_the_patterns_that_peft_writes_mean_what_they_mean_to_it(
    model: tuple[Any, Any], tmp_path: Path, pattern: str
) -> None:
    family, components = model
    config = {"unet.lora_alpha": 4, "unet.alpha_pattern": {pattern: 8}}
    width = components["unet"].get_submodule(NAME).weight.shape[0]
    (entry,) = read_lora(family, components, with_metadata(tmp_path, json.dumps(config), width)).values()
    theirs = {pattern: 8}.get(get_pattern_key([pattern], NAME), 4)
    assert entry.scale == theirs / 2
    assert adapter_contents._matches(pattern, NAME) == (theirs == 8)


def test_pickles_are_not_opened(model: tuple[Any, Any], tmp_path: Path) -> None:
    family, components = model
    for suffix in (".ckpt", ".pt", ".bin", ".pth", ".safetensors"):
        path = tmp_path / f"x{suffix}"
        path.write_bytes(attacks.pickled(tmp_path))
        with pytest.raises(AdapterError):
            read_lora(family, components, path)
        with pytest.raises(ModelError):
            read_header(resolve(SdxlSection(name_or_path=str(path)), family.source.layout).single_file or path)
    assert not (tmp_path / attacks.MARK).exists()
    exec(compile(attacks.payload(tmp_path), "control", "exec"))  # control: run, it does leave a trace
    assert (tmp_path / attacks.MARK).exists()


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "..", "", "a/b", "a\\b", "C:x", 3, None, ["a"]])
def test_an_index_names_only_files_beside_it(tmp_path: Path, name: object) -> None:
    with pytest.raises(ModelError, check=saying("hostile/files-beside-it")):
        indexed({"weight_map": {"a": "good.safetensors", "b": name}}, tmp_path / "index.json")
    assert indexed({"weight_map": {"a": "good.safetensors"}}, tmp_path) == ["good.safetensors"]


@pytest.mark.parametrize(
    "index", [{"text_encoder": True}, {"text_encoder": []}, {"text_encoder": 3, "text_encoder_2": "x"}]
)
def test_an_index_of_a_pipeline_of_another_kind(tmp_path: Path, index: dict[str, Any]) -> None:
    folder = Path(shutil.copytree(builtin_folder("builtin:tiny-sdxl"), tmp_path / "model"))
    found = json.loads((folder / "model_index.json").read_bytes())
    (folder / "model_index.json").write_text(json.dumps({**found, **index}), encoding="utf-8")
    layout = family_for(load_recipe("demo.yaml").recipe).source.layout
    with contextlib.suppress(ModelError):
        detect.check(resolve(SdxlSection(name_or_path=str(folder)), layout), EXPECTED, FAMILIES)
    (folder / "model_index.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(ModelError, match="nested"):
        detect.check(resolve(SdxlSection(name_or_path=str(folder)), layout), EXPECTED, FAMILIES)
