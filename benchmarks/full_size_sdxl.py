"""The real command at SDXL's full size, with random weights: it/s, peak memory, shares of the step.

usage: python benchmarks/full_size_sdxl.py ROOT [--steps 100] [--batches 1,4] [--toy] [--json FILE]

Makes a random SDXL from the published configs (no download; 7 GB under ROOT) and 16 images. Then runs ``lora-rocm
train`` from images to exported file for each batch size, and reads the figures from its events. ``--toy`` rehearses on
the CPU with the builtin model.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import ModelMixin
from PIL import Image

from lora_rocm.base_models.loading import ModelLayout
from lora_rocm.base_models.tokenizers import packaged
from lora_rocm.families.sdxl.family import LAYOUT

IMAGES = 16
WARM_UP_STEPS = 10


def make_images(folder: Path, side_px: int, count: int = IMAGES, square: bool = False) -> None:
    """Write blurred noise in three shapes, so that there are several buckets; ``square``: in one."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(7)
    for number in range(count):
        width, height = [
            (side_px, side_px),
            (side_px * 5 // 4, side_px * 4 // 5),
            (side_px * 4 // 5, side_px * 5 // 4),
        ][0 if square else number % 3]
        coarse = Image.fromarray(generator.integers(0, 255, (12, 12, 3), dtype=np.uint8))
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(folder / f"{number:02d}.jpg", quality=92)
        (folder / f"{number:02d}.txt").write_text(f"image number {number}, blurred colours", encoding="utf-8")


def make_model(folder: Path, layout: ModelLayout = LAYOUT, dtype: torch.dtype = torch.float16) -> None:
    """Write random weights with a family's published structure, and the packaged tokenizers."""
    shutil.copytree(layout.configs, folder, dirs_exist_ok=True)
    for name, packed in layout.tokenizers.items():
        shutil.copytree(packaged(packed.packaged), folder / name, dirs_exist_ok=True)
    own = layout.alone[-1:]  # by the class of a part that no other family has, a folder is recognised too
    pipeline = layout.parts[own[0]].cls.__name__ if own else "StableDiffusionXLPipeline"
    (folder / "model_index.json").write_text(json.dumps({"_class_name": pipeline}), encoding="utf-8")
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            for name, part in layout.parts.items():
                if issubclass(part.cls, ModelMixin):
                    made = part.cls.from_config(part.cls.load_config(folder / name))
                else:
                    made = part.cls(part.cls.config_class.from_pretrained(folder / name))
                made.save_pretrained(folder / name)
                del made
    finally:
        torch.set_default_dtype(before)


def run(root: Path, model: str, side_px: int, batch_size: int, steps: int) -> dict[str, Any]:
    """Run the command once; return figures of the steps after the warm-up."""
    run_dir = root / f"run-b{batch_size}"
    shutil.rmtree(run_dir, ignore_errors=True)
    recipe = root / "bench.yaml"
    recipe.write_text(
        f"model: {{name_or_path: '{model}'}}\n"
        f"data: {{path: '{root / 'images'}', resolution: {side_px}, bucket_step: {64 if side_px > 256 else 32}}}\n"
        "lora: {rank: 16, targets: attention}\n"
        f"train: {{max_train_steps: {steps}, batch_size: {batch_size}}}\n"
        f"cache: {{dir: '{root / 'cache'}'}}\noutput: {{save_every_n_steps: {steps}}}\n",
        encoding="utf-8",
    )
    # run the command
    command = [sys.executable, "-m", "lora_rocm", "train", str(recipe), "--run-dir", str(run_dir)]
    started = time.perf_counter()
    subprocess.run(command, check=True)
    wall_s = time.perf_counter() - started
    # read the figures from its events
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    measured = [event for event in events if event["type"] == "step"][WARM_UP_STEPS:]
    total_s = sum(event["step_s"] for event in measured)
    phases = {
        event["phase"]: event["seconds"] for event in events if event["type"] == "phase" and event["state"] == "end"
    }
    exported = [event for event in events if event["type"] == "export"]
    return {
        "batch_size": batch_size,
        "steps": len(measured),
        "it_per_s": len(measured) / total_s,
        "median_step_ms": 1e3 * statistics.median(event["step_s"] for event in measured),
        "peak_memory_GiB": max(event["memory_bytes"] for event in measured) / 2**30,
        **{
            f"{part}_share": sum(event[f"{part}_s"] for event in measured) / total_s
            for part in ("loading", "copy", "check", "wait")
        },
        "checks": measured[-1]["transfer_checks"],
        "failures": measured[-1]["transfer_failures"],
        "phases_s": phases,
        "wall_s": wall_s,
        "export_difference": exported[-1]["max_difference"],
        "lora_bytes": (run_dir / "lora.safetensors").stat().st_size,
    }


def main() -> None:
    """Make the inputs, run, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batches", default="1,4")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.root.mkdir(parents=True, exist_ok=True)
    side_px = 128 if options.toy else 1024
    make_images(options.root / "images", side_px)
    model = "builtin:tiny-sdxl" if options.toy else str(options.root / "model")
    if not options.toy and not (options.root / "model" / "unet").is_dir():
        make_model(options.root / "model")
    rows = [run(options.root, model, side_px, int(size), options.steps) for size in options.batches.split(",")]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"torch {torch.__version__}, {device}")
    for row in rows:
        print(json.dumps(row, indent=1))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
