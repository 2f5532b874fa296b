"""Photographs of many shapes, broken files among them, through buckets to a LoRA file."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image

from lora_rocm.rundir.layout import RunDir
from tests.event_lines import read_events
from tests.tiny_models import SHALLOW, write_tiny_sdxl
from tests.train.runs import make_recipe, start

PHOTOGRAPHS = Path(__file__).parents[1] / "photographs"


def test_photographs_train_through_buckets_and_broken_files_are_set_aside(tmp_path: Path) -> None:
    write_tiny_sdxl(tmp_path / "model", **SHALLOW)
    folder = tmp_path / "images"
    folder.mkdir()
    names = [path for path in sorted(PHOTOGRAPHS.iterdir()) if path.suffix in (".png", ".jpg")]
    shapes = set()
    for path in names:
        with Image.open(path) as image:
            shapes.add(image.size)
        (folder / path.name).write_bytes(path.read_bytes())
    assert len(names) >= 6 and len(shapes) >= 4
    whole = (folder / names[0].name).read_bytes()
    (folder / "cut off.png").write_bytes(whole[: len(whole) // 3])
    (folder / "no image.jpg").write_text("not an image", encoding="utf-8")
    train = {"max_train_steps": 4, "gradient_accumulation_steps": 1}
    recipe = make_recipe(tmp_path, data={"bucket_step": 8}, train=train)
    assert start(recipe, tmp_path / "run", device=torch.device("cpu"))
    (event,) = [event for event in read_events(RunDir(tmp_path / "run").events()) if event["type"] == "data"]
    assert sorted(Path(problem["where"]).name for problem in event["set_aside"]) == ["cut off.png", "no image.jpg"]
    assert event["samples"] == len(names) and sum(event["buckets"].values()) == len(names)
    assert len(event["buckets"]) >= 3
    assert RunDir(tmp_path / "run").lora.exists()
