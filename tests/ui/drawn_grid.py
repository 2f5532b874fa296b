"""A run with a drawn grid of pictures or answers, made without a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from lora_rocm.commands.comparison_grid import Cell, Grid, new_request, open_grid, save_request
from lora_rocm.recipe.load import dump_recipe, load_recipe
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


def with_text_recipe(run_dir: RunDir, folder: Path) -> None:
    """Give a run the recipe of a language model. folder: a place for the file."""
    recipe = folder / "text.yaml"
    recipe.write_text(
        'model: {family: causal-lm, name_or_path: "builtin:tiny-llama"}\n'
        "data: {sources: [{dataset: chats.jsonl}]}\ntrain: {max_train_steps: 1}\n",
        encoding="utf-8",
    )
    run_dir.recipe.write_text(dump_recipe(load_recipe(recipe).recipe), encoding="utf-8")


def made_answers(run_dir: RunDir, prompts: Sequence[str]) -> Sequence[Cell]:
    """Return the places of the answers of a language model's run, all of which differ."""
    _, recipe, _ = open_grid(run_dir.path)
    save_request(run_dir, new_request(run_dir, recipe, prompts, [1.0], len(STEPS)))
    grid = open_grid(run_dir.path)[2]
    assert grid is not None and {cell.path.suffix for cell in grid.cells} == {".txt"}
    for cell in grid.cells:
        cell.path.write_text(f"zibu {cell.updates} {cell.number}", encoding="utf-8")
    return grid.cells
