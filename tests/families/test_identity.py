"""A base's identity: every loaded byte, remembered by file versions, never trusted over the bytes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_rocm.base_models import loading
from lora_rocm.base_models.loading import WeightsVersion
from lora_rocm.cache_store import hash_memory
from lora_rocm.cache_store.hash_memory import WEIGHTS_MEMORY, HashMemory
from lora_rocm.errors import StorageError
from lora_rocm.families.sdxl.family import Sdxl
from lora_rocm.model_files.header import read_header
from tests.tiny_models import (
    SHALLOW_WIDER,
    read_json,
    tiny_pipeline,
    tiny_recipe,
    write_config_folder,
    write_single_file,
)

CPU = torch.device("cpu")
VAE = "vae/diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tiny_sdxl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a model; files of this moment are remembered, too."""
    monkeypatch.setattr(hash_memory, "SETTLED_S", -1.0)
    return Path(shutil.copytree(tiny_sdxl, tmp_path / "model"))


def family(folder: Path, **sections: Any) -> Sdxl:
    return Sdxl(tiny_recipe(folder, **sections))


def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read for a digest from now on."""
    seen: list[str] = []
    digest = loading.digest
    monkeypatch.setattr(
        loading,
        "digest",
        lambda headers, wanted: [seen.extend(h.path.name for h in headers), digest(headers, wanted)][1],
    )
    return seen


def alter(path: Path, place: float = 0.9) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 0x40
    path.write_bytes(content)


def fingerprints(folder: Path, **sections: Any) -> list[str]:
    return [encoder.fingerprint for encoder in family(folder, **sections).encoders()]


def test_an_encoder_is_read_once_until_its_file_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = reads(monkeypatch)
    first = fingerprints(folder)
    assert seen == [VAE.rpartition("/")[2], "model.safetensors", "model.safetensors"]
    assert fingerprints(folder) == first and len(seen) == 3
    alter(folder / VAE)
    second = fingerprints(folder)
    assert second[0] != first[0] and second[1] == first[1] and len(seen) == 4


@pytest.mark.parametrize("damage", [
    lambda memory: memory.write_bytes(b"\xff\x00torn" + memory.read_bytes()[40:]),
    lambda memory: memory.write_bytes(memory.read_bytes().replace(b"a", b"b")),
    lambda memory: [memory.unlink(), memory.mkdir()],
    lambda memory: memory.write_bytes(memory.read_bytes()[:-7]),
])  # fmt: skip
def test_a_damaged_memory_costs_a_read_and_no_more(folder: Path, damage: Callable[[Path], Any]) -> None:
    first, memory = fingerprints(folder), folder.parent / "cache" / WEIGHTS_MEMORY
    damage(memory)
    assert fingerprints(folder) == first == fingerprints(folder)


def test_two_writers_of_the_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find nothing, both remember; a third reads nothing."""
    both = [family(folder).encoders()[0] for _ in range(2)]
    for encoder in both:
        encoder._source.memory.begin()  # type: ignore[attr-defined]
    assert both[0].fingerprint == both[1].fingerprint
    seen = reads(monkeypatch)
    assert family(folder).encoders()[0].fingerprint == both[0].fingerprint and not seen


def lying_memory(folder: Path, name: str) -> str:
    """Another digest is remembered for the files of a component as they are now: as if their times had not changed."""
    memory = HashMemory(folder.parent / "cache", WEIGHTS_MEMORY)
    header = read_header(next((folder / name).glob("*.safetensors")))
    memory.remember(WeightsVersion("", (header.version,)), "0" * 64)
    return "0" * 64


@pytest.mark.parametrize("place", [0, 1])
def test_an_encoder_that_is_loaded_is_not_believed_to_be_what_is_remembered(folder: Path, place: int) -> None:
    right = fingerprints(folder)
    lying_memory(folder, ("vae", "text_encoder")[place])
    encoder = family(folder).encoders()[place]
    assert encoder.fingerprint != right[place]
    with pytest.raises(StorageError) as caught:
        encoder.load(cache_door())
    assert caught.value.code == "weights-changed" and ".safetensors" in caught.value.where
    again = family(folder).encoders()[place]
    assert again.fingerprint == right[place]
    assert again.load(cache_door())


def cache_door() -> Any:
    from lora_rocm.encoded_cache.encode_session import plain_placement

    return plain_placement(CPU)


def test_what_is_trained_on_is_named_by_what_was_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory is asked for it, and no file is read a second time."""
    right = family(folder).base_facts()["identity"]
    lying_memory(folder, "unet")
    seen, loaded = reads(monkeypatch), family(folder)
    loaded.load(torch.float32, CPU)
    assert loaded.base_facts()["identity"] == right and not seen


@pytest.mark.parametrize("changed", ["unet", "text_encoder", "text_encoder_2", "scheduler"])
@pytest.mark.parametrize("trains_text", [False, True])
def test_the_identity_is_of_all_that_is_trained_on(folder: Path, changed: str, trains_text: bool) -> None:
    def identity() -> str:
        return family(folder, lora={"train_text_encoder": trains_text}).base_facts()["identity"]

    before = identity()
    if changed == "scheduler":
        path = folder / "scheduler" / "scheduler_config.json"
        path.write_text(path.read_text(encoding="utf-8").replace("0.012", "0.013"), encoding="utf-8")
    else:
        alter(next((folder / changed).glob("*.safetensors")))
    assert (identity() != before) is (trains_text or changed in ("unet", "scheduler"))


def test_two_checkpoints_that_share_a_vae_share_what_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one file each: only the UNets differ, and the components' places in the files."""
    one = write_single_file(tiny_pipeline(), tmp_path / "one.safetensors")
    config = write_config_folder(tiny_pipeline(), tmp_path / "config")
    tensors = load_file(one)
    other = {
        name: tensor + 1 if name.startswith("model.diffusion") else tensor for name, tensor in reversed(tensors.items())
    }
    save_file({"model_ema.x": torch.ones(3), **other}, tmp_path / "two.safetensors")

    def of(file: Path) -> tuple[list[str], str]:
        found = family(file, model={"config": str(config)})
        return [encoder.fingerprint for encoder in found.encoders()], found.base_facts()["identity"]

    (first, base), (second, other_base) = of(one), of(tmp_path / "two.safetensors")
    assert first == second and base != other_base


def test_shards_are_the_same_weights(folder: Path) -> None:
    before = family(folder).base_facts()["identity"]
    shutil.copy(folder / "unet" / "config.json", folder / "config.json")
    shutil.rmtree(folder / "unet")
    tiny_pipeline(**SHALLOW_WIDER).unet.save_pretrained(folder / "unet", max_shard_size="200KB")
    shutil.move(folder / "config.json", folder / "unet" / "config.json")
    assert len(list((folder / "unet").glob("*.safetensors"))) > 2
    assert family(folder).base_facts()["identity"] == before


def test_what_a_step_takes_is_looked_up_without_reading_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = reads(monkeypatch)
    structure = family(folder).structure
    assert not seen and read_json(folder / "unet" / "config.json")["cross_attention_dim"] in (80,)
    assert family(folder, lora={"train_text_encoder": True}).structure != structure
