"""The tiny Z-Image of the package: small, recognised by its files, whole, and able to learn the demo's creature."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lora_rocm.base_models.loading import builtin_folder
from lora_rocm.families.base import family_for
from lora_rocm.families.common.detect import evidence
from lora_rocm.families.z_image.family import ZImage
from lora_rocm.recipe.load import load_recipe
from lora_rocm.rundir.layout import RunDir
from tests.event_lines import read_events

NAME = "builtin:tiny-z-image"
MAX_BYTES = 8_000_000


def test_it_is_small_and_known_by_its_files() -> None:
    files = [path for path in builtin_folder(NAME).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MAX_BYTES
    assert evidence(NAME, Path("none")).base == ("z-image",)


def test_it_loads_as_its_family() -> None:
    family = family_for(load_recipe("demo-z-image.yaml").recipe)
    assert isinstance(family, ZImage) and family.check(family.source) == ()
    for name in family.layout.parts:
        component = family.source.load(name, torch.float32, torch.device("cpu"))
        assert all(bool(weight.isfinite().all()) for weight in component.parameters())
    assert family.token_limits()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_learns_the_creature_of_the_demo(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("lora-rocm")), "demo", "--family", "z-image"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=1700)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    (found,) = read_events(RunDir(run).events(), "concept")
    assert found["score"] >= 0.9 and found["score"] - found["control"] >= 0.3
