"""``optim.optimizer_args``: kohya's arguments of optimizers stand for typed keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lora_rocm.errors import RecipeError
from lora_rocm.recipe.comparison import resume_differences
from lora_rocm.recipe.kinds import NAMED_BY, OPTIMIZER, every_kind, kinds_of
from lora_rocm.recipe.load import dump_recipe, load_recipe
from lora_rocm.recipe.optim_sections import OPTIMIZERS, OptimSection
from lora_rocm.recipe.optimizer_args import names
from tests.wording import Worded, holds, says, worded

HEAD = """model: {name_or_path: "builtin:tiny-sdxl"}
data: {path: images}
train: {epochs: 1}
"""


def written(folder: Path, optim: str, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(f"{HEAD}optim: {optim}\n", encoding="utf-8")
    return path


def loaded(folder: Path, optim: str, *overrides: str) -> OptimSection:
    return load_recipe(written(folder, optim), overrides).recipe.optim


def refused(folder: Path, optim: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        loaded(folder, optim, *overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (
            'optimizer: adamw, optimizer_args: ["weight_decay=0.1", "betas=0.9,0.95", "eps=1e-6"]',
            {"weight_decay": 0.1, "betas": (0.9, 0.95), "epsilon": 1e-6},
        ),
        ('optimizer_args: ["weight_decay=0.1"]', {"weight_decay": 0.1}),
        (
            "optimizer: prodigy, optimizer_args: [decouple=True, weight_decay=0, d_coef=2, use_bias_correction=True, "
            "safeguard_warmup=True, 'betas=(0.9, 0.99)', beta3=None, slice_p=1], lr_warmup_steps: 1",
            {
                "weight_decay": 0.0,
                "d_coef": 2.0,
                "use_bias_correction": True,
                "safeguard_warmup": True,
                "betas": (0.9, 0.99),
            },
        ),
        (
            "optimizer: adafactor, optimizer_args: [scale_parameter=False, relative_step=True, warmup_init=True]",
            {"scale_parameter": False, "relative_step": True, "warmup_init": True},
        ),
        (
            "optimizer: dadapt_adam, optimizer_args: {growth_rate: 1.02, d0: '1e-5', decouple: true}",
            {"growth_rate": 1.02, "d0": 1e-5},
        ),
        ("optimizer: dadapt_adam, optimizer_args: [growth_rate=inf]", {"growth_rate": None}),
        (
            "optimizer: muon, optimizer_args: [momentum=0.9, adjust_lr_fn=original, eps=1e-7]",
            {"momentum": 0.9, "adjust_lr_fn": "original"},
        ),
        ("optimizer: adamw_schedule_free, optimizer_args: [warmup_steps=7, r=1]", {"lr_warmup_steps": 7, "r": 1.0}),
        ("optimizer: lion, weight_decay: 0.5, optimizer_args: [weight_decay=0.5]", {"weight_decay": 0.5}),
    ],
)
def test_arguments_are_the_typed_keys(tmp_path: Path, arguments: str, keys: dict[str, Any]) -> None:
    """A run stores typed keys alone, so a resume compares those."""
    recipe = load_recipe(written(tmp_path, f"{{{arguments}}}")).recipe
    assert {key: getattr(recipe.optim, key) for key in keys} == keys
    kept = tmp_path / "kept.yaml"
    kept.write_text(dump_recipe(recipe), encoding="utf-8")
    again = load_recipe(kept).recipe
    assert again == recipe and "optimizer_args" not in kept.read_text(encoding="utf-8")


def test_a_resume_compares_values_and_not_how_they_are_written(tmp_path: Path) -> None:
    old = load_recipe(written(tmp_path, "{weight_decay: 0.1}")).recipe
    for value, differs in (("0.1", []), ("0.2", ["optim.weight_decay"])):
        new = load_recipe(written(tmp_path, f"{{optimizer_args: [weight_decay={value}]}}", "new.yaml")).recipe
        assert [each.where for each in resume_differences(old, new)] == differs


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "optimizer_args: [d_coef=2]",
            [
                "recipe.yaml:4 optim.optimizer_args[0]",
                "adamw takes no 'd_coef'",
                worded("recipe/d-coef-is-an-argument-of-prodigy"),
                "It takes weight_decay, betas, epsilon (eps).",
            ],
        ),
        ("optimizer: prodigy, optimizer_args: {decouple: false}", ["decouple of prodigy is always True, got False"]),
        ("optimizer: prodigy, optimizer_args: [growth_rate=1.02]", ["growth_rate of prodigy is always inf, got 1.02"]),
        ("optimizer: adamw, optimizer_args: [beta1=0.9]", ["adamw takes no 'beta1'", "argument of adafactor"]),
        (
            "optimizer: adamw, optimizer_args: [beta2=0.9]",
            ["adamw takes no 'beta2'", "Write optim.betas: [beta1, beta2]"],
        ),
        ("optimizer_args: [lr=1]", ["adamw takes no 'lr'", "Write optim.learning_rate."]),
        ("optimizer_args: [learning_rate=1]", ["adamw takes no 'learning_rate'", "Write optim.learning_rate."]),
        (
            "optimizer_args: [eps=1e-6, epsilon=1e-7]",
            ["epsilon is 1e-07, and ", "recipe.yaml:4 optim.optimizer_args.eps is"],
        ),
        (
            "weight_decay: 0.2, optimizer_args: [weight_decay=0.1]",
            ["weight_decay is 0.1, and ", "optim.weight_decay is 0.2"],
        ),
        ("optimizer_args: [weight_decay=-1]", [worded("recipe/optim-optimizer-args-weight-decay-has-to")]),
        ("optimizer_args: [weight_decay=True]", [worded("recipe/optim-optimizer-args-weight-decay-expected-a")]),
        ("optimizer_args: ['betas=0.9,2']", [worded("recipe/optim-optimizer-args-betas-1-has-to")]),
        ("optimizer_args: [weight_decay=x]", [worded("recipe/optim-optimizer-args-weight-decay-expected-a-2")]),
        ("optimizer_args: weight_decay=1", [worded("recipe/expected-a-list-or-a-mapping-got")]),
        (
            "optimizer_args: [weight_decay, 3]",
            [worded("recipe/expected-name-value-got-weight-decay"), worded("recipe/expected-name-value-got-3")],
        ),
        ("optimizer: adamm, optimizer_args: [weight_decay=1]", [worded("recipe/expected-one-of-adamw")]),
    ],
)
def test_what_an_optimizer_cannot_do_is_an_error(tmp_path: Path, arguments: str, said: list[str | Worded]) -> None:
    message = refused(tmp_path, f"{{{arguments}}}")
    assert all(holds(message, part) for part in said), message


def test_a_layer_above_takes_precedence(tmp_path: Path) -> None:
    """As for any key. In one layer two values are an error, also in two --set."""
    base = "{optimizer_args: {eps: 1e-6, weight_decay: 0.3}}"
    assert loaded(tmp_path, base, "optim.weight_decay=0.4").weight_decay == 0.4
    assert loaded(tmp_path, "{weight_decay: 0.3}", "optim.optimizer_args=[weight_decay=0.4]").weight_decay == 0.4
    section = loaded(tmp_path, base, "optim.optimizer_args.epsilon=1e-5")
    assert (section.model_dump()["epsilon"], section.weight_decay) == (1e-5, 0.3)
    top = tmp_path / "top.yaml"
    top.write_text("base: recipe.yaml\noptim: {optimizer: prodigy, weight_decay: 0.5}\n", encoding="utf-8")
    assert load_recipe(top).recipe.optim.weight_decay == 0.5
    twice = refused(tmp_path, base, "optim.weight_decay=0.4", "optim.optimizer_args.weight_decay=0.5")
    assert "weight_decay is 0.5, and --set optim.weight_decay is 0.4" in twice


def test_the_tables_name_what_is_there() -> None:
    for row in names().renamed:
        for optimizer in row.optimizers:
            fields = OPTIMIZERS[optimizer].model_fields
            assert row.key in fields and row.name not in fields, row
    assert all(row.optimizers or row.name == "decouple" for row in names().fixed)
    for fixed in names().fixed:
        assert all(fixed.name not in OPTIMIZERS[each].model_fields for each in fixed.optimizers), fixed


@pytest.mark.parametrize(
    ("optim", "overrides", "what", "fix"),
    [
        (
            "{optimizer: prodgy, %s}",
            (),
            worded("recipe/optim-optimizer-expected-one-of"),
            worded("recipe/did-you-mean-prodigy"),
        ),
        (
            "{optimiser: prodigy, %s}",
            (),
            worded("recipe/optim-optimiser-there-is-no-such-key"),
            worded("recipe/did-you-mean-optim-optimizer"),
        ),
        (
            "{optimizer_type: Prodigy, %s}",
            (),
            worded("recipe/optim-optimizer-type-there-is"),
            worded("recipe/did-you-mean-optim-optimizer-other"),
        ),
        (
            "{%s}",
            ("train.optimizer_type=Prodigy",),
            worded("recipe/train-optimizer-type-there"),
            worded("recipe/mean-optim-optimizer-other-trainers"),
        ),
    ],
)
def test_an_unknown_optimizer_is_the_only_problem(
    tmp_path: Path, optim: str, overrides: tuple[str, ...], what: Worded, fix: Worded
) -> None:
    """The keys and arguments of the named optimizer are not judged by the default one, which has two ``betas``."""
    of_another = "betas: [0.9, 0.99, 0.999], d_coef: 2, optimizer_args: [use_bias_correction=True]"
    said = refused(tmp_path, optim % of_another, *overrides)
    assert "has 1 problem." in said and says(said, what) and says(said, fix)
    assert "optim.learning_rate" in refused(tmp_path, optim % "learning_rate: -1", *overrides), "all optimizers have it"
    assert "has 3 problems." in refused(tmp_path, f"{{optimizer: adamw, {of_another}}}"), "the control"


def test_no_key_of_a_recipe_is_taken_for_that_of_its_kind() -> None:
    for section, name in NAMED_BY:
        every = {key for each in every_kind(section) for key in each.section(section).model_fields} - {name}
        assert kinds_of({section: dict.fromkeys(every)}).unknown == frozenset()
    assert kinds_of({"optim": {"optimiser": "lion"}}).unknown == {OPTIMIZER}, "the control"
