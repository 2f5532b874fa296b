"""Pydantic's findings in the user's words."""

from typing import Any, cast

import pytest

from lora_rocm.errors import Problem
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.recipe.adapter_sections import ADAPTERS, AdapterSection
from lora_rocm.recipe.explain import boolean_problems, explain, shown
from lora_rocm.recipe.kinds import kinds_of, recipe_from
from lora_rocm.recipe.yaml_tree import dotted
from tests.families.toy_families import TOYS
from tests.recipe.test_reference import ToyAdapter
from tests.wording import Worded, holds, mentions, says, worded

GOOD: dict[str, Any] = {
    "model": {"name_or_path": "builtin:tiny-sdxl"},
    "data": {"path": "pics"},
    "train": {"max_train_steps": 10},
}


def problems_of(registry: FamilyRegistry = FAMILIES, **changes: Any) -> list[Problem]:
    from pydantic import ValidationError

    data = GOOD | changes
    with pytest.raises(ValidationError) as caught:
        recipe_from(data, registry)
    return explain(caught.value, data, dotted, kinds_of(data, registry))


@pytest.mark.parametrize(
    ("changes", "where", "what", "fix"),
    [
        ({"lora": {"rank": "sixteen"}}, "lora.rank", worded("recipe/expected-a-whole-number-got-sixteen"), ""),
        ({"lora": {"rank": 1.5}}, "lora.rank", worded("recipe/expected-a-whole-number-got-1-5"), ""),
        (
            {"lora": {"rank": 0}},
            "lora.rank",
            worded("recipe/has-to-be-greater-than-0-got"),
            worded("recipe/the-default-is-16"),
        ),
        (
            {"lora": {"type": "lokr", "rank": 10000}},
            "lora.rank",
            worded("recipe/has-to-be-at-most-2048"),
            worded("recipe/of-a-lokr-2048-means-what-10000"),
        ),
        (
            {"lora": {"rank": 10000}},
            "lora.rank",
            worded("recipe/has-to-be-at-most-2048-got"),
            worded("recipe/rank-of-the-update"),
        ),
        ({"lora": {"dropout": 1}}, "lora.dropout", worded("recipe/has-to-be-less-than-1-0"), ""),
        ({"lora": {"use_dora": "maybe"}}, "lora.use_dora", worded("recipe/expected-true-or-false-got-maybe"), ""),
        (
            {"data": {"random_crop": 65}},
            "data.random_crop",
            worded("recipe/has-to-be-at-most-64-got"),
            worded("recipe/one-for-each-image"),
        ),
        ({"data": {"random_crop": "much"}}, "data.random_crop", worded("recipe/expected-true-or-false-or-a-whole"), ""),
        (
            {"data": {"resolution": []}},
            "data.resolution",
            worded("recipe/has-too-few-values"),
            worded("recipe/a-list-such-as"),
        ),
        (
            {"lora": {"init": "pissa", "dropout": 0.1}},
            "lora.dropout",
            worded("recipe/does-not-go-with-init-pissa"),
            "Remove dropout",
        ),
        ({"lora": {"targets": 3}}, "lora.targets", worded("recipe/expected-text-or-a-list-got-3"), '"3"'),
        ({"lora": {"targets": ["a", 3]}}, "lora.targets", worded("recipe/expected-text"), ""),
        ({"lora": 3}, "lora", worded("recipe/expected-a-section-with-keys-got-3"), ""),
        ({"output": {"name": 7}}, "output.name", worded("recipe/expected-text-got-7"), worded("recipe/in-quotes-7")),
        ({"output": {"dtype": "fp61"}}, "output.dtype", worded("recipe/expected-one-of-fp16-bf16-fp32-got"), "fp16"),
        ({"optim": {"betas": [0.9]}}, "optim.betas", worded("recipe/has-too-few-values-0-9"), ""),
        ({"model": {}}, "model.name_or_path", worded("recipe/is-missing"), "diffusers folder"),
        (
            {"train": {}},
            "train",
            worded("recipe/give-exactly-one-of-max-train-steps"),
            "Add max_train_steps or epochs.",
        ),
        (
            {"train": {"epochs": 1, "max_train_steps": 2}},
            "train.max_train_steps",
            worded("recipe/give-exactly-one"),
            worded("recipe/remove-one-of"),
        ),
        (
            {"train": {"max_train_steps": 2, "epochs": 1}},
            "train.epochs",
            worded("recipe/give-exactly-one"),
            worded("recipe/remove-one-of-them"),
        ),
        ({"data": {}}, "data", worded("recipe/give-exactly-one-of-path-and-sources"), "Add path or sources."),
        (
            {"data": {"path": "a", "sources": [{"path": "b"}]}},
            "data.sources",
            worded("recipe/exactly-one"),
            worded("recipe/remove-one-of-them-path"),
        ),
        (
            {"data": {"sources": [{}]}},
            "data.sources[0]",
            worded("recipe/give-exactly-one-of-path-and-dataset"),
            worded("recipe/add-path-or-dataset"),
        ),
        (
            {"data": {"path": "a", "mask_path": "b", "alpha_mask": True}},
            "data.mask_path",
            worded("recipe/a-cannot-have-both-mask-path-and"),
            worded("recipe/remove-one-of-them"),
        ),
        (
            {"data": {"mask_path": "b", "sources": [{"path": "a"}, {"dataset": "c"}]}},
            "data.mask_path",
            worded("recipe/c-cannot-have-both-mask-path-and"),
            worded("recipe/rows-of-a-dataset-have-no-file"),
        ),
        (
            {"model": {"name_or_path": "a", "quantization": "nf4"}, "lora": {"use_dora": True}},
            "lora",
            worded("recipe/dora-needs-dense-weights-and-model-quantization"),
            worded("recipe/train-without-lora-use-dora"),
        ),
        (
            {"data": {"dataset": "x"}},
            "data.dataset",
            worded("recipe/no-such-key"),
            "Write data.sources: [{dataset: 'x'}]",
        ),
        (
            {"optim": {"optimizer": "AdamW8bit"}},
            "optim.optimizer",
            worded("recipe/one-of-adamw-adamw-8bit"),
            "Write adamw_8bit.",
        ),
        ({"optim": {"optimizer": "Prodigy"}}, "optim.optimizer", worded("recipe/got-prodigy"), "Write prodigy."),
        (
            {"optim": {"optimizer": "DAdaptAdam"}},
            "optim.optimizer",
            worded("recipe/got"),
            "Write dadapt_adam;",
        ),
        (
            {"optim": {"optimizer": "SGD"}},
            "optim.optimizer",
            worded("recipe/got"),
            worded("recipe/adamw-with-optim-learning-rate-1-0e"),
        ),
        (
            {"optim": {"optimizer": "bitsandbytes.optim.PagedAdamW8bit"}},
            "optim.optimizer",
            worded("recipe/got"),
            "Write adamw_8bit;",
        ),
        (
            {"optim": {"optimizer": "SCHEDULE_FREE_ADAMW"}},
            "optim.optimizer",
            worded("recipe/got"),
            "Write adamw_schedule_free.",
        ),
        (
            {"optim": {"lr_scheduler": "adafactor"}},
            "optim.lr_scheduler",
            worded("recipe/got"),
            "optim.relative_step: true",
        ),
        (
            {"optim": {"optimizer": "adafactor", "relative_step": True, "learning_rate": 1e-3}},
            "optim.learning_rate",
            worded("recipe/is-not-read-with-relative-step"),
            "Remove learning_rate",
        ),
        (
            {"optim": {"optimizer": "adafactor", "warmup_init": True}},
            "optim.warmup_init",
            worded("recipe/does-nothing-without-relative-step"),
            worded("recipe/set-relative-step-true"),
        ),
        (
            {"optim": {"optimizer": "adamw_schedule_free", "lr_scheduler": "cosine"}},
            "optim.lr_scheduler",
            worded("recipe/averages-in-place-of-a-schedule"),
            "Remove lr_scheduler",
        ),
        (
            {"optim": {"optimizer": "adamw_schedule_free"}, "train": {"ema_decay": 0.9, "epochs": 1}},
            "train.ema_decay",
            worded("recipe/keeps-an-average-of-its-own"),
            "Remove train.ema_decay.",
        ),
        (
            {"optim": {"optimizer": "adamw_schedule_free"}, "lora": {"weight_dtype": "bf16"}},
            "optim.optimizer",
            worded("recipe/is-not-for-lora-weight-dtype-bf16"),
            worded("recipe/set-lora-weight-dtype-fp32-or-take"),
        ),
        (
            {"optim": {"optimizer": "adamw_bf16"}},
            "optim.optimizer",
            worded("recipe/is-not-for-lora-weight-dtype-fp32"),
            "Set lora.weight_dtype: bf16",
        ),
        (
            {"lora": {"weight_dtype": "fp16"}},
            "optim.optimizer",
            worded("recipe/is-not-for-lora-weight-dtype-fp16"),
            "another optimizer: adamw_8bit, adafactor, came.",
        ),
        ({"optim": {"optimizer": "ADAMW"}}, "optim.optimizer", worded("recipe/got"), "Write adamw."),
        (
            {"optim": {"lr_scheduler": "constant_with_warmup"}},
            "optim.lr_scheduler",
            worded("recipe/got"),
            "constant, and optim.lr_warm",
        ),
        (
            {"optim": {"lr_scheduler": "cosine_with_min_lr"}},
            "optim.lr_scheduler",
            worded("recipe/got"),
            "Write cosine, and optim.lr_min_ratio",
        ),
        (
            {"optim": {"lr_warmup_steps": 0.05}},
            "optim.lr_warmup_steps",
            worded("recipe/a-whole-number"),
            "lr_warmup_ratio: 0.05",
        ),
        (
            {"train": {"mixed_precision": "bfloat16"}},
            "train.mixed_precision",
            worded("recipe/got-bfloat16"),
            "Write bf16.",
        ),
        ({"output": {"dtype": "float"}}, "output.dtype", worded("recipe/got-float"), "Write fp32."),
        ({"runtime": {"device": "cuda:0"}}, "runtime.device", worded("recipe/got-cuda-0"), "Write gpu"),
        (
            {"data": {"path": "a", "resolution": "1024,768"}},
            "data.resolution",
            worded("recipe/a-whole-number"),
            worded("recipe/same-area-887"),
        ),
        (
            {"data": {"path": "a", "resolution": [512, 512]}},
            "data.resolution",
            worded("recipe/has-512-twice"),
            "Remove one",
        ),
        (
            {"data": {"path": "a", "resolution": [512, "x"]}},
            "data.resolution[1]",
            worded("recipe/a-whole-number-got-x"),
            "",
        ),
        (
            {"optim": {"betas": [0.9]}},
            "optim.betas",
            worded("recipe/has-too-few-values-0-9"),
            worded("recipe/the-default-is-0-9-0-999"),
        ),
        ({"data": {"path": "a", "resolution": 0}}, "data.resolution", worded("recipe/greater-than-0"), ""),
        (
            {"output": {"formats": ["safetensors"]}},
            "output.formats[0]",
            worded("recipe/expected-one-of"),
            "Write kohya",
        ),
        ({"data": {"sources": [{"path": 3}]}}, "data.sources[0].path", worded("recipe/expected-text-got-3"), ""),
        (
            {"data": {"sources": [{"repets": 3, "path": "a"}]}},
            "data.sources[0].repets",
            worded("recipe/no-such-key"),
            "repeats",
        ),
        (
            {"lora": {"new_tokens": [{"token": "a b", "init": "x"}]}},
            "lora.new_tokens[0].token",
            worded("recipe/cannot-be-a-b"),
            "blank",
        ),
        (
            {"lora": {"new_tokens": [{"token": "a" * 65, "init": "x"}]}},
            "lora.new_tokens[0].token",
            worded("recipe/is-too-long"),
            "",
        ),
        (
            {"sample": {"prompts": [{"a cat": "big"}]}},
            "sample.prompts[0]",
            worded("recipe/a-colon"),
            'quote it: "a cat: big"',
        ),
        (
            {"sample": {"prompts": ["a"], "width": 100}},
            "sample.width",
            worded("recipe/a-multiple-of-8"),
            "Take 96 or 104.",
        ),
        (
            {"runtime": {"device": "cpu", "compile": "full"}},
            "runtime.compile",
            worded("recipe/is-for-gpus"),
            "Remove compile",
        ),
        (
            {"lora": {"rank_dropout": 0.1}, "runtime": {"compile": "full"}},
            "lora.rank_dropout",
            worded("recipe/does-not-go-with"),
            "or runtime",
        ),
        (
            {"runtime": {"memory": "keep"}, "train": {"epochs": 1, "gradient_checkpointing": True}},
            "runtime.memory",
            worded("recipe/recomputes-all"),
            "Remove one",
        ),
        ({"loraa": {}}, "loraa", worded("recipe/there-is-no-such-key"), worded("recipe/did-you-mean-lora")),
    ],
)
def test_one_problem(changes: dict[str, Any], where: str, what: Worded, fix: str | Worded) -> None:
    (problem,) = problems_of(**changes)
    assert problem.where == where
    assert says(problem.what, what)
    assert holds(problem.fix, fix)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("output", "dtype", "fp8"),
        ("output", "dtype", "int8"),
        ("lora", "weight_dtype", "fp16"),
        ("train", "mixed_precision", "fp8"),
        ("optim", "lr_scheduler", "inverse_sqrt"),
    ],
)
def test_another_value_is_not_proposed_for_its_letters(section: str, key: str, value: str) -> None:
    train = {"max_train_steps": 10}
    (problem,) = problems_of(**{"train": train, section: {**(train if section == "train" else {}), key: value}})
    assert not mentions(problem.fix, "recipe/did-you-mean") and "Write" not in problem.fix
    assert says(problems_of(loraa={})[0].fix, "recipe/did-you-mean"), "the control"


@pytest.mark.parametrize(
    "changes",
    [
        {"lora": {"alpha": "nan"}}, {"lora": {"rank": "nan"}}, {"lora": {"rank": "[1"}}, {"lora": {"rank": 1e100}},
        {"lora": {"rank": None}}, {"lora": {"type": None}}, {"lora": {"targets": None}}, {"lora": {"dropout": "inf"}},
        {"optim": {"betas": [0.9]}}, {"optim": {"betas": [0.9, 0.9, 0.9]}}, {"optim": {"betas": ["nan", 0.9]}},
        {"data": {"path": "x", "exclude": 5}}, {"train": {"max_train_steps": 3, "seed": -1}},
        {"output": {"name": None}},
    ],
)  # fmt: skip
def test_every_problem_has_a_fix(changes: dict[str, Any]) -> None:
    found = problems_of(**{"train": {"max_train_steps": 3}, **changes})
    assert found and all(problem.fix and "None" not in problem.what for problem in found)


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_no_number_of_a_recipe_is_infinite(value: str) -> None:
    (problem,) = problems_of(train={"max_train_steps": 3}, optim={"learning_rate": value})
    assert problem.what == worded("recipe/has-to-be-a-finite-number-got", value=value) and says(
        problem.fix, "recipe/the-default-is-0-0001"
    )


def test_a_kind_in_capitals_is_recognised() -> None:
    assert problems_of(train={"max_train_steps": 3}, lora={"type": "LoKr"})[0].fix == "Write lokr."
    assert says(
        problems_of(train={"max_train_steps": 3}, lora={"type": "glora"})[0].fix, "recipe/nothing-else-is-trained"
    )


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"lora": {"rank": True}}, ["lora.rank"]),
        ({"lora": {"alpha": False}}, ["lora.alpha"]),
        ({"optim": {"betas": [True, 0.9]}}, ["optim.betas"]),
        ({"data": {"sources": [{"path": "a", "repeats": True}]}}, ["data.sources[0].repeats"]),
        ({"lora": {"use_dora": True, "rank": 3}, "unknown": True}, []),
    ],
)
def test_true_is_no_number(changes: dict[str, Any], where: list[str]) -> None:
    found = boolean_problems(GOOD | changes, dotted, kinds_of(GOOD | changes))
    assert [problem.where for problem in found.values()] == where == [dotted(key) for key in found]


def test_shown_is_short_and_printable() -> None:
    assert shown("x" * 100).endswith("...") and len(shown("x" * 100)) == 60
    assert shown("a\nb") == r"'a\nb'"
    assert shown("größe") == "'größe'"
    assert shown({"a": 1}) == "a section"


@pytest.mark.parametrize(
    ("family", "changes", "where", "fix"),
    [
        (
            "sdxl",
            {"model": {"text_encoder_quantization": "nf4"}},
            "model.text_encoder_quantization",
            worded("recipe/model-text-encoder-quantization-is-a-key"),
        ),
        ("toy-text", {"model": {"vae": "x"}}, "model.vae", worded("recipe/model-vae-is-a-key-of-model")),
        (
            "toy-text",
            {"objective": {"shift": 1}},
            "objective.shift",
            worded("recipe/objective-shift-is-a-key-of-model"),
        ),
        (
            "toy-text",
            {"objective": {"label_smothing": 1}},
            "objective.label_smothing",
            worded("recipe/did-you-mean-objective-label-smoothing"),
        ),
        ("sdxl", {"lora": {"toys": 1}}, "lora.toys", worded("recipe/lora-toys-is-a-key-of-lora")),
        (
            "sdxl",
            {"lora": {"type": "toy", "use_dora": True}},
            "lora.use_dora",
            worded("recipe/lora-use-dora-is-a-key-of"),
        ),
        ("sdxl", {"lora": {"type": "toy", "rnk": 1}}, "lora.rnk", worded("recipe/did-you-mean-lora-rank")),
    ],
)
def test_a_key_of_another_kind_is_said_to_be_one(
    family: str, changes: dict[str, Any], where: str, fix: Worded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cast(dict[str, type[AdapterSection]], ADAPTERS), "toy", ToyAdapter)
    model = {"family": family, "name_or_path": "x", **changes.pop("model", {})}
    (problem,) = problems_of(TOYS, **changes, model=model)
    assert (problem.where, problem.what) == (where, worded("recipe/there-is-no-such-key")) and says(problem.fix, fix)


@pytest.mark.parametrize(
    "changes",
    [{"output": {"formats": []}}, {"lora": {"targets": []}}, {"lora": {"targets": ""}}, {"lora": {"targets": [""]}}],
)
def test_what_would_leave_nothing_is_refused(changes: dict[str, Any]) -> None:
    assert problems_of(train={"max_train_steps": 3}, **changes)
