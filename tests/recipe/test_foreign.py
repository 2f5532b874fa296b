"""Files of other trainers are recognised by their content; recipes never are."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path

import pytest

from lora_rocm.errors import RecipeError
from lora_rocm.recipe import foreign
from lora_rocm.recipe.foreign import recognised, trainer_in
from lora_rocm.recipe.load import MAX_RECIPE_BYTES, dump_recipe, load_recipe, shipped_recipes
from tests.command_line import command_line
from tests.wording import saying, says

KOHYA_TOML = """
pretrained_model_name_or_path = "C:\\models\\base.safetensors"
network_module = "networks.lora"
network_dim = 32
unet_lr = 1.0
optimizer_type = "Prodigy"
max_train_epochs = 10
"""
KOHYA_SECTIONS = (
    "[model_arguments]\nv2 = false\n[training_arguments]\nunet_lr = 1e-4\n[network_arguments]\nnetwork_dim = 8\n"
)
KOHYA_DATASET = """
[general]
enable_bucket = true
[[datasets]]
resolution = 1024
batch_size = 4
  [[datasets.subsets]]
  image_dir = 'C:/images'
  num_repeats = 10
"""
EASY_SCRIPTS = """
[[subsets]]
image_dir = "a"
[general_args.args]
max_train_epochs = 4
[network_args.args]
network_dim = 16
"""
KOHYA_GUI = {"LoRA_type": "Standard", "epoch": 10, "max_resolution": "1024,1024", "train_data_dir": "a", "xformers": ""}
ONE_TRAINER = {
    "__version": 6,
    "training_method": "LORA",
    "model_type": "STABLE_DIFFUSION_XL_10_BASE",
    "base_model_name": "stabilityai/stable-diffusion-xl-base-1.0",
    "concept_file_name": "concepts.json",
    "optimizer": {"optimizer": "ADAMW", "beta1": 0.9},
    "text_encoder": {"train": True},
}
CONCEPTS = [{"path": "a", "image": {"enable_random_flip": True}, "text": {"prompt_source": "sample"}}]
AI_TOOLKIT = """
job: extension
config:
  name: my_first_lora
  process:
    - type: sd_trainer
      network: {type: lora, linear: 16, linear_alpha: 16}
      datasets:
        - folder_path: /images
          resolution: [512, 768]
      train: {steps: 2000, lr: 1e-4, dtype: bf16}
      model: {name_or_path: a/b, is_flux: true}
"""
DIFFUSION_PIPE = """
output_dir = '/out'
dataset = 'dataset.toml'
epochs = 1000
micro_batch_size_per_gpu = 1
pipeline_stages = 1
[model]
type = 'sdxl'
checkpoint_path = '/base.safetensors'
[adapter]
type = 'lora'
rank = 32
[optimizer]
type = 'adamw_optimi'
lr = 2e-5
"""
DIFFUSION_PIPE_DATASET = "resolutions = [512]\n[[directory]]\npath = '/images'\nnum_repeats = 1\n"
SIMPLE_TUNER = {"--model_family": "sdxl", "--data_backend_config": "config/multidatabackend.json", "--lora_rank": 16}
SIMPLE_TUNER_ENV = (
    "export MODEL_FAMILY='sdxl'\nexport DATALOADER_CONFIG=config/multidatabackend.json\nexport LORA_RANK=16\n"
)
SIMPLE_TUNER_DATA = [{"id": "a", "type": "local", "instance_data_dir": "/images", "caption_strategy": "textfile"}]
MUSUBI = 'dit = "wan.safetensors"\nnetwork_module = "networks.lora_wan"\nnetwork_dim = 32\n'
MUSUBI_DATASET = "[general]\nbatch_size = 1\n[[datasets]]\nimage_directory = '/a'\ncache_directory = '/b'\n"
COMMAND_LINE = "accelerate launch sdxl_train_network.py \\\n  --network_dim=32 --train_data_dir=/images\n"

FILES = {
    "kohya.toml": (KOHYA_TOML, "kohya's sd-scripts", "kohya"),
    "kohya.yaml": (KOHYA_TOML, "kohya's sd-scripts", "kohya"),
    "sections.toml": (KOHYA_SECTIONS, "kohya's sd-scripts", "kohya"),
    "dataset.toml": (KOHYA_DATASET, "a dataset file of kohya's sd-scripts", "kohya"),
    "easy.toml": (EASY_SCRIPTS, "a configuration of kohya's sd-scripts", "kohya"),
    "gui.json": (json.dumps(KOHYA_GUI), "kohya's sd-scripts or its GUI", "kohya"),
    "half of a gui.json": (json.dumps(KOHYA_GUI)[:60], "kohya's sd-scripts or its GUI", "kohya"),
    "half of a dataset.toml": (f"{KOHYA_DATASET}\nx = ", "kohya's sd-scripts", "kohya"),
    "one.json": (json.dumps(ONE_TRAINER, indent="\t"), "OneTrainer", "onetrainer"),
    "one.yaml": (json.dumps(ONE_TRAINER), "OneTrainer", "onetrainer"),
    "concepts.json": (json.dumps(CONCEPTS), "the concepts of OneTrainer", "onetrainer"),
    "ai-toolkit.yaml": (AI_TOOLKIT, "ai-toolkit", "ai-toolkit"),
    "pipe.toml": (DIFFUSION_PIPE, "diffusion-pipe", "diffusion-pipe"),
    "pipe-data.toml": (DIFFUSION_PIPE_DATASET, "a dataset file of diffusion-pipe", "diffusion-pipe"),
    "tuner.json": (json.dumps(SIMPLE_TUNER), "SimpleTuner", "simpletuner"),
    "config.env": (SIMPLE_TUNER_ENV, "SimpleTuner", "simpletuner"),
    "new.env": ("export TRAINING_NUM_PROCESSES=1\nexport MIXED_PRECISION=bf16\n", "SimpleTuner", "simpletuner"),
    "multidatabackend.json": (json.dumps(SIMPLE_TUNER_DATA), "a dataset file of SimpleTuner", "simpletuner"),
    "musubi.toml": (MUSUBI, "musubi-tuner", "musubi"),
    "musubi-data.toml": (MUSUBI_DATASET, "a dataset file of musubi-tuner", "musubi"),
    "train.sh": (COMMAND_LINE, "a command line of kohya's sd-scripts", "kohya"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_trainer_is_one_problem_with_the_command_that_imports_it(name: str, tmp_path: Path) -> None:
    text, whose, trainer = FILES[name]
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    (problem,) = caught.value.problems
    assert problem.where == str(path) and whose in problem.what and trainer_in(text) == trainer
    command = problem.fix.partition("lora-rocm import ")[2]
    assert shlex.split(command)[:2] == [str(path), "--output"]


def test_a_file_that_cannot_be_imported_names_a_recipe_to_start_from(tmp_path: Path) -> None:
    text = "accelerate launch train_nothing_here.py --x 1\n"
    table = foreign._table()
    assert all(row.trainer for row in table.trainer) and {row.trainer for row in table.trainer} >= {"kohya"}
    assert trainer_in(text) is None and trainer_in("model: {}\nlora: {}\n") is None
    for script in (script for script in table.script if not script.trainer):
        found = recognised(f"python {script.text}.py --rank=4\n", "x.sh", None)
        assert found is not None and says(found.fix, "recipe/start-from-recipes-start-yaml", start="sdxl")


@pytest.mark.parametrize("command", ["train", "check", "plan", "env"])
def test_each_command_says_so(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("god.toml").write_text(KOHYA_TOML, encoding="utf-8")
    found = command_line(command, "god.toml")
    assert found.exit_code == 2 and says(found.stderr, "recipe/god-toml-this-is-a-configuration-of")
    assert "1 problem." in found.stderr and [path.name for path in tmp_path.iterdir()] == ["god.toml"]


def test_it_is_said_of_a_base_too(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(KOHYA_TOML, encoding="utf-8")
    (tmp_path / "r.yaml").write_text("base: base.toml\nlora: {rank: 4}\n", encoding="utf-8")
    with pytest.raises(RecipeError, match="kohya") as caught:
        load_recipe(tmp_path / "r.yaml")
    assert caught.value.problems[0].where.startswith(f"{tmp_path / 'r.yaml'}:1 base: ")


MINIMAL = "model: {name_or_path: builtin:tiny-sdxl}\ndata: {path: pics}\ntrain: {max_train_steps: 10}\n"


@pytest.mark.parametrize(
    "extra", ["", "network_dim: 4\n", "config: {process: 3}\n", "output: {save_every_n_hours: 1}\n"]
)
def test_a_recipe_with_a_wrong_key_is_a_recipe_with_a_wrong_key(extra: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(MINIMAL + extra, encoding="utf-8")
    if not extra:
        assert load_recipe(path)
        return
    with pytest.raises(RecipeError, check=saying("recipe/there-is-no-such-key")):
        load_recipe(path)


@pytest.mark.parametrize("path", shipped_recipes().values(), ids=lambda path: path.name)
def test_recipes_are_recipes(path: Path, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(dump_recipe(load_recipe(path).recipe), encoding="utf-8")
    assert load_recipe(tmp_path / "r.yaml").recipe == load_recipe(path).recipe


@pytest.mark.parametrize(
    "text", ["", "- 1\n", "text", "a = 1\n", "x: 3\n", "PATH=/bin\n", '{"name": "package", "version": 1}']
)
def test_what_nobody_knows_is_nobody_s(text: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert "lora-rocm import" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 60_000,
        '{"a":' * 40_000,
        ".".join("a" * 120_000) + " = 1",
        "a = " + "[" * 100_000,
        "a = " + "9" * 200_000,
        "\n".join(f"[a.b{number}]" for number in range(20_000)),
        "[[a]]\n" * 40_000,
        "a" * 200_000 + "=",
        "\n" * 200_000,
        "export " * 30_000,
    ],
    ids=range(10),
)
def test_hostile_text_is_looked_through_in_time(text: str, tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(text, encoding="utf-8")
    assert len(text) <= MAX_RECIPE_BYTES
    started = time.process_time()
    with pytest.raises(RecipeError):
        load_recipe(path)
    assert time.process_time() - started < 20
