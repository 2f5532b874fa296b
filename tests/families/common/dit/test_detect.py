"""The name of a base, from the parts of its path that belong to the model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from lora_rocm.families.common.dit.detect import called_otherwise, names_of
from lora_rocm.families.flux.spec import SPEC as FLUX
from lora_rocm.families.z_image.spec import SPEC as Z_IMAGE
from tests.wording import says


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = Path("/home/flux-dev").absolute()
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(folder))
    return folder


@pytest.mark.parametrize(("path", "meant"), [
    ("FLUX.1-schnell/transformer/x.safetensors", "schnell"),
    ("models/flux1-schnell/x.safetensors", "schnell"),
    ("flux1-schnell/diffusers", "schnell"),
    ("models--black-forest-labs--FLUX.1-schnell/snapshots/0a1b", "schnell"),
    ("black-forest-labs/FLUX.1-schnell", "schnell"),
    ("flux-kontext/flux1-schnell.safetensors", "schnell"),
    ("FLUX.1-Kontext-dev/transformer/x.safetensors", "kontext"),
    ("/home/schnell/flux/x.safetensors", ""),  # the controls
    ("schnell/models/x.safetensors", ""),
    ("flux-schnell/a/b/x.safetensors", ""),
    ("models/flux1-dev/x.safetensors", ""),
    ("models/fluxschnelle/x.safetensors", ""),
])  # fmt: skip
def test_a_variant_is_read_from_the_model_s_own_folders(path: str, meant: str) -> None:
    names = ("schnell", "kontext", "dev")
    notices = called_otherwise(SimpleNamespace(name=path), FLUX, "dev", names)  # type: ignore[arg-type]
    assert len(notices) == bool(meant) and all(
        says(notice, "families/is-meant-meant", meant=meant) for notice in notices
    )


def test_the_user_s_home_names_no_model(home: Path) -> None:
    for path in (home / "x.safetensors", home / "models" / "x.safetensors", "~/x.safetensors"):
        assert names_of(str(path), "FLUX.1") == ["x.safetensors"]
    assert names_of(str(home / "flux-dev" / "x.safetensors"), "FLUX.1") == ["x.safetensors", "flux-dev"], "the control"
    assert names_of(str(home), "FLUX.1") == ["flux-dev"]


def test_a_model_s_name_is_found_however_it_is_spelled() -> None:
    for folder in ("Z-Image-Turbo", "z_image_turbo", "ZImageTurbo"):
        assert names_of(f"{folder}/x.safetensors", Z_IMAGE.title) == ["x.safetensors", folder.lower()]
    assert names_of("turbo/x.safetensors", Z_IMAGE.title) == ["x.safetensors"]
