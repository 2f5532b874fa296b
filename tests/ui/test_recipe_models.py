"""The chooser of a base model without a browser."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.commands import hub_download
from lora_rocm.errors import ModelError, StoppedError
from lora_rocm.processes.hub_jobs import HubOffer, OfferedFile
from lora_rocm.ui.pages import recipe_models
from tests.commands.test_base_candidates import vae, weights
from tests.ui.site import Site, code_of
from tests.ui.test_recipe_part import FILE, RECIPE

REPO = "someone/model"
FILES = (OfferedFile("model.safetensors", 3 << 30, False), OfferedFile("config.json", 10, True))


def offer_of(repo: str, **changes: Any) -> HubOffer:
    given = {"has_terms": False, "may_download": True, "has_token": False, **changes}
    return HubOffer(repo, "c", ("*",), FILES, "a <licence>", "https://example.org", "https://hub/x", **given)


@pytest.fixture(autouse=True)
def home(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user with ComfyUI, and nothing that was read before."""
    found = tmp_path / "a home"
    weights(found / "ComfyUI" / "models" / "checkpoints" / "my <sdxl>.safetensors", "sdxl")
    weights(found / "ComfyUI" / "models" / "checkpoints" / "old.safetensors", "sd15")
    vae(found / "ComfyUI" / "models" / "vae" / "a vae.safetensors")
    monkeypatch.setattr(Path, "home", lambda: found)
    monkeypatch.setenv("HF_HUB_CACHE", str(found / "hub"))
    monkeypatch.setenv("LORA_ROCM_HOME", str(found / "own"))
    recipe_models._seen.cache_clear()
    recipe_models._listing.clear()
    (site.folder / FILE).write_text(RECIPE, encoding="utf-8")
    return found


def test_each_field_of_a_model_has_a_chooser(site: Site) -> None:
    text = site.get("/recipe/edit", file=FILE)
    assert "key=name_or_path&amp;family=sdxl" in text and "key=vae&amp;family=sdxl" in text
    assert "key=training_adapter" not in text and "key=path" not in text
    assert "key=name_or_path&amp;family=" in site.get("/recipe/new")


def test_models_are_shown_with_family_format_and_size(site: Site, home: Path) -> None:
    text = site.get("/recipe/models", key="name_or_path", family="sdxl")
    assert "my &lt;sdxl&gt;.safetensors" in text and "SDXL model" in text and "F16" in text and " B" in text
    assert (
        {"builtin:tiny-sdxl"} < set(re.findall(r'data-pick="([^"]*)"', text))
        and text.count("data-pick") == 2
        and "model-other" in text
        and "1.x" in text
    ), "of another family: said, not hidden"
    assert 'data-unread="0"' in text
    other = site.get("/recipe/models/listed", key="name_or_path", family="sd15", words="old")
    assert other.count("data-pick") == 1 and "my &lt;sdxl" not in other
    listed = site.get("/recipe/models/listed", key="name_or_path", family="sdxl", words="")  # while headers are read
    assert "my &lt;sdxl&gt;.safetensors" in listed
    parts = site.get("/recipe/models", key="vae", family="sdxl")
    assert "a vae.safetensors" in parts and parts.count("data-pick") == 1


def test_another_folder_is_searched(site: Site, tmp_path: Path) -> None:
    folder = weights(tmp_path / "elsewhere" / "third.safetensors", "sdxl").parent
    query = {"key": "name_or_path", "family": "sdxl"}
    answer = site.client.post("/recipe/models/folder", params=query, data={"folder": str(folder)})
    assert "third.safetensors" in answer.text
    assert folder.resolve() in [each.path for each in site.context.folders.named]
    assert folder.resolve() not in site.context.folders.run_folders()
    refused = site.client.post("/recipe/models/folder", params=query, data={"folder": "nowhere"})
    assert code_of(refused.text) == "no-folder"


def test_wrong_requests_are_refused(site: Site) -> None:
    for query in ({"key": "training_adapter", "family": "sdxl"}, {"key": "vae", "family": "nobody"}):
        assert code_of(site.client.get("/recipe/models", params=query).text) == "field-unknown"
    for name in ("download", "download/state"):
        send = site.client.post if name == "download" else site.client.get
        assert code_of(send(f"/recipe/models/{name}", params={"repo": "x/y"}).text) == "work-unknown"


def ended(ask: Callable[[], Any]) -> str:
    for _ in range(200):
        text = str(ask().text)
        if "<progress" not in text:
            return text
        time.sleep(0.02)
    raise AssertionError("it did not end")


def offered(site: Site, repo: str = REPO) -> str:
    site.client.get("/recipe/models/offer", params={"repo": repo})
    return ended(lambda: site.client.get("/recipe/models/offer", params={"repo": repo, "look": 1}))


def test_an_offer_shows_size_and_terms_before_anything_is_fetched(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_download, "offered", offer_of)
    text = offered(site)
    assert "3.0 GiB" in text and "a &lt;licence&gt;" in text and "/recipe/models/download?" in text
    gated = {"has_terms": True, "may_download": False}
    monkeypatch.setattr(hub_download, "offered", lambda repo: offer_of(repo, **gated))
    text = offered(site, "someone/gated")
    assert "HF_TOKEN" in text and "/recipe/models/download?" not in text

    def refused(repo: str) -> HubOffer:
        raise ModelError("hub-unreachable", "The hub cannot be reached.")

    monkeypatch.setattr(hub_download, "offered", refused)
    assert code_of(offered(site, "someone/else")) == "hub-unreachable"


def test_a_download_shows_bytes_and_can_be_cancelled_and_continued(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_download, "offered", offer_of)
    offered(site)
    cancelled: list[bool] = []

    def slow(offer: HubOffer, advance: Callable[[int, int], None]) -> Path:
        try:
            for _ in range(400):
                advance(1 << 30, offer.num_bytes)
                time.sleep(0.02)
        except StoppedError:
            cancelled.append(True)
            raise
        return Path("x")

    monkeypatch.setattr(hub_download, "download_base", slow)
    text = site.client.post("/recipe/models/download", params={"repo": REPO}).text
    assert "1.0 GiB" in text and "3.0 GiB" in text and "<progress" in text
    assert site.client.post("/recipe/models/download/cancel", params={"repo": REPO}).status_code == 204
    state = ended(lambda: site.client.get("/recipe/models/download/state", params={"repo": REPO}))
    assert cancelled and "/recipe/models/download?" in state and "data-pick" not in state
    monkeypatch.setattr(hub_download, "download_base", lambda offer, advance: Path("x"))
    assert f'data-pick="{REPO}"' in site.client.post("/recipe/models/download", params={"repo": REPO}).text
