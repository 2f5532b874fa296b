"""All rules over several keys are checked in one round, from one table."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from lora_rocm.errors import RecipeError
from lora_rocm.families.registry import PRODUCT
from lora_rocm.recipe.family_rules import given_unread
from lora_rocm.recipe.judge import keys_of
from lora_rocm.recipe.key_rules.data_rules import CONTROL_KEYS, controls_of, holding
from lora_rocm.recipe.key_rules.table import RULES, rules_for, rules_of
from lora_rocm.recipe.kinds import NAMED_BY, every_kind, kinds_of, recipe_from
from lora_rocm.recipe.load import judge, load_recipe, shipped_recipes
from lora_rocm.recipe.rule import ALL, Rule, names_of, parts_of
from lora_rocm.recipe.schema import DataSection
from tests.recipe.rule_examples import EXAMPLES, LISTS, together

ROOT = Path(__file__).parents[2] / "lora_rocm"
TABLE: dict[str, Rule] = {rule.id: rule for spec in PRODUCT for rule in rules_for(spec)}


def broken(data: dict[str, Any]) -> set[str]:
    kinds = kinds_of(data)
    return {each.rule.id for each in judge(data, kinds, set(given_unread(data, kinds.family))).broken}


def problems(folder: Path, text: str) -> list[tuple[str, int]]:
    """(key, line) of every problem of a recipe."""
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    places = (problem.where.removeprefix(f"{path}:").partition(" ") for problem in caught.value.problems)
    return [(key, int(line)) for line, _, key in places]


# Four recipes with four mistakes each


IMAGE = """\
model:
  name_or_path: some/base
  quantization: int8
data:
  path: pics
  control_path: sketches
lora:
  use_dora: true
train:
  epochs: 3
  batch_sise: 2
  ema_decay: 0.9
optim:
  optimizer: adamw_schedule_free
sample:
  width: 100
"""
TRANSFORMER = """\
model:
  family: z-image
data:
  path: pics
  packing: true
objective:
  loss_type: l1
  huber_c: 0.5
train:
  epochs: 0
  max_train_steps: 100
sample:
  every_n_steps: 5
runtime:
  memory: keep
"""
CHAT = """\
model:
  family: causal-lm
  name_or_path: some/base
data:
  sources:
    - path: chats
      dataset: some/chats
    - dataset: other/chats
      resolution: 512
objective:
  beta: 0.2
train:
  epochs: 1
  mixed_precision: fp16
optim:
  lr: 1.0e-4
  optimizer: AdamW8bit
"""
DPO = """\
model:
  family: causal-lm
  name_or_path: some/base
data:
  sources:
    - dataset: some/pairs
      max_batch_size: 0
    - dataset: other/pairs
      split: 3
  packing: true
  watched:
    dataset: some/pairs
lora:
  rank: sixteen
  init: pissa
  dropout: 0.1
objective:
  loss: dpo
train:
  max_train_steps: 10
  epochs: 1
"""


@pytest.mark.parametrize(("text", "told"), [
    (IMAGE, [("data.control_path", 6), ("lora", 7), ("train.batch_sise", 11), ("train.ema_decay", 12),
             ("sample.width", 16)]),
    (TRANSFORMER, [("model.name_or_path", 1), ("data.packing", 5), ("objective.huber_c", 8), ("train.epochs", 10),
                   ("sample.every_n_steps", 13)]),
    (CHAT, [("data.sources[0].dataset", 7), ("data.sources[1].resolution", 9), ("objective.beta", 11),
            ("train.mixed_precision", 14), ("optim.lr", 16), ("optim.optimizer", 17)]),
    (DPO, [("data.sources[0].max_batch_size", 7), ("data.sources[1].split", 9), ("data.packing", 10),
           ("data.watched", 11), ("lora.rank", 14), ("lora.dropout", 16), ("train.epochs", 21)]),
], ids=["image", "transformer", "chat", "dpo"])  # fmt: skip
def test_all_mistakes_are_told_at_once(tmp_path: Path, text: str, told: list[tuple[str, int]]) -> None:
    assert problems(tmp_path, text) == told


# Each rule, and each pair of rules


@pytest.mark.parametrize("name", EXAMPLES)
def test_its_example_breaks_a_rule(name: str) -> None:
    data = together(EXAMPLES[name])
    assert data is not None and name in broken(data)
    if not TABLE[name].unless_written:
        with pytest.raises(ValidationError):
            recipe_from(data)  # recipes built in code obey the same table


def test_every_rule_has_an_example_and_a_name_of_its_own() -> None:
    assert EXAMPLES.keys() == TABLE.keys()
    for spec in PRODUCT:
        names = [rule.id for rule in rules_for(spec)]
        assert len(names) == len(set(names))


ALIKE = (
    *(",class_prompt", ",dataset", "relative-step-has-its-rate:", "start-from-the-base:", "schedule-reads:", "alone:"),
    *(":controls", ":control-images", "unread-by-", "data-not-both:", ",path"),
)
"""Rules made by one expression, which share these letters of their names. One of each stands for the others."""


def representatives() -> list[str]:
    kind = {name: next((letters for letters in ALIKE if letters in name), name) for name in EXAMPLES}
    return list({letters: name for name, letters in kind.items()}.values())


def reads_what_changes(rule: Rule, key: str) -> bool:
    """Whether a rule reads a key of another example. More entries of a list change nothing for the entries before."""
    names = names_of(parts_of(key))
    below = [parts for parts in rule.parts if names_of(parts)[: len(names)] == names]
    return any(key not in LISTS or ALL in parts or parts == names for parts in below)


def lost(names: list[str]) -> tuple[list[tuple[str, str]], int]:
    """(rule, other) where the example of the other prevents a rule from firing; and the number of pairs.

    The other may do that alone by a key that the rule reads, such as one that it needs, or by the kind of a section.
    """
    found, pairs = [], 0
    for one, other in combinations(names, 2):
        data = together(EXAMPLES[one], EXAMPLES[other])
        if data is None:
            continue
        pairs += 1
        told = broken(data)
        for name, beside in ((one, other), (other, one)):
            touched = {key for key, value in EXAMPLES[beside].items() if EXAMPLES[name].get(key) != value}
            kinds = touched & {".".join(key) for key in NAMED_BY}
            if name not in told and not kinds and not any(reads_what_changes(TABLE[name], key) for key in touched):
                found.append((name, beside))
    return found, pairs


def test_two_broken_rules_are_both_told() -> None:
    found, pairs = lost(representatives())
    assert not found and pairs > 1500, pairs


@pytest.mark.slow
def test_any_two_broken_rules_are_both_told() -> None:
    found, pairs = lost(list(EXAMPLES))
    assert not found and pairs > 8000, pairs


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_wrong_value_elsewhere_hides_no_rule(name: str) -> None:
    """A value that is wrong by itself, and an unknown key, in each section that the rule reads."""
    data = together(EXAMPLES[name])
    assert data is not None
    kinds = kinds_of(data)
    for section in {parts[0] for parts in TABLE[name].parts if isinstance(parts[0], str)}:
        fields = [key for key in kinds.section(section).model_fields if not TABLE[name].reads(f"{section}.{key}")]
        wrong = next((key for key in fields if (section, key) not in NAMED_BY), "no_such_key")
        data[section] = {**data.get(section, {}), wrong: {"no": "value"}, "unknown_key": 1}
    judged = judge(data, kinds, set(given_unread(data, kinds.family)))
    assert judged.recipe is None and name in {each.rule.id for each in judged.broken}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_wrong_value_that_a_rule_reads_is_told_alone(name: str) -> None:
    """The control: the rule is not checked then, whatever is in the place of the value."""
    rule = TABLE[name]
    data = together(EXAMPLES[name])
    assert data is not None
    kinds = kinds_of(data)
    for parts in rule.parts:
        if names_of(parts) not in keys_of(kinds.recipe):
            continue  # an optional key of another kind
        failed = {names_of(parts)[:2]}
        assert name not in {each.rule.id for each in judge(data, kinds, failed).broken}, parts


def test_a_sound_recipe_breaks_none(tmp_path: Path) -> None:
    for path in shipped_recipes().values():
        loaded = load_recipe(path)
        assert not broken(loaded.layers.data), path
    for family in PRODUCT.names:
        data = together({"model.family": family})
        assert data is not None and not broken(data) and recipe_from(data)


# What could be read, and what could not


def test_an_unknown_kind_and_an_unknown_key_are_both_told(tmp_path: Path) -> None:
    head = "model: {name_or_path: x}\ndata: {path: pics}\ntrain: {max_train_steps: 1}\n"
    both = head + "optim:\n  optimizer: AdamW8bit\n  lr: 1.0e-4\n"
    assert problems(tmp_path, both) == [("optim.optimizer", 5), ("optim.lr", 6)]
    # A key of some kinds may be one of the kind that is meant.
    assert problems(tmp_path, both.replace("lr", "d_coef")) == [("optim.optimizer", 5)]
    assert problems(tmp_path, head + "lora:\n  type: LoRA\n  rnk: 4\n  factor: 8\n") == [
        ("lora.type", 5),
        ("lora.rnk", 6),
    ]


def test_the_objective_of_an_unknown_family_is_not_judged_by_another(tmp_path: Path) -> None:
    text = "model:\n  family: fluxx\n  name_or_path: x\ndata: {path: pics}\ntrain: {max_train_steps: 1}\nobjective:\n"
    assert problems(tmp_path, text + "  shift: 3.0\n  nothing: 1\n") == [("model.family", 2), ("objective.nothing", 8)]


def test_rules_about_an_unknown_kind_are_not_checked(tmp_path: Path) -> None:
    text = (
        "model: {name_or_path: x, quantization: int8}\ndata: {path: pics}\ntrain: {max_train_steps: 1}\n"
        "lora:\n  type: {}\n  use_dora: true\n"
    )
    assert problems(tmp_path, text.replace("{}", "dora")) == [("lora.type", 5)]
    assert problems(tmp_path, text.replace("{}", "lora")) == [("lora", 4)]  # the control


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("train: 3\nlora:\n  init: pissa\n  dropout: 0.1\n", [("train", 3), ("lora.dropout", 6)]),
        ("lora:\n  init: pissa\n  dropout: 0.1\n", [("lora.dropout", 5), ("train", 0)]),
        (
            "train: {epochs: 1}\nlora:\n  new_tokens:\n  - init: cat\n  - token: <a>\n",
            [("lora.new_tokens[0].token", 6), ("lora.new_tokens[1]", 7)],
        ),
        (
            "train: {epochs: 1}\nruntime:\n  workers: true\n  persistent_workers: true\n",
            [("runtime.workers", 5)],  # whether it is 0 is not known
        ),
    ],
)
def test_what_is_missing_or_wrong_stops_only_the_rules_that_read_it(
    tmp_path: Path, text: str, told: list[tuple[str, int]]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {name_or_path: x}\ndata: {path: pics}\n" + text, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    found = [(key, f":{line} " in where if line else f":{line} " not in where)
             for (key, line), where in zip(told, (each.where for each in caught.value.problems), strict=True)
             if where.endswith(f" {key}")]  # fmt: skip
    assert found == [(key, True) for key, _ in told], caught.value


def test_what_is_built_in_code_is_told_whole() -> None:
    data = together(EXAMPLES["compiled-for-gpus"], EXAMPLES["activations-are-kept-or-recomputed"])
    with pytest.raises(ValidationError) as caught:
        recipe_from(data)
    assert [each["loc"] for each in caught.value.errors()] == [("runtime", "compile"), ("runtime", "memory")]


@pytest.mark.parametrize("name", CONTROL_KEYS)
@pytest.mark.parametrize("shared", [None, "c"])
def test_a_rule_sees_the_options_that_a_source_gets_from_data(shared: str | None, name: str) -> None:
    own: list[dict[str, Any]] = [
        {"path": "a"},
        {"path": "a", name: "own"},
        {"class_prompt": "a cat", "is_reg": True},
        {"class_prompt": "a cat", "is_reg": True, name: "own"},
    ]
    for number in range(len(own) + 1):
        for sources in combinations(own, number):
            data = DataSection.model_validate({"path": "a", "sources": sources, name: shared})
            given = [(each.get(name), each.get("class_prompt")) for each in sources]
            lists = [(shared, [path for path, _ in given]) if key == name else (None, [None] * number)
                     for key in CONTROL_KEYS]  # fmt: skip
            values = [value for pair in lists for value in pair]
            found = controls_of(number, [prompt for _, prompt in given], *values)
            assert data.has_controls == any(count for count, _ in found)
            if sources:
                resolved = [bool(source.control_places) for source in data.resolved_sources()]
                assert resolved == [bool(count) for count, _ in found]
                assert resolved == [holding(path, shared, prompt) for path, prompt in given]


# The table


def test_every_key_of_a_rule_is_a_key_of_some_recipe() -> None:
    known = {
        key for section in ("model", "lora", "optim") for kinds in every_kind(section) for key in keys_of(kinds.recipe)
    }
    for rule in TABLE.values():
        places = [parts_of(rule.at)] if rule.at else []
        assert {names_of(parts) for parts in (*rule.parts, *places)} <= known, rule.id
        assert not rule.only_if_set or ALL not in rule.parts[0], rule.id


def test_rules_are_found_by_a_key_that_they_read() -> None:
    for key in ("data.sources[0].mask_path", "data.sources[each].mask_path"):
        assert "source-not-both:mask_path,alpha_mask" in {rule.id for rule in rules_of(key)}
    assert {rule.id for rule in rules_of("runtime.memory")} == {"activations-are-kept-or-recomputed"}
    assert {rule.id for rule in rules_of("runtime")} > {rule.id for rule in rules_of("runtime.memory")}
    assert rules_of("timeouts.step") == () == rules_of("runtime.mem")
    found = {rule.keys[-1]: rules_of(rule.keys[-1]) for rule in RULES}
    assert all(rule in found[rule.keys[-1]] for rule in RULES)


def validators(source: str) -> Iterator[str]:
    """The methods that pydantic calls with a whole section."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                if any(isinstance(each, ast.Name | ast.Attribute) and getattr(each, "id", getattr(each, "attr", ""))
                       in ("model_validator", "root_validator") for each in ast.walk(decorator)):  # fmt: skip
                    yield node.name


def test_rules_over_several_keys_are_in_the_table_alone() -> None:
    """A validator of a section raises one problem, and none if another value is wrong."""
    files = [path for room in ("recipe", "families") for path in (ROOT / room).rglob("*.py")]
    found = [(path.name, name) for path in files for name in validators(path.read_text(encoding="utf-8"))]
    assert found == [("schema.py", "_rules_hold")]
    snippet = "class A:\n    @pydantic.model_validator(mode='after')\n    def _both(self): ...\n"
    assert list(validators(snippet)) == ["_both"]
