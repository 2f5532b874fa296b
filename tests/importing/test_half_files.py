"""Half a file of SimpleTuner, diffusion-pipe or musubi-tuner gives a recipe or an error with a code."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lora_rocm.errors import UserError
from lora_rocm.importing.importer import import_files
from tests.importing.imported import CONFIGS

NAMES = {
    "simpletuner/sdxl.json": "sdxl.json", "simpletuner/multidatabackend.json": "sdxl.json",
    "simpletuner/kontext.toml": "kontext.toml", "simpletuner/config.env": "config.env",
    "simpletuner/lycoris.json": "config.env", "diffusion-pipe/z-image.toml": "z-image.toml",
    "diffusion-pipe/style-dataset.toml": "z-image.toml", "musubi/kontext.sh": "kontext.sh",
    "musubi/kontext-data.toml": "kontext.sh",
}  # fmt: skip
"""The damaged file, and the main file of its configuration."""


@pytest.mark.parametrize("name", NAMES)
def test_half_a_file(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "configs"
    shutil.copytree((CONFIGS / name).parent, folder)
    whole = (CONFIGS / name).read_text(encoding="utf-8")
    for share in (0.15, 0.5, 0.85):
        (folder / Path(name).name).write_text(whole[: int(share * len(whole))], encoding="utf-8")
        try:
            found = import_files([folder / NAMES[name]])
        except UserError as error:
            assert error.code in ("import-unknown", "import-family")  # noqa: PT017  # several outcomes are right
        else:
            assert found.text
