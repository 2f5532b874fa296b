"""A run with a drawn grid of pictures, made without a model."""

from __future__ import annotations

from PIL import Image

from lora_rocm.commands.comparison_grid import Grid, new_request, open_grid, save_request
from lora_rocm.rundir.layout import RunDir
from tests.supervisor.fake_run import safetensors_bytes

STEPS = (10, 20, 40)
STRENGTHS = (0.8, 1.0)
PROMPT = "a <b>zibu</b> & größe"


def with_files(run_dir: RunDir) -> RunDir:
    """Give a run the LoRA files of STEPS."""
    for step in STEPS:
        run_dir.checkpoint_lora(step).write_bytes(safetensors_bytes(1000 + step))
    return run_dir


def with_grid(run_dir: RunDir) -> Grid:
    """Give a run a drawn grid of STEPS and STRENGTHS with one prompt. The red of a picture is its step."""
    _, recipe, _ = open_grid(with_files(run_dir).path)
    request = new_request(run_dir, recipe, [PROMPT], STRENGTHS, len(STEPS))
    save_request(run_dir, request)
    grid = open_grid(run_dir.path)[2]
    assert grid is not None
    for cell in grid.cells:
        Image.new("RGB", (64, 64), (cell.updates * 6, 90, int(cell.strength * 200))).save(cell.path)
    return grid
