"""``lora.rank: auto`` is the rank of the file that a run starts from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lora_rocm.errors import RecipeError
from lora_rocm.recipe.load import dump_recipe, load_recipe
from tests.wording import Worded, says, worded

RECIPE = """model: {{name_or_path: "builtin:tiny-sdxl"}}
data: {{path: images}}
train: {{epochs: 1}}
lora:
  rank: auto{more}
"""
KOHYA = {
    "lora_unet_a.lora_down.weight": np.zeros((4, 2)), "lora_unet_a.alpha": np.array(2.0),
    "lora_unet_b.lora_down.weight": np.zeros((6, 2)), "lora_unet_b.alpha": np.array(3.0, dtype=np.float16),
}  # fmt: skip


def written(folder: Path, more: str, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(RECIPE.format(more=f"\n  {more}" if more else ""), encoding="utf-8")
    return path


@pytest.mark.parametrize(("tensors", "rank", "alpha"), [
    (KOHYA, 6, 3.0),
    ({"unet.a.lora_A.weight": np.zeros((5, 2))}, 5, None),
    ({"unet.a.lora.down.weight": np.zeros((5, 2))}, 5, None),
    ({"lora_unet_a.hada_w1_b": np.zeros((3, 2)), "lora_unet_a.alpha": np.array(1.0)}, 3, 1.0),
    ({"lora_unet_a.lokr_w2_b": np.zeros((7, 2)), "lora_unet_a.lokr_w1": np.zeros((9, 2))}, 7, None),
])  # fmt: skip
def test_the_highest_rank_and_alpha_of_the_file_count(
    tmp_path: Path, tensors: dict[str, np.ndarray], rank: int, alpha: float | None
) -> None:
    file = tmp_path / "start.safetensors"
    save_file(tensors, file)
    lora = load_recipe(written(tmp_path, f"init_from: {file}")).recipe.lora
    assert (lora.rank, lora.alpha) == (rank, alpha)
    lora = load_recipe(written(tmp_path, f"init_from: {file}\n  alpha: 9")).recipe.lora
    assert (lora.rank, lora.alpha) == (rank, 9.0)


def test_a_peft_folder_and_what_a_run_keeps(tmp_path: Path) -> None:
    """A run keeps the number, so it resumes without the file."""
    (tmp_path / "p" / "unet").mkdir(parents=True)
    save_file({"base_model.model.a.lora_A.weight": np.zeros((5, 2))}, tmp_path / "p/unet/adapter_model.safetensors")
    recipe = load_recipe(written(tmp_path, f"init_from: {tmp_path / 'p'}")).recipe
    assert recipe.lora.rank == 5
    kept = tmp_path / "kept.yaml"
    kept.write_text(dump_recipe(recipe), encoding="utf-8")
    (tmp_path / "p" / "unet" / "adapter_model.safetensors").unlink()
    assert load_recipe(kept).recipe == recipe


@pytest.mark.parametrize(("more", "words"), [
    ("", worded("recipe/lora-init-from-which-is-not-set")),
    ("init_from: none.safetensors", worded("recipe/none-safetensors-which-cannot-be-read")),
    ("init_from: rotation.safetensors", worded("recipe/rotation-safetensors-whose-modules-have-none")),
    ("init_from: spoiled.safetensors", worded("recipe/spoiled-safetensors-which-cannot-be-read")),
])  # fmt: skip
def test_a_rank_that_cannot_be_found_is_one_problem_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str, words: Worded
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"lora_unet_a.oft_blocks": np.zeros((2, 2, 2))}, "rotation.safetensors")
    Path("spoiled.safetensors").write_bytes(b"no header")
    with pytest.raises(RecipeError) as caught:
        load_recipe(written(tmp_path, more))
    (problem,) = caught.value.problems
    assert says(problem.what, words) and problem.where.endswith(":5 lora.rank") and "number" in problem.fix
