"""Base models on this machine: found in the folders of programs and the hub's cache, and read by their headers."""

from __future__ import annotations

import json
import shutil
from importlib import resources
from pathlib import Path

import pytest

from lora_rocm.commands import base_candidates
from lora_rocm.commands.base_candidates import Candidates, ModelPlace, SeenBases, base_keys, candidates, model_places
from lora_rocm.families.registry import FAMILIES
from lora_rocm.foundation.safetensors_header import header_bytes

COMMIT = "0123456789012345678901234567890123456789"
NAMES = {
    "sdxl": ("conditioner.embedders.1.x", "model.diffusion_model.input_blocks.0.0.weight"),
    "sd15": ("cond_stage_model.transformer.x", "model.diffusion_model.input_blocks.0.0.weight"),
    "lora": ("lora_unet_down.lora_down.weight", "lora_unet_down.lora_up.weight"),
}


def weights(path: Path, kind: str) -> Path:
    """Write a file with a header of a kind of model."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header_bytes([(name, "F16", (1,)) for name in sorted(NAMES[kind])], {}) + bytes(4))
    return path


def vae(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = [("decoder.conv_in.weight", "F32", (1, 4, 1, 1)), ("decoder.mid.x", "F32", (1,))]
    path.write_bytes(header_bytes(tensors, {}) + bytes(20))
    return path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    models = tmp_path / "ComfyUI" / "models"
    weights(models / "checkpoints" / "größe" / "my sdxl.safetensors", "sdxl")
    weights(models / "checkpoints" / "old.safetensors", "sd15")
    weights(models / "checkpoints" / "style.safetensors", "lora")
    (models / "checkpoints" / "pickled.ckpt").write_bytes(b"x")
    (models / "checkpoints" / "broken.safetensors").write_bytes(b"x")
    (models / "checkpoints" / "preview.png").write_bytes(b"x")
    weights(tmp_path / "webui_forge" / "webui" / "models" / "Stable-diffusion" / "other.safetensors", "sdxl")
    return tmp_path


def found(home: Path, key: str = "name_or_path", family: str = "sdxl", words: str = "") -> Candidates:
    return candidates(places(home), SeenBases(), key, family, words, 60)


def places(home: Path) -> list[ModelPlace]:
    return model_places(home, [], [], home / "hub")


def test_models_of_programs_are_found_with_their_family(home: Path) -> None:
    seen = found(home)
    assert [(each.name, each.fit) for each in seen.found] == [
        ("my sdxl.safetensors", "fits"),
        ("other.safetensors", "fits"),
        ("old.safetensors", "other"),
        ("broken.safetensors", "unusable"),
        ("pickled.ckpt", "unusable"),
    ]
    first, old, broken = seen.found[0], seen.found[2], seen.found[3]
    assert first.seen.families == ("sdxl",) and first.seen.dtypes == ("F16",) and first.place.num_bytes > 100
    assert "1.x" in old.seen.title and broken.seen.problem
    assert (seen.adapters, seen.unread, seen.others) == (1, 0, 0)
    assert {each.fit for each in found(home, family="").found[:3]} == {"fits"}, "no family is chosen yet"
    assert [each.name for each in found(home, words="SDXL größe").found] == ["my sdxl.safetensors"]


def test_models_of_the_hub_and_their_parts_are_found(home: Path) -> None:
    snapshot = home / "hub" / "models--someone--xl" / "snapshots" / COMMIT
    for name in ("unet", "vae", "text_encoder", "text_encoder_2"):
        (snapshot / name).mkdir(parents=True)
        (snapshot / name / "config.json").write_text("{}", encoding="utf-8")
    classes = {name: ["diffusers", "X"] for name in ("unet", "vae", "text_encoder", "text_encoder_2")}
    index = {"_class_name": "StableDiffusionXLPipeline", **classes}
    (snapshot / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    (each,) = [place for place in places(home) if "hub" in str(place.path.relative_to(home))]
    assert each.value == "someone/xl" and each.path == snapshot
    (shown,) = [one for one in found(home).found if one.place.path == snapshot]
    assert shown.fit == "unusable" and shown.seen.problem, "its weights are missing"
    # A file of a VAE is for the key vae of some families
    vae(home / "ComfyUI" / "models" / "vae" / "a.safetensors")
    named = {family: found(home, "vae", family) for family in ("sdxl", "flux")}
    assert [(one.name, one.fit) for one in named["sdxl"].found] == [("a.safetensors", "fits")]
    assert [one.fit for one in named["flux"].found] == ["other"] and named["flux"].others > 0


def test_parts_of_a_whole_model_are_offered(home: Path) -> None:
    seen, tiny_sdxl = SeenBases(), home / "models" / "tiny_sdxl"
    shutil.copytree(Path(str(resources.files("lora_rocm.builtin"))) / "tiny_sdxl", tiny_sdxl)
    whole = model_places(home, [], [tiny_sdxl.parent], home / "hub")
    bases = [
        one for one in candidates(whole, seen, "name_or_path", "sdxl", "", 60).found if one.place.path == tiny_sdxl
    ]
    assert [one.fit for one in bases] == ["fits"] and bases[0].value == str(tiny_sdxl)
    parts = [one.value for one in candidates(whole, seen, "vae", "sdxl", "", 60).found if one.fit == "fits"]
    assert str(tiny_sdxl / "vae") in parts


def test_headers_are_read_once_and_only_as_long_as_there_is_time(home: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept" / "seen.json"
    seen, all_places = SeenBases(kept), places(home)
    none = candidates(all_places, seen, "name_or_path", "sdxl", "", 0)
    assert none.unread == len(all_places) and not none.found
    candidates(all_places, seen, "name_or_path", "sdxl", "", 60)
    seen.save()
    again = SeenBases(kept)
    assert candidates(all_places, again, "name_or_path", "sdxl", "", 0).unread == 0, "kept for the next process"
    # A changed file is read again
    path = next(home.rglob("old.safetensors"))
    path.write_bytes(path.read_bytes() + b"x")
    assert candidates(places(home), again, "name_or_path", "sdxl", "", 0).unread == 1
    kept.write_text("{", encoding="utf-8")
    assert candidates(all_places, SeenBases(kept), "name_or_path", "sdxl", "", 0).unread == len(all_places)


def test_the_number_of_files_is_bounded(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_candidates, "MAX_MODELS", 3)
    assert len(places(home)) == 3
    monkeypatch.undo()
    (home / "circle").mkdir()
    (home / "circle" / "again").symlink_to(home, target_is_directory=True)
    assert len(model_places(home / "nobody", [], [home / "circle"], home / "hub")) == 0, "links are not followed"


def test_every_family_has_its_keys_from_the_schema() -> None:
    keys = {spec.name: base_keys(spec.model_section) for spec in FAMILIES}
    assert all(each[0] == "name_or_path" for each in keys.values())
    assert keys["sdxl"] == ("name_or_path", "vae") and {"text_encoder_2", "tokenizer_2"} <= {*keys["flux"]}
    assert not any("training_adapter" in each for each in keys.values())
