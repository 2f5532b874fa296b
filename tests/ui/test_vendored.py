"""Files of other projects equal their packages' files, and come with their licences."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = [ROOT / "lora_rocm" / name / "static" for name in ("ui", "page_parts")] + [ROOT / "tests" / "ui"]
TABLE = "vendored.toml"


@pytest.mark.parametrize("folder", [room / "vendored" for room in ROOMS], ids=["page", "single files", "tests"])
def test_every_file_is_listed_with_its_hash_and_licence(folder: Path) -> None:
    rows = tomllib.loads((folder / TABLE).read_text(encoding="utf-8"))["file"]
    listed = {row["name"] for row in rows} | {row["licence_file"] for row in rows} | {TABLE}
    assert {path.name for path in folder.iterdir()} == listed
    for row in rows:
        assert hashlib.sha256((folder / row["name"]).read_bytes()).hexdigest() == row["sha256"], row["name"]
        assert row.keys() == {"name", "package", "version", "licence", "licence_file", "source", "sha256"}
