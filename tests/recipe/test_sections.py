"""Keys of the objective that cannot be combined are refused at their place; others are accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_rocm.errors import Problem, RecipeError
from lora_rocm.recipe.load import dump_recipe, load_recipe
from tests.wording import Worded, mentions, says, worded

RECIPE = """\
model:
  family: {family}
  name_or_path: some/base
data:
  path: pics
train:
  max_train_steps: 10
objective:
"""


def only_problem(path: Path, text: str) -> Problem:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(path))
    (problem,) = caught.value.problems
    return problem


def load(folder: Path, keys: str, family: str = "sdxl") -> None:
    path = folder / "r.yaml"
    path.write_text(RECIPE.format(family=family) + "".join(f"  {key}\n" for key in keys.split("; ")), encoding="utf-8")
    loaded = load_recipe(str(path)).recipe
    path.write_text(dump_recipe(loaded), encoding="utf-8")
    assert load_recipe(str(path)).recipe == loaded, "a recipe that is written down whole is read again"


REFUSED = [
    ("loss_type: hubber", ":9 objective.loss_type", "expected one of l2, l1, huber, smooth_l1", "Did you mean huber?"),
    ("loss_type: mse", ":9 objective.loss_type", "expected one of", "Write l2."),
    ("huber_c: 0.2", ":9 objective.huber_c", "has no effect with loss_type: l2", "set loss_type: huber"),
    (
        "loss_type: huber; huber_scale: 2",
        ":10 objective.huber_scale",
        "no effect with huber_schedule: snr",
        "huber_schedule: constant",
    ),
    ("min_timestep: 500; max_timestep: 500", ":10 objective.max_timestep", "is not below", "Lower min_timestep"),
    ("min_timestep: -1", ":9 objective.min_timestep", "at least 0", "Lowest noise"),
    ("adaptive_noise_scale: 1", ":9 objective.adaptive_noise_scale", "without noise_offset", "set noise_offset"),
    ("multires_noise_discount: 0.5", ":9 objective.multires_noise_discount", "no effect without", "iterations"),
    ("ip_noise_gamma: -0.1", ":9 objective.ip_noise_gamma", "at least 0", "Input perturbation"),
    ("timestep_sampling: uniform; logit_mean: 1", ":10 objective.logit_mean", "no effect", "logit-normal"),
]


@pytest.mark.parametrize("family", ["sdxl", "flux"])
@pytest.mark.parametrize(("keys", "where", "what", "fix"), REFUSED)
def test_refused_in_every_family(tmp_path: Path, keys: str, where: str, what: str, fix: str, family: str) -> None:
    refused(tmp_path, keys, where, what, fix, family)


def test_refused_of_diffusion(tmp_path: Path) -> None:
    both, where = "min_snr_gamma: 5; soft_min_snr_gamma: 4", ":10 objective.soft_min_snr_gamma"
    refused(tmp_path, both, where, "only one of", "Remove one")
    refused(tmp_path, "debiased_estimation_loss: true", ":9 objective.debiased", "no such key", "sdxl", "flux")


def refused(folder: Path, keys: str, where: str, what: str, fix: str, family: str = "sdxl") -> None:
    with pytest.raises(RecipeError) as caught:
        load(folder, keys, family)
    (problem,) = caught.value.problems
    assert where in problem.where and what in problem.what and fix in problem.fix, problem


@pytest.mark.parametrize("family", ["sdxl", "flux"])
@pytest.mark.parametrize(
    "keys",
    [
        "loss_type: huber; huber_schedule: constant; huber_c: 0.2; huber_scale: 2",
        "loss_type: smooth_l1; huber_c: 0.2",
        "min_timestep: 1; max_timestep: 2",
        "noise_offset: 0.1; adaptive_noise_scale: -0.5; multires_noise_iterations: 6; multires_noise_discount: 0.5",
        "timestep_sampling: logit-normal; logit_mean: 1",
        "loss_type: l2; huber_c: 0.1; huber_schedule: snr",
    ],
)
def test_accepted(tmp_path: Path, keys: str, family: str) -> None:
    load(tmp_path, keys, family)


UNITS = """\
model: {name_or_path: some/base}
data: {path: pics, validation_split: 0.1}
"""


def test_steps_may_be_given_as_epochs(tmp_path: Path) -> None:
    path, keys = tmp_path / "r.yaml", "every_n_epochs: 3"
    path.write_text(
        UNITS + f"train: {{epochs: 5, validation_{keys}}}\nsample: {{prompts: [a], {keys}}}\noutput: {{save_{keys}}}\n",
        encoding="utf-8",
    )
    recipe = load_recipe(str(path)).recipe
    train, sample, output = recipe.train, recipe.sample, recipe.output
    assert (train.num_steps(7), train.validation_steps(7), sample.round_steps(7), output.save_steps(7)) == (
        35,
        *[21] * 3,
    )


@pytest.mark.parametrize(("given", "steps"), [("", 500), ("save_every_n_steps: 9", 9), ("save_every_minutes: 5", 0)])
def test_checkpoints_come_every_500_steps_unless_a_unit_is_given(tmp_path: Path, given: str, steps: int) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(UNITS + f"train: {{epochs: 5}}\noutput: {{{given}}}\n", encoding="utf-8")
    assert load_recipe(str(path)).recipe.output.save_steps(7) == steps


@pytest.mark.parametrize(
    "sections",
    [
        "train: {epochs: 1, validation_every_n_steps: 2,\n  validation_every_n_epochs: 2}\n",
        "train: {epochs: 1}\nsample: {prompts: [a], every_n_steps: 2,\n  every_n_epochs: 2}\n",
        "train: {epochs: 1}\noutput: {save_every_n_steps: 2,\n  save_every_n_epochs: 2}\n",
        "train: {epochs: 1}\noptim: {lr_warmup_steps: 2,\n  lr_warmup_ratio: 0.2}\n",
    ],
)
def test_two_units_at_once_are_refused(tmp_path: Path, sections: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(UNITS + sections, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(path))
    (problem,) = caught.value.problems
    assert (
        "only one of" in problem.what and says(problem.fix, "recipe/remove-one-of-them") and f"{path}:" in problem.where
    )


MASKS = """\
model: {name_or_path: some/base}
train: {max_train_steps: 10}
data:
"""


@pytest.mark.parametrize(
    ("data", "where", "what"),
    [
        ("  sources:\n  - {path: a, is_reg: true}\n", ":5 data.sources[0].is_reg", worded("recipe/nothing-to-learn")),
        (
            "  path: a\n  prior_loss_weight: 0.5\n",
            ":5 data.prior_loss_weight",
            worded("recipe/without-regularisation-images"),
        ),
        ("  path: a\n  is_reg: true\n", ":5 data.is_reg", worded("recipe/no-such-key")),
    ],
)
def test_regularisation_images_need_others(tmp_path: Path, data: str, where: str, what: Worded) -> None:
    path = tmp_path / "r.yaml"
    problem = only_problem(path, MASKS + data)
    assert where in problem.where and says(problem.what, what) and problem.fix
    path.write_text(
        MASKS + "  prior_loss_weight: 0.5\n  sources: [{path: a}, {path: b, is_reg: true}]\n", encoding="utf-8"
    )
    assert [source.weight for source in load_recipe(str(path)).recipe.data.resolved_sources()] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("entry", "key", "what"),
    [
        ("class_prompt: a cat", "class_prompt", worded("recipe/are-regularisation-images")),
        ("class_prompt: a cat, is_reg: true, path: b", "path", worded("recipe/no-effect-beside-class-prompt")),
        (
            "class_prompt: a cat, is_reg: true, trigger_word: zibu",
            "trigger_word",
            worded("recipe/no-effect-beside-class-prompt"),
        ),
        (
            "path: b, is_reg: true, num_class_images: 7",
            "num_class_images",
            worded("recipe/no-effect-without-class-prompt"),
        ),
        ("class_prompt: a cat, is_reg: true, num_class_images: 0", "num_class_images", worded("recipe/greater-than-0")),
    ],
)
def test_class_images(tmp_path: Path, entry: str, key: str, what: Worded) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(MASKS + f"  sources: [{{path: a}}, {{{entry}}}]\n", encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(path))
    (problem,) = caught.value.problems
    assert f":4 data.sources[1].{key}" in problem.where and says(problem.what, what) and problem.fix


@pytest.mark.parametrize(
    ("data", "key", "what"),
    [
        ("sources: [{dataset: a/b, include: [x]}]", "sources[0].include", worded("recipe/no-effect-on-a-dataset")),
        (
            "sources: [{path: a}, {dataset: a/b, exclude: [x]}]",
            "sources[1].exclude",
            worded("recipe/no-effect-on-a-dataset"),
        ),
        (
            "sources: [{dataset: a/b, recursive: false}]",
            "sources[0].recursive",
            worded("recipe/no-effect-on-a-dataset"),
        ),
        (
            "sources: [{dataset: a/b, caption_extension: .md}]",
            "sources[0].caption_extension",
            worded("recipe/no-effect-on-a-dataset"),
        ),
        ("{sources: [{dataset: a/b}], include: [x]}", "include", worded("recipe/no-effect-without-a-folder")),
        (
            "{sources: [{dataset: a/b}], caption_extension: .md}",
            "caption_extension",
            worded("recipe/no-effect-without-a-folder"),
        ),
        ("sources: [{path: a, split: test}]", "sources[0].split", worded("recipe/no-effect-on-a-folder")),
        (
            "sources: [{path: a, image_column: photo}]",
            "sources[0].image_column",
            worded("recipe/no-effect-on-a-folder"),
        ),
        ("{path: a, watched: {path: b, split: test}}", "watched.split", worded("recipe/no-effect-on-a-folder")),
    ],
)
def test_keys_of_folders_and_of_datasets(tmp_path: Path, data: str, key: str, what: Worded) -> None:
    path = tmp_path / "r.yaml"
    head = MASKS.replace("10}", "10, validation_every_n_steps: 5}") if "watched" in data else MASKS
    problem = only_problem(path, head + f"  {data}\n")
    assert problem.where.endswith(f":4 data.{key}") and says(problem.what, what) and problem.fix
    both = "{sources: [{path: a, recursive: false}, {dataset: a/b, split: test, image_column: photo}], include: [x]}"
    path.write_text(MASKS + f"  {both}\n", encoding="utf-8")
    assert load_recipe(str(path)).recipe.data.include == ("x",)


@pytest.mark.parametrize(
    ("data", "key", "what"),
    [
        ("{path: a, caption_extension: []}", "caption_extension", "too few values"),
        ("{path: a, caption_extension: [.txt, .tags.txt, TXT]}", "caption_extension", "has .txt twice"),
        ("{path: a, caption_extension: [.txt, 3]}", "caption_extension[1]", "expected text"),
        ("{path: a, caption_extension: [.txt, '']}", "caption_extension[1]", "is empty"),
        ("sources: [{path: a, caption_extension: [_1.txt, _1.txt]}]", "sources[0].caption_extension", "_1.txt twice"),
    ],
)
def test_lists_of_caption_extensions(tmp_path: Path, data: str, key: str, what: str) -> None:
    path = tmp_path / "r.yaml"
    head = MASKS.replace("10}", "10, validation_every_n_steps: 5}") if "watched" in data else MASKS
    problem = only_problem(path, head + f"  {data}\n")
    assert problem.where.endswith(f":4 data.{key}") and what in problem.what and problem.fix
    both = "{caption_extension: [.txt, .tags.txt], sources: [{path: a}, {path: b, caption_extension: .md}]}"
    path.write_text(MASKS + f"  {both}\n", encoding="utf-8")
    found = [source.caption_extension for source in load_recipe(str(path)).recipe.data.resolved_sources()]
    assert found == [(".txt", ".tags.txt"), ".md"], "one extension stays the text that it is"


def test_a_source_has_no_larger_batches(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    text = MASKS.replace("10}", "10, batch_size: 4}") + "  sources: [{path: a}, {path: b, max_batch_size: 5}]\n"
    problem = only_problem(path, text)
    assert (
        ":4 data.sources[1].max_batch_size" in problem.where and says(problem.what, "recipe/which-is-4") and problem.fix
    )
    path.write_text(text.replace("batch_size: 5", "batch_size: 4"), encoding="utf-8")
    assert load_recipe(str(path)).recipe.data.sources[1].max_batch_size == 4


def test_a_weight_is_above_0(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    for data in ("  path: a\n  loss_weight: -1\n", "  sources:\n  - {path: a, loss_weight: 0}\n"):
        path.write_text(MASKS + data, encoding="utf-8")
        with pytest.raises(RecipeError) as caught:
            load_recipe(str(path))
        (problem,) = caught.value.problems
        assert ":5 " in problem.where and "loss_weight" in problem.where and says(problem.what, "recipe/greater-than-0")


@pytest.mark.parametrize(
    ("data", "where"),
    [
        ("  path: pics\n  unmasked_weight: 0.1\n", ":5 data.unmasked_weight"),
        ("  path: pics\n  normalize_masked_area_loss: false\n", ":5 data.normalize_masked_area_loss"),
        ("  sources:\n  - {path: a, unmasked_weight: 0.1}\n", ":5 data.sources[0].unmasked_weight"),
        ("  path: pics\n  alpha_mask: true\n  unmasked_weight: 1.5\n", ":6 data.unmasked_weight"),
    ],
)
def test_options_of_masks_without_masks(tmp_path: Path, data: str, where: str) -> None:
    path = tmp_path / "r.yaml"
    problem = only_problem(path, MASKS + data)
    assert (
        where in problem.where
        and ("without masks" in problem.what or mentions(problem.what, "recipe/at-most-1"))
        and problem.fix
    )
    one_masked = "  unmasked_weight: 0.1\n  sources: [{path: a}, {path: b, alpha_mask: true}]\n"
    path.write_text(MASKS + one_masked, encoding="utf-8")
    assert load_recipe(str(path)).recipe.data.unmasked_weight == 0.1
