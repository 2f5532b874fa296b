"""Hub ids: cached ones work offline, others are one sentence."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lora_rocm.base_models import hub
from lora_rocm.errors import ModelError
from lora_rocm.families.sdxl.family import Sdxl
from tests.tiny_models import tiny_recipe

COMMIT = "0123456789012345678901234567890123456789"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def put(cache: Path, repo: str, folder: Path) -> Path:
    """What a finished download leaves in the cache."""
    root = cache / f"models--{repo.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    return Path(shutil.copytree(folder, root / "snapshots" / COMMIT))


def test_a_cached_model_needs_no_network(cache: Path, tiny_sdxl: Path) -> None:
    snapshot = put(cache, "someone/tiny-sdxl", tiny_sdxl)
    source = Sdxl(tiny_recipe("someone/tiny-sdxl")).source
    assert source.folder == snapshot


def test_without_cache_and_network_it_is_a_sentence(cache: Path) -> None:
    with pytest.raises(ModelError) as caught:
        _ = Sdxl(tiny_recipe("someone/tiny-sdxl")).source
    assert caught.value.code == "hub-unreachable"
    assert "folder" in caught.value.fix


def test_half_a_download_is_not_taken_for_a_model(cache: Path, tiny_sdxl: Path) -> None:
    snapshot = put(cache, "someone/tiny-sdxl", tiny_sdxl)
    next((snapshot / "unet").glob("*.safetensors")).unlink()
    with pytest.raises(ModelError) as caught:
        _ = Sdxl(tiny_recipe("someone/tiny-sdxl")).source
    assert caught.value.code == "hub-incomplete"


@given(st.text(max_size=40))
@example("stabilityai/stable-diffusion-xl-base-1.0")
def test_ids_are_told_from_paths(name: str) -> None:
    if hub.looks_like_id(name):
        assert name.count("/") == 1
        assert "\\" not in name and ":" not in name and not name.endswith(".safetensors")


def test_examples_of_ids_and_paths() -> None:
    assert hub.looks_like_id("stabilityai/stable-diffusion-xl-base-1.0")
    for path in ("models/x.safetensors", "./models", "C:\\models\\x", "a/b/c", "/abs", "~/models", "model"):
        assert not hub.looks_like_id(path)
