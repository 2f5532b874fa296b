"""Hub ids: cached ones work offline, others are one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lora_rocm.base_models import hub
from lora_rocm.errors import ModelError
from lora_rocm.families.sdxl.family import Sdxl
from tests.tiny_models import tiny_recipe
from tests.wording import says

COMMIT = "0123456789012345678901234567890123456789"
FILE_OF_THE_HUB = "/{repo_id}/resolve/{revision}/{filename}"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def put(cache: Path, repo: str, folder: Path) -> Path:
    """Write the cache files that a finished download leaves."""
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
    assert "model.name_or_path" in caught.value.fix


def test_half_a_download_is_not_taken_for_a_model(cache: Path, tiny_sdxl: Path) -> None:
    snapshot = put(cache, "someone/tiny-sdxl", tiny_sdxl)
    next((snapshot / "unet").glob("*.safetensors")).unlink()
    with pytest.raises(ModelError) as caught:
        _ = Sdxl(tiny_recipe("someone/tiny-sdxl")).source
    assert caught.value.code == "hub-incomplete"


class GatedHub(BaseHTTPRequestHandler):
    """Answers as the hub does without a token: it lists a gated model's files and refuses to send them."""

    def do_GET(self) -> None:
        tree = [{"type": "file", "path": "model_index.json", "size": 2, "oid": COMMIT}]
        info = {"id": "someone/gated", "sha": COMMIT, "siblings": [{"rfilename": "model_index.json"}], "gated": "auto"}
        body = json.dumps(tree if "/tree/" in self.path else info).encode()
        known = "/someone/gated" in self.path
        self.send_response(200 if known else 404)
        self.send_header("X-Error-Code", "" if known else "RepoNotFound")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.send_response(401)
        self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def gated_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = HTTPServer(("127.0.0.1", 0), GatedHub)
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", url)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", url + FILE_OF_THE_HUB)
    Thread(target=server.serve_forever, daemon=True).start()
    yield
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("gated_hub")
def test_a_gated_model_without_a_token_says_where_to_consent_and_how_to_log_in() -> None:
    with pytest.raises(ModelError) as caught:
        _ = Sdxl(tiny_recipe("someone/gated")).source
    assert (caught.value.code, caught.value.where) == ("hub-gated", "model.name_or_path: someone/gated")
    assert "https://huggingface.co/someone/gated" in caught.value.fix and says(
        caught.value.fix, "base_models/hf-auth-login"
    )
    with pytest.raises(ModelError) as caught:
        _ = Sdxl(tiny_recipe("someone/else")).source
    assert caught.value.code == "hub-unknown", "the control"


@given(st.text(max_size=40))
@example("stabilityai/stable-diffusion-xl-base-1.0")
def test_ids_are_told_from_paths(name: str) -> None:
    if hub.resembles_id(name):
        assert name.count("/") == 1
        assert "\\" not in name and ":" not in name and not name.endswith(".safetensors")


def test_examples_of_ids_and_paths() -> None:
    assert hub.resembles_id("stabilityai/stable-diffusion-xl-base-1.0")
    for path in ("models/x.safetensors", "./models", "C:\\models\\x", "a/b/c", "/abs", "~/models", "model"):
        assert not hub.resembles_id(path)
